"""Faster places above a store: packets that were just used stay in host memory and on the device."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import RLock
from typing import Self

import torch
from torch import Tensor

from kvpacket_rag.errors import StoreError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.protocol import KnownChunk, PacketStore

logger = logging.getLogger(__name__)


class TieredStore:
    """A :class:`~kvpacket_rag.store.PacketStore` that keeps copies of what was used last in faster memory.

    The store below stays the truth: a packet that it no longer has is not given from a copy, whoever deleted it. What
    is copied was proved whole when it was loaded. On a CPU the host tier saves opening the file and mapping its pages;
    on CUDA it is pinned, so that copies to the card run beside other work.

    Args:
        below: such as a DiskStore; closed with this one.
        host_bytes: of the host tier; 0 for none.
        device_bytes: of the tier on ``device``; 0 for none.
        device: of the model.

    Attributes:
        hits: packets given by each tier, ``"device"``, ``"host"`` and ``"below"``.

    Raises:
        StoreError: a tier is larger than the memory there is.
    """

    def __init__(
        self,
        below: PacketStore,
        *,
        host_bytes: int = 0,
        device_bytes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.below = below
        device = torch.device(device)
        _require_room("host_bytes", host_bytes, _host_memory())
        if device_bytes and device.type == "cpu":
            raise StoreError("device_bytes needs a device of its own, such as cuda; on a CPU use host_bytes")
        if device.type == "cuda":
            _require_room("device_bytes", device_bytes, torch.cuda.mem_get_info(device)[1])
        pin = device.type == "cuda"
        self._tiers = {
            "device": _Tier(device_bytes, lambda tensor: tensor.to(device)),
            "host": _Tier(host_bytes, lambda tensor: tensor.pin_memory() if pin else tensor.clone()),
        }
        self.hits = dict.fromkeys((*self._tiers, "below"), 0)
        self._lock = RLock()

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """See :meth:`PacketStore.get`; from the fastest tier that has it."""
        if packet_id in self.below:
            for name, tier in self._tiers.items():
                packet = tier.find(packet_id)
                if packet is not None:
                    signature.require(packet.signature, packet_id)
                    return self._given(name, packet)
        else:
            self._forget([packet_id])
        return self._given("below", self.below.get(packet_id, signature))

    def _given(self, source: str, packet: Packet) -> Packet:
        """Count it and keep copies in the tiers that lack it; the fastest one's is what is given."""
        with self._lock:
            self.hits[source] += 1
        for tier in reversed(self._tiers.values()):
            packet = tier.keep(packet)
        return packet

    def _forget(self, packet_ids: Iterable[str]) -> None:
        for packet_id in packet_ids:
            for tier in self._tiers.values():
                tier.forget(packet_id)

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """See :meth:`PacketStore.put`; into the store below."""
        self.below.put(packet, text, owner, only_known=only_known)

    def __contains__(self, packet_id: object) -> bool:
        return packet_id in self.below

    def add_owner(self, packet_id: str, owner: str) -> None:
        """See :meth:`PacketStore.add_owner`."""
        self.below.add_owner(packet_id, owner)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """See :meth:`PacketStore.drop_owners`."""
        gone = self.below.drop_owners(owners)
        self._forget(gone)
        return gone

    def delete(self, packet_id: str) -> None:
        """See :meth:`PacketStore.delete`."""
        self.below.delete(packet_id)
        self._forget([packet_id])

    def known(self, signature: PacketSignature) -> Iterator[KnownChunk]:
        """See :meth:`PacketStore.known`."""
        return self.below.known(signature)

    def signatures(self) -> dict[str, int]:
        """See :meth:`PacketStore.signatures`."""
        return self.below.signatures()

    def revision(self) -> int:
        """See :meth:`PacketStore.revision`."""
        return self.below.revision()

    def hold(self, packet_ids: Iterable[str]) -> AbstractContextManager[None]:
        """See :meth:`PacketStore.hold`. Copies need no holding: a request keeps what it was given."""
        return self.below.hold(packet_ids)

    def __len__(self) -> int:
        return len(self.below)

    @property
    def size_bytes(self) -> int:
        """Bytes in the store below, copies not counted."""
        return self.below.size_bytes

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of the copies in each tier."""
        return {name: tier.size_bytes for name, tier in self._tiers.items()}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Let go of all copies and close the store below."""
        for tier in self._tiers.values():
            tier.clear()
        self.below.close()


class _Tier:
    """Copies of packets in one kind of memory, the least recently used evicted first."""

    def __init__(self, max_bytes: int, copy: Callable[[Tensor], Tensor]) -> None:
        self._max_bytes = max_bytes
        self._copy = copy
        self._packets: OrderedDict[str, Packet] = OrderedDict()
        self._lock = RLock()
        self.size_bytes = 0

    def find(self, packet_id: str) -> Packet | None:
        with self._lock:
            packet = self._packets.get(packet_id)
            if packet is not None:
                self._packets.move_to_end(packet_id)
            return packet

    def keep(self, packet: Packet) -> Packet:
        """The tier's copy, made now if it has none; the packet itself where there is no room for it."""
        with self._lock:
            if found := self.find(packet.packet_id):
                return found
            if packet.size_bytes > self._max_bytes:
                return packet
            while self.size_bytes + packet.size_bytes > self._max_bytes:
                self.forget(next(iter(self._packets)))
            try:
                copied = replace(packet, tensors=tuple(map(self._copy, packet.tensors)))
            except torch.OutOfMemoryError:
                logger.warning("a tier of packets was emptied: its memory is needed by others")
                self.clear()
                return packet
            self._packets[packet.packet_id] = copied
            self.size_bytes += copied.size_bytes
            return copied

    def forget(self, packet_id: str) -> None:
        with self._lock:
            packet = self._packets.pop(packet_id, None)
            if packet is not None:
                self.size_bytes -= packet.size_bytes

    def clear(self) -> None:
        with self._lock:
            self._packets.clear()
            self.size_bytes = 0


def _require_room(name: str, wanted: int, there_is: int) -> None:
    if not 0 <= wanted <= there_is:
        raise StoreError(f"{name} is {wanted}; expected 0 up to the {there_is} bytes of memory there are")


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
