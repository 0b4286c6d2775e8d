"""Where each cached tensor keeps its position, and the exact way to move it.

A rotary embedding turns pairs of channels by (position x frequency). Turns add, so a tensor
encoded at position p is moved to p + shift by turning every pair once more, by one angle a pair
for the whole packet. Which channels form pairs, and at which frequencies, is measured on the live
model (see ``probe``) and written down here; nothing in this file knows any model.

Angles are float64 and reach the channels as float32 cosines, cast once at the end: the moved
tensor is then nearer the truth than the model's own float32 angles at large positions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvpacket_rag import fused

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary part of one cached tensor.

    Attributes:
        layout: ``"half"`` pairs channel k with k + n, ``"interleaved"`` pairs 2k with 2k + 1.
        start: first rotary channel; those before it and after the pairs carry no position.
        frequencies: (n,) radians per position, signed, one a pair.
    """

    layout: Layout
    start: int
    frequencies: tuple[float, ...]

    @property
    def stop(self) -> int:
        """The channel after the last rotary one."""
        return self.start + 2 * len(self.frequencies)

    def pairs(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and of the second channel of every pair, each (..., n)."""
        if self.layout == "half":
            middle = self.start + len(self.frequencies)
            return tensor[..., self.start : middle], tensor[..., middle : self.stop]
        return tensor[..., self.start : self.stop : 2], tensor[..., self.start + 1 : self.stop : 2]

    def turn(self, shift: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of ``shift`` positions, each (n,); computed in float64, then cast."""
        angles = torch.tensor(self.frequencies, dtype=torch.float64) * float(shift)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Cached tensors of one kind and one shape, stacked over their layers.

    Attributes:
        name: attribute of the model's cache layer that holds the tensor, such as ``"keys"``.
        layers: indices of the cache layers, in order.
        heads: key-value heads; 1 for a tensor that has no head axis.
        width: channels a head.
        has_heads: False for tensors the model keeps as (batch, tokens, width).
        rotation: None when the tensor carries no position.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    width: int
    has_heads: bool
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """Every tensor a model caches, with its rotation.

    Attributes:
        groups: the order in which a packet keeps its tensors.
        max_positions: positions for which the plan was proved; a prompt may not be longer.
    """

    groups: tuple[TensorGroup, ...]
    max_positions: int

    @property
    def digest(self) -> str:
        """SHA-256 of the geometry, in hex; part of a packet's signature."""
        text = json.dumps([asdict(group) for group in self.groups], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def realign(tensor: Tensor, rotation: Rotation | None, shift: int) -> Tensor:
    """A copy of ``tensor`` (..., tokens, width), moved from positions p to p + shift."""
    moved = torch.empty_like(tensor)
    realign_into(moved, tensor, rotation, shift)
    return moved


def realign_into(target: Tensor, source: Tensor, rotation: Rotation | None, shift: int) -> None:
    """Write ``source``, moved by ``shift`` positions, into ``target``; arguments as of :func:`realigning`."""
    for step in realigning(target, source, rotation, shift):
        step()


def realigning(target: Tensor, source: Tensor, rotation: Rotation | None, shift: int) -> list[fused.Step]:
    """Steps that write ``source``, moved by ``shift`` positions, into ``target``; ``source`` is not touched.

    On a CPU in one pass by the compiled loops of ``fused``, or else by torch, block by block along the first
    axis (one layer at a time), so that a block is still in the processor's cache when its second half is
    turned; elsewhere in one piece. The steps may be done in any order and by several threads.

    Args:
        target: (layers, ..., tokens, width), any strides.
        source: the same shape on the same device, rotated exactly once; its dtype may be a wider one.
        rotation: of this group, or None.
        shift: positions to move by.
    """
    if rotation is None or shift == 0:
        return fused.copying(target, source) or [partial(target.copy_, source)]
    full = source.dtype == target.dtype and source.dtype in (torch.float32, torch.float64)
    turn = rotation.turn(shift, source.dtype if full else torch.float32, target.device)
    steps: list[fused.Step] = [
        partial(target[..., rest].copy_, source[..., rest])
        for rest in (slice(0, rotation.start), slice(rotation.stop, source.shape[-1]))
        if rest.stop > rest.start
    ]
    turning = fused.turning(target, source, rotation.layout, rotation.start, turn)
    if not turning:
        rotate = _rotate_full if full else _rotate_half
        blocks = zip(target, source, strict=True) if target.device.type == "cpu" else [(target, source)]
        turning = [partial(rotate, out, block, rotation, *turn) for out, block in blocks]
    return steps + turning


def _rotate_full(out: Tensor, block: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> None:
    """In the tensor's own precision, without a temporary."""
    first, second = rotation.pairs(block)
    out_first, out_second = rotation.pairs(out)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)


def _rotate_half(out: Tensor, block: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> None:
    """Half precision: turned in float32, rounded once."""
    first, second = rotation.pairs(block.float())
    out_first, out_second = rotation.pairs(out)
    out_first.copy_((first * cos).addcmul_(second, sin, value=-1))
    out_second.copy_((second * cos).addcmul_(first, sin))
