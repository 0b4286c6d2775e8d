"""Which tensors of a packet are stored in how many bits, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpacket_rag.compress.quantized import GROUP
from kvpacket_rag.errors import PacketError
from kvpacket_rag.rope import TensorGroup


@dataclass(frozen=True, slots=True)
class Grain:
    """How one tensor is quantised.

    Attributes:
        bits: of a code, 8 or 4.
        along: what shares a scale: all ``"tokens"`` of a channel, or all ``"channels"`` of a token.
        group: how many of them do; None for all.
    """

    bits: Literal[8, 4]
    along: Literal["tokens", "channels"]
    group: int | None = None

    def __str__(self) -> str:
        size = f" in groups of {self.group}" if self.group else ""
        return f"{self.bits} bits a {'channel' if self.along == 'tokens' else 'token'}{size}"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to quantise packets.

    Keys have channels that are large for every token, values have none, so keys share a scale along a channel and
    values along a token (KIVI, arXiv 2402.02750).

    Attributes:
        name: as it is asked for.
        keys: of keys, and of all else that carries a position or serves as keys.
        values: of values.
    """

    name: str
    keys: Grain
    values: Grain

    @property
    def settings(self) -> str:
        """What a packet's signature says of it."""
        return f"{self.name}: keys {self.keys}, values {self.values}; first token 16 bits, scales bfloat16"

    def grain(self, group: TensorGroup) -> Grain:
        """How tensors of that group are quantised; what may serve as keys is treated as keys."""
        return self.values if group.name == "values" and group.rotation is None else self.keys


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", Grain(8, "tokens"), Grain(8, "channels")),
        Scheme("k8v4", Grain(8, "tokens"), Grain(4, "channels")),
        Scheme("int4", Grain(4, "tokens", GROUP), Grain(4, "channels", GROUP)),
    )
}


def find_scheme(name: str) -> Scheme | None:
    """The scheme of a name; None for ``"none"``.

    Raises:
        PacketError: there is no such scheme; those there are, are listed.
    """
    if name == "none":
        return None
    if name not in SCHEMES:
        raise PacketError(f"there is no way to quantise called {name!r}; known are none, {', '.join(SCHEMES)}")
    return SCHEMES[name]
