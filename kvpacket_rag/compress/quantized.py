"""Cached tensors in few bits, and the way back. Reading needs torch alone; writing is in ``quantise``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpacket_rag.errors import PacketError

GROUP = 32  # neighbours that share a scale, in schemes that have groups
PARTS = 4  # tensors at rest for one tensor of a packet
_CODES_A_WORD = 8  # of 4 bits in an int32


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """One tensor (layers, heads, tokens, width) of a packet: ``(code - zero) * scale``, but the first token as it was.

    The first token takes most of the attention of every later one, so an error in it costs the most.

    Attributes:
        first: (layers, heads, 1, width) in a 16-bit float dtype.
        codes: of the other tokens, (layers, heads, tokens - 1, width) int8; or 4 bits each, the low ones first,
            (layers, heads, tokens - 1, words) int32.
        scale: (layers, heads, a, b) bfloat16; a and b are 1, or as many as codes, or a :data:`GROUP`-th of them.
        zero: of the same shape, int8.

    Raises:
        PacketError: the parts do not fit each other.
    """

    first: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __post_init__(self) -> None:
        lead = self.first.shape[:2]
        parts = (self.first, self.codes, self.scale, self.zero)
        kinds = [part.dtype for part in parts[1:]] in (
            [torch.int8, torch.bfloat16, torch.int8],
            [torch.int32, torch.bfloat16, torch.int8],
        )
        if not kinds or any(part.dim() != 4 or part.shape[:2] != lead for part in parts) or not self._fits():
            found = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            raise PacketError(f"a quantised tensor has parts {found}, which do not fit each other; encode it again")

    def _fits(self) -> bool:
        tokens, width = self.codes.shape[2], self.first.shape[3]
        stored = -(-width // _CODES_A_WORD) if self.is_packed else width
        steps = zip(self.scale.shape[2:], (tokens, width), strict=True)
        return (
            self.first.shape[2] == 1
            and self.codes.shape[3] == stored
            and self.zero.shape == self.scale.shape
            and all(found in (1, length, -(-length // GROUP)) for found, length in steps)
        )

    @property
    def is_packed(self) -> bool:
        """Whether a code takes 4 bits."""
        return self.codes.dtype == torch.int32

    @property
    def shape(self) -> torch.Size:
        """(layers, heads, tokens, width) of what it stands for."""
        return torch.Size((*self.first.shape[:2], 1 + self.codes.shape[2], self.first.shape[3]))

    def restore(self, layers: slice, device: torch.device | None = None) -> Tensor:
        """What some of the layers hold, in float32.

        Args:
            layers: which.
            device: where to compute; the few bits are copied there, not the many. By default where they are.

        Returns:
            (layers, heads, tokens, width).
        """
        parts = (self.first, self.codes, self.scale, self.zero)
        first, codes, scale, zero = (part[layers].to(device or part.device, non_blocking=True) for part in parts)
        if self.is_packed:
            codes = _unpack(codes, self.shape[3])
        restored = torch.empty((*codes.shape[:2], self.shape[2], self.shape[3]), device=codes.device)
        restored[:, :, :1] = first
        rest = restored[:, :, 1:]
        rest.copy_(codes).sub_(spread(zero.float(), rest.shape)).mul_(spread(scale.float(), rest.shape))
        return restored


def spread(steps: Tensor, shape: torch.Size) -> Tensor:
    """Scales or zero points, brought to a shape that broadcasts to that of the codes (…, tokens, width)."""
    for axis in (-2, -1):
        if steps.shape[axis] not in (1, shape[axis]):
            steps = steps.repeat_interleave(GROUP, axis).narrow(axis, 0, shape[axis])
    return steps


def _unpack(words: Tensor, width: int) -> Tensor:
    """(…, width) int8 of 4-bit codes in int32 words, the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)  # the lowest byte first, on every machine torch runs on
    halves = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)  # (…, words * 8)
    return halves[..., :width].to(torch.int8) - 8
