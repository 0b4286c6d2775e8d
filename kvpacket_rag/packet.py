"""The packet: a chunk's keys and values at rest, and the identity that keeps it from being mistaken."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from kvpacket_rag.compress.kept import unpack_positions
from kvpacket_rag.compress.quantized import PARTS, QuantizedTensor
from kvpacket_rag.errors import PacketError, PacketMismatchError

FORMAT_VERSION = 1
_HASH = re.compile("[0-9a-f]{32,}")


@dataclass(frozen=True, slots=True)
class PacketSignature:
    """What the writer and the reader of a packet must share, or the answer would be nonsense.

    Attributes:
        weights: SHA-256 over the model's parameters (their content, never a name or a path).
        tokenizer: SHA-256 over the tokenizer's serialised state.
        adapter: SHA-256 over header and trailer, or ``"none"``.
        rope: SHA-256 over the measured rotary plan (layouts, widths, frequencies).
        dtype: of the cached tensors, such as ``"float32"``.
        compression: name and settings of the press, or ``"none"``.
        quantization: name and settings of the quantiser, or ``"none"``.
        format_version: of the packet layout.
    """

    weights: str
    tokenizer: str
    adapter: str
    rope: str
    dtype: str
    compression: str = "none"
    quantization: str = "none"
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """A canonical text: equal signatures give equal strings, different ones never do."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PacketSignature:
        """The inverse of :meth:`to_json`.

        Raises:
            PacketError: the text is no signature.
        """
        try:
            values = json.loads(text)
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise PacketError(f"not a packet signature: {text[:80]!r} ({error})") from error

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def differing(self, other: PacketSignature) -> list[str]:
        """Names of the fields in which the two differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def difference(self, found: PacketSignature) -> str:
        """In which fields another signature differs, with both values; hashes are cut short."""
        names = self.differing(found)
        values = (f"{n}: packet has {_shown(getattr(found, n))}, reader has {_shown(getattr(self, n))}" for n in names)
        return f"{' and '.join(names)} differ ({'; '.join(values)})"

    def require(self, found: PacketSignature, packet_id: str) -> None:
        """Check a packet against the reader.

        Raises:
            PacketMismatchError: naming every field in which ``found`` differs from this signature.
        """
        if self.differing(found):
            raise PacketMismatchError(
                f"packet {packet_id!r} cannot be read here: {self.difference(found)}; "
                "open it with the model and adapter that wrote it, or encode the chunk again"
            )


def _shown(value: str | int) -> str:
    return _HASH.sub(lambda found: f"{found[0][:12]}…", repr(value))


def packet_id(token_ids: Sequence[int], signature: PacketSignature) -> str:
    """The name of the packet of a tokenised chunk: SHA-256 over signature and token ids, in hex.

    Equal across processes and machines, and different as soon as one field of the signature or
    one token differs, so a stale or foreign packet cannot be found.
    """
    digest = hashlib.sha256(signature.digest.encode())
    for token in token_ids:
        digest.update(token.to_bytes(8, "little"))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Packet:
    """The cached tensors of one chunk, encoded alone from position 0.

    Attributes:
        packet_id: see :func:`packet_id`.
        signature: what it was made with.
        tensors: as they are stored; see :attr:`groups`. Read them, never write them.
        span: positions the packet takes in a prompt: header, chunk and trailer. Compression lowers
            the stored tokens, never the span.
        num_tokens: tokens of the chunk's own text.
    """

    packet_id: str
    signature: PacketSignature
    tensors: tuple[Tensor, ...]
    span: int
    num_tokens: int

    def __post_init__(self) -> None:
        self._check_groups()
        if self.signature.compression != "none":
            self._check_kept()
        if not 1 <= self.num_slots <= self.span:
            raise PacketError(
                f"packet {self.packet_id!r} holds {self.num_slots} tokens for a span of {self.span} positions; "
                "expected 1 up to the span"
            )
        if not 0 < self.num_tokens <= self.span:
            raise PacketError(
                f"packet {self.packet_id!r} has {self.num_tokens} tokens of text in a span of {self.span}; "
                "expected 1 up to the span"
            )

    def _check_groups(self) -> None:
        quantized = self.signature.quantization != "none"
        stored = self._stored
        if not stored or (quantized and len(stored) % PARTS):
            raise PacketError(
                f"packet {self.packet_id!r} has {len(self.tensors)} tensors; expected one for each group of the model"
                + (f", in {PARTS} parts" if quantized else "")
            )
        dtype = getattr(torch, self.signature.dtype, None)
        for tensor in stored:
            if tensor.dim() != 4 or tensor.requires_grad or not (quantized or tensor.dtype == dtype):
                raise PacketError(
                    f"packet {self.packet_id!r} holds a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}; "
                    f"expected (layers, heads, tokens, width), {self.signature.dtype}, without gradient"
                )
        if len({group.shape[2] for group in self.groups}) > 1:
            raise PacketError(
                f"packet {self.packet_id!r} holds tensors of different numbers of tokens; encode it again"
            )

    def _check_kept(self) -> None:
        bits = self.tensors[-1]
        if bits.dtype != torch.uint8 or bits.dim() != 3 or bits.shape[2] != -(-self.span // 8):
            raise PacketError(
                f"packet {self.packet_id!r} ends with a tensor of shape {tuple(bits.shape)} and {bits.dtype}; expected "
                f"a bit for each of {self.span} positions, (layers, heads, octets) uint8, of the tokens it kept"
            )

    @property
    def _stored(self) -> tuple[Tensor, ...]:
        """Those of the tensors that hold keys and values."""
        return self.tensors if self.signature.compression == "none" else self.tensors[:-1]

    @property
    def groups(self) -> tuple[Tensor | QuantizedTensor, ...]:
        """One a group of the rotary plan, each (layers, heads, tokens, width); rotated once, from position 0.

        Raises:
            PacketError: the parts of a quantised one do not fit each other.
        """
        if self.signature.quantization == "none":
            return self._stored
        parts = self._stored
        return tuple(QuantizedTensor(*parts[start : start + PARTS]) for start in range(0, len(parts), PARTS))

    @property
    def num_slots(self) -> int:
        """Tokens it holds, of every head: the slots it takes in a context."""
        return self.groups[0].shape[2]

    @property
    def kept(self) -> Tensor | None:
        """(layers, heads, tokens) positions within the span, ascending; None if nothing was left out.

        Layers are those that cache anything, in order.

        Raises:
            PacketError: the heads do not keep equally many.
        """
        return None if self.signature.compression == "none" else unpack_positions(self.tensors[-1])

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
