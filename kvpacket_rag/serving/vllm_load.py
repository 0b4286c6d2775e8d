"""Packets into a paged cache: realigned as for a context of our own, then handed over layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvpacket_rag.assemble import Context, ContextPool
from kvpacket_rag.errors import PacketCorruptError, UnsupportedModelError
from kvpacket_rag.rope import RotaryPlan
from kvpacket_rag.serving.vllm_layout import PlacedPacket
from kvpacket_rag.store import PacketStore

logger = logging.getLogger(__name__)


class LayerWriter(Protocol):
    """Takes one layer's share of a packet."""

    def __call__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rows into a layer's cache.

        Args:
            keys: (tokens, heads, width), rotated to where they stand in the prompt.
            values: (tokens, heads, width).
            slots: (tokens,) int64, the slot of each row.
        """
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Packets that one request needs, and where they go.

    Attributes:
        request_id: of the request.
        packets: all of its packets, in order.
        start: position of the first token to write; those before it stand in the cache already.
        block_ids: of the request's blocks, from position 0 on.
        in_background: beside the model's work, between two steps.
    """

    request_id: str
    packets: tuple[PlacedPacket, ...]
    start: int
    block_ids: tuple[int, ...]
    in_background: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What a worker has to do about packets in one step.

    Attributes:
        loads: packets to write.
        refused: ids of requests to fail.
    """

    loads: tuple[Load, ...]
    refused: frozenset[str]


class PacketLoader:
    """Reads packets from a store and writes them into the paged cache of one worker.

    Args:
        store: keeps the packets.
        plan: of the model.
        writers: by number of layer.
        block_size: tokens of a block.
        dtype: of the cached tensors.
        device: of the cache.

    Raises:
        UnsupportedModelError: the cache has other layers than the plan.
    """

    def __init__(
        self,
        store: PacketStore,
        plan: RotaryPlan,
        writers: Mapping[int, LayerWriter],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers = {name: rows_by_layer(plan, name) for name in ("keys", "values")}
        if not layers["keys"].keys() == layers["values"].keys() == writers.keys():
            raise UnsupportedModelError(
                f"the packets hold layers {sorted(layers['keys'])}, the cache of this server {sorted(writers)}; serve "
                "the model that they were made with, undivided"
            )
        self._store = store
        self._writers = writers
        self._keys, self._values = layers["keys"], layers["values"]
        self._block_size = block_size
        self._pool = ContextPool(plan, dtype, device)

    def load(self, load: Load) -> None:
        """Write what a request needs; what goes wrong is raised, and its blocks hold nothing of use then.

        Raises:
            PacketError: a packet is missing, damaged, or of another model or adapter.
            StoreError: the store cannot be read.
        """
        with self._store.hold([packet.packet_id for packet in load.packets]):
            for placed in load.packets:
                if placed.stop > load.start:
                    self._write(placed, load)

    @torch.inference_mode()
    def _write(self, placed: PlacedPacket, load: Load) -> None:
        packet = self._store.get(placed.packet_id, placed.signature)
        if not packet.span == packet.num_slots == placed.span:
            raise PacketCorruptError(
                f"packet {placed.packet_id!r} holds {packet.num_slots} tokens for {packet.span} positions, its place "
                f"in the prompt has {placed.span}; encode its chunk again"
            )
        context = self._pool.take(placed.span)
        try:
            context.num_positions = placed.start
            context.place(packet)
            self._hand_over(context, placed, load)
        finally:
            self._pool.give_back(context)

    def _hand_over(self, context: Context, placed: PlacedPacket, load: Load) -> None:
        first = max(load.start, placed.start)
        rows = slice(first - placed.start, placed.span)
        slots = slots_of(range(first, placed.stop), load.block_ids, self._block_size).to(context.buffers[0].device)
        for layer, writer in self._writers.items():
            keys, values = (
                context.buffers[group][row, 0, :, rows].transpose(0, 1).contiguous()  # (tokens, heads, width)
                for group, row in (self._keys[layer], self._values[layer])
            )
            writer(keys, values, slots)


class Work:
    """The worker's half: writes packets before a step or beside it, and knows what failed.

    Args:
        loader: writes them.
        block_size: tokens of a block.
    """

    def __init__(self, loader: PacketLoader, block_size: int) -> None:
        self._loader = loader
        self._block_size = block_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpacket")
        self._running: dict[str, Future[bool]] = {}
        self._refused: set[str] = set()
        self._failed_blocks: set[int] = set()

    def start(self, step: Step) -> None:
        """Write what this step needs, and begin with what a later one needs."""
        self._refused |= step.refused
        for load in step.loads:
            if load.in_background:
                self._running[load.request_id] = self._thread.submit(self._try, load)
            elif not self._try(load):
                self._failed_blocks |= set(load.block_ids[load.start // self._block_size :])

    def _try(self, load: Load) -> bool:
        try:
            self._loader.load(load)
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # it fails this request, and may not stop the worker
            kind, told = type(error).__name__, str(error)
            logger.error("packets of request %s cannot be loaded: %s: %s", load.request_id, kind, told)
            return False
        return True

    def take_done(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, the failed and refused ones among them; and those alone."""
        done = {name: self._running.pop(name).result() for name, load in list(self._running.items()) if load.done()}
        failed = {name for name, fine in done.items() if not fine} | self._refused
        self._refused = set()
        return set(done) | failed, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be written before a step and were not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()


def rows_by_layer(plan: RotaryPlan, name: str) -> dict[int, tuple[int, int]]:
    """Where a plan keeps each layer's tensor of that name: number of the group, and row in it."""
    return {
        layer: (number, row)
        for number, group in enumerate(plan.groups)
        if group.name == name
        for row, layer in enumerate(group.layers)
    }


def slots_of(positions: Sequence[int], block_ids: Sequence[int], block_size: int) -> Tensor:
    """(positions,) int64: where each position of a request lies in the paged cache."""
    places = torch.tensor(positions, dtype=torch.int64)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[places // block_size] * block_size + places % block_size
