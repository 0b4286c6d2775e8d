"""Packets laid end to end in one preallocated buffer: the context.

A slot is a place in the buffer, a position is what the model's rotary embedding sees. They are
equal until a compressed packet comes: it takes fewer slots than positions. Text between packets
reserves its slots here and is filled in by the model later, so every token ends up at its logical
place and decoding appends in place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpacket_rag.errors import PacketError
from kvpacket_rag.packet import Packet
from kvpacket_rag.rope import RotaryPlan, realign_into

_CAPACITY_STEP = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Where a piece of text sits: ``num_tokens`` slots from ``slot``, positions from ``position``."""

    slot: int
    position: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Context:
    """What the model attends to, filled from the left.

    Attributes:
        plan: of the model the context belongs to.
        buffers: one a group of the plan, each (layers, batch, heads, capacity, width).
        num_slots: slots taken so far.
        num_positions: positions taken so far.
    """

    plan: RotaryPlan
    buffers: tuple[Tensor, ...]
    num_slots: int = 0
    num_positions: int = 0

    @property
    def capacity(self) -> int:
        """Slots the buffers hold."""
        return self.buffers[0].shape[3]

    def reserve(self, num_tokens: int, span: int | None = None) -> Span:
        """Take the next slots (and ``span`` positions, by default as many) and say where they are."""
        if self.num_slots + num_tokens > self.capacity:
            raise PacketError(f"{num_tokens} tokens do not fit behind {self.num_slots} of {self.capacity} slots")
        place = Span(self.num_slots, self.num_positions, num_tokens)
        self.num_slots += num_tokens
        self.num_positions += num_tokens if span is None else span
        return place

    def place(self, packet: Packet, row: int = 0) -> Span:
        """Realign a packet to the next positions and write it into the next slots.

        The packet's own tensors are only read, so one packet serves many contexts at once.

        Raises:
            PacketError: the packet's shapes are not those of the plan.
        """
        check_shapes(packet.tensors, self.plan, packet.packet_id)
        place = self.reserve(packet.tensors[0].shape[2], packet.span)
        for buffer, tensor, group in zip(self.buffers, packet.tensors, self.plan.groups, strict=True):
            target = buffer[:, row, :, place.slot : place.slot + place.num_tokens]
            realign_into(target, _bring(tensor, target.device), group.rotation, place.position)
        return place

    def extract(self, place: Span, row: int = 0) -> tuple[Tensor, ...]:
        """Copies of what the slots of ``place`` hold: one tensor a group, (layers, heads, tokens, width)."""
        stop = place.slot + place.num_tokens
        return tuple(
            buffer[:, row, :, place.slot : stop].clone(memory_format=torch.contiguous_format) for buffer in self.buffers
        )


def _bring(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; to CUDA by way of pinned memory, so that the copy runs beside other work."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def check_shapes(tensors: Sequence[Tensor], plan: RotaryPlan, packet_id: str) -> None:
    """Refuse tensors that are not laid out as the plan says.

    Raises:
        PacketError: naming the first shape that differs.
    """
    expected = [(len(g.layers), g.heads, g.width) for g in plan.groups]
    found = [(t.shape[0], t.shape[1], t.shape[3]) for t in tensors]
    if found != expected or len({t.shape[2] for t in tensors}) > 1:
        raise PacketError(
            f"packet {packet_id!r} holds tensors of (layers, heads, width) {found}; this model needs {expected}, "
            "all with the same number of tokens"
        )


@dataclass
class ContextPool:
    """Lends contexts and takes them back, so that warm memory is written again.

    Writing into memory the process already owns is about eight times faster than into fresh pages.

    Attributes:
        plan: of the model.
        dtype: of the cached tensors.
        device: on which contexts live.
        max_idle: contexts kept when nobody uses them.
    """

    plan: RotaryPlan
    dtype: torch.dtype
    device: torch.device
    max_idle: int = 2
    _idle: list[tuple[Tensor, ...]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, num_slots: int, batch: int = 1) -> Context:
        """An empty context with at least ``num_slots`` slots; bring it back with :meth:`give_back`."""
        with self._lock:
            fitting = [
                buffers
                for buffers in self._idle
                if buffers[0].shape[1] == batch and num_slots <= buffers[0].shape[3] <= max(4 * num_slots, 1024)
            ]
            if fitting:
                best = min(fitting, key=lambda buffers: buffers[0].shape[3])
                self._idle = [buffers for buffers in self._idle if buffers is not best]
                return Context(self.plan, best)
        capacity = -(-num_slots // _CAPACITY_STEP) * _CAPACITY_STEP
        shapes = [(len(g.layers), batch, g.heads, capacity, g.width) for g in self.plan.groups]
        with torch.inference_mode(False):  # so that the buffers may be written in any mode
            buffers = tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return Context(self.plan, buffers)

    def give_back(self, context: Context) -> None:
        """Return a context; the caller may not use it afterwards."""
        with self._lock:
            self._idle = [context.buffers, *self._idle][: self.max_idle]
