"""Packets laid end to end in one preallocated buffer: the context.

A slot is a place in the buffer, a position is what the model's rotary embedding sees. They are
equal until a compressed packet comes: it takes fewer slots than positions. Text between packets
reserves its slots here and is filled in by the model later, so every token ends up at its logical
place and decoding appends in place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from kvpacket_rag.compress.quantized import QuantizedTensor
from kvpacket_rag.errors import PacketError
from kvpacket_rag.fused import Step, in_threads
from kvpacket_rag.packet import Packet
from kvpacket_rag.rope import RotaryPlan, Rotation, realign_into, realigning

Key = str | tuple[int, ...]  # a packet's id, or the tokens of a text

_CAPACITY_STEP = 256
_LAYERS_AT_ONCE = 8  # on devices that are slow to begin and fast to go on


@dataclass(frozen=True, slots=True)
class Span:
    """Where a piece of text sits: ``num_tokens`` slots from ``slot``, positions from ``position``."""

    slot: int
    position: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A part that stands in a context, and how many slots and positions are taken up to its end.

    Attributes:
        key: with the keys before it, it says what the slots hold.
    """

    key: Key
    num_slots: int
    num_positions: int


@dataclass(slots=True, eq=False)
class Context:
    """What the model attends to, filled from the left.

    Attributes:
        plan: of the model the context belongs to.
        buffers: one a group of the plan, each (layers, batch, heads, capacity, width).
        num_slots: slots taken so far.
        num_positions: positions taken so far.
        filled: its first parts, once their slots are written; a later prompt that begins alike goes on behind them.
    """

    plan: RotaryPlan
    buffers: tuple[Tensor, ...]
    num_slots: int = 0
    num_positions: int = 0
    filled: tuple[Filled, ...] = ()

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
        assembly = Assembly(self, row)
        place = assembly.add(packet)
        assembly.write()
        return place

    def row(self, number: int, start: int) -> Context:
        """One row as an empty context of its own, over the same memory from slot ``start`` on.

        The slots before it are zeroed: what a mask hides is multiplied by zero all the same, so it has to be finite.
        """
        for buffer in self.buffers:
            buffer[:, number, :, :start].zero_()
        return Context(self.plan, tuple(buffer[:, number : number + 1, :, start:] for buffer in self.buffers))

    def extract(self, place: Span, row: int = 0) -> tuple[Tensor, ...]:
        """Copies of what the slots of ``place`` hold: one tensor a group, (layers, heads, tokens, width)."""
        stop = place.slot + place.num_tokens
        return tuple(
            buffer[:, row, :, place.slot : stop].clone(memory_format=torch.contiguous_format) for buffer in self.buffers
        )


class Assembly:
    """Packets on their way into a context: each takes its place at once, and then all are written by several threads.

    A thread takes longer to wake than a small packet to write, so they are woken once for all of them. What is not in
    host memory, or has to be restored from few bits first, is written when it is added.

    Args:
        context: what the packets are written into.
        row: of its buffers.
    """

    def __init__(self, context: Context, row: int = 0) -> None:
        self._context = context
        self._row = row
        self._steps: deque[Step] = deque()
        self._num_bytes = 0

    def add(self, packet: Packet) -> Span:
        """Take the next slots and positions for a packet, whose tensors are kept until they are written.

        Raises:
            PacketError: the packet's shapes are not those of the plan.
        """
        context, groups = self._context, packet.groups
        check_shapes(groups, context.plan, packet.packet_id)
        place = context.reserve(packet.num_slots, packet.span)
        slots = slice(place.slot, place.slot + place.num_tokens)
        for buffer, stored, group in zip(context.buffers, groups, context.plan.groups, strict=True):
            target = buffer[:, self._row, :, slots]
            if isinstance(stored, QuantizedTensor):
                _restore_into(target, stored, group.rotation, place.position)
            elif target.device.type == "cpu" == stored.device.type:
                self._steps.extend(realigning(target, stored, group.rotation, place.position))
                self._num_bytes += target.nbytes
            else:
                realign_into(target, _bring(stored, target.device), group.rotation, place.position)
        return place

    def write(self) -> None:
        """Write what was added; each packet's tensors are let go of once they are written."""
        in_threads(self._steps, self._num_bytes)


def _bring(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; to CUDA by way of pinned memory, so that the copy runs beside other work."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _restore_into(target: Tensor, stored: QuantizedTensor, rotation: Rotation | None, shift: int) -> None:
    """Restore and realign a few layers at a time, so that the packet is never there in full beside its context."""
    step = 1 if target.device.type == "cpu" else _LAYERS_AT_ONCE
    for start in range(0, len(target), step):
        layers = slice(start, start + step)
        realign_into(target[layers], stored.restore(layers, target.device), rotation, shift)


def check_shapes(tensors: Sequence[Tensor | QuantizedTensor], plan: RotaryPlan, packet_id: str) -> None:
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
    """Lends contexts and takes them back, so that warm memory is written again, or need not be written at all.

    Writing into memory the process already owns is about eight times faster than into fresh pages. A context keeps
    what it holds until it is lent for another prompt; one that begins with the same parts goes on behind them.

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
    _idle: list[Context] = field(default_factory=list)  # last used first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def slot_bytes(self) -> int:
        """Bytes a slot of a context takes."""
        return sum(len(g.layers) * g.heads * g.width for g in self.plan.groups) * self.dtype.itemsize

    def take(self, num_slots: int, batch: int = 1) -> Context:
        """An empty context with at least ``num_slots`` slots; bring it back with :meth:`give_back`."""
        with self._lock:
            fitting = [
                context
                for context in self._idle
                if context.buffers[0].shape[1] == batch and num_slots <= context.capacity <= max(4 * num_slots, 1024)
            ]
            if fitting and (len(self._idle) >= self.max_idle or not fitting[-1].filled):
                self._idle.remove(fitting[-1])
                return Context(self.plan, fitting[-1].buffers)
        capacity = -(-num_slots // _CAPACITY_STEP) * _CAPACITY_STEP
        shapes = [(len(g.layers), batch, g.heads, capacity, g.width) for g in self.plan.groups]
        with torch.inference_mode(False):  # so that the buffers may be written in any mode
            buffers = tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return Context(self.plan, buffers)

    def take_filled(self, keys: Sequence[Key], num_slots: int) -> Context | None:
        """The idle context that begins with the most of ``keys``, cut behind the last packet they share.

        Args:
            keys: of a prompt's parts.
            num_slots: it has to hold at least.

        Returns:
            The context, or None if no idle one shares a packet.
        """
        with self._lock:
            shared = [(_shared(context, keys), context) for context in self._idle if context.capacity >= num_slots]
            count, best = max(shared, key=lambda found: found[0], default=(0, None))
            if best is None or not count:
                return None
            self._idle.remove(best)
        end = best.filled[count - 1]
        return Context(self.plan, best.buffers, end.num_slots, end.num_positions, best.filled[:count])

    def give_back(self, context: Context) -> None:
        """Return a context; the caller may not use it afterwards."""
        with self._lock:
            self._idle = [context, *self._idle][: self.max_idle]

    def drop_idle(self) -> None:
        """Free the contexts that nobody uses, for other processes too."""
        with self._lock:
            self._idle = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _shared(context: Context, keys: Sequence[Key]) -> int:
    """How many first parts a context and a prompt have alike, up to the last packet among them."""
    alike = takewhile(lambda pair: pair[0].key == pair[1], zip(context.filled, keys, strict=False))
    packets = [number for number, (_, key) in enumerate(alike, start=1) if isinstance(key, str)]
    return max(packets, default=0)
