"""How packets are made smaller: a press, a quantiser, both, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvpacket_rag.compress.compression import Compression
from kvpacket_rag.compress.scheme import SCHEMES, Scheme, find_scheme


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is done to packets before they are stored; nothing by default.

    Attributes:
        compression: tokens left out; None for all kept.
        scheme: numbers in few bits; None for those of the model.
    """

    compression: Compression | None = None
    scheme: Scheme | None = None

    @classmethod
    def of(cls, compress: str | Compression | None = None, quantize: str | Scheme | None = None) -> Self:
        """As it is asked for, in words or not; None and ``"none"`` for nothing.

        Raises:
            PacketError: what is asked for is not known.
        """
        if isinstance(compress, str):
            compress = None if compress == "none" else Compression.parse(compress)
        if isinstance(quantize, str):
            quantize = find_scheme(quantize)
        return cls(compress if compress and compress.ratio else None, quantize)

    @classmethod
    def parse(cls, label: str) -> Self:
        """From ``"reread:0.3+k8v4"``, ``"reread-0.3"`` or ``"k8v4"``.

        Raises:
            PacketError: what is asked for is not known.
        """
        first, _, second = label.partition("+")
        if not second and (first in SCHEMES or first == "none"):
            return cls.of(None, first)
        return cls.of(first, second or None)

    def __str__(self) -> str:
        parts = [str(self.compression)] if self.compression else []
        parts += [self.scheme.name] if self.scheme else []
        return "+".join(parts) or "none"


UNREDUCED = Reduction()
