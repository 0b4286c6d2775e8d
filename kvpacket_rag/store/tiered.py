"""Faster places above a store: packets that were just used stay in host memory and on the device."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import RLock
from typing import Self

import torch
from torch import Tensor

from kvpacket_rag.device_errors import is_out_of_memory
from kvpacket_rag.errors import StoreError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.metrics import StoreMetrics, Tier
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

    What each tier holds and has done, hits, copies made and evictions, stands in :attr:`tiers`.

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
        self._revision: int | None = None  # of the store below when the copies were last compared with it

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """See :meth:`PacketStore.get`; from the fastest tier that has it."""
        if packet_id in self.below:
            for tier in self._tiers.values():
                packet = tier.find(packet_id)
                if packet is not None:
                    if packet.signature != signature:
                        tier.metrics.miss("mismatch")
                    signature.require(packet.signature, packet_id)
                    tier.metrics.count(hits=1)
                    return self._kept(packet)
        else:
            self._forget([packet_id])
        packet = self._kept(self.below.get(packet_id, signature))
        self._forget_what_is_gone()
        return packet

    def _kept(self, packet: Packet) -> Packet:
        """Keep copies in the tiers that lack it; the fastest one's is what is given."""
        for tier in reversed(self._tiers.values()):
            packet = tier.keep(packet)
        return packet

    def _forget_what_is_gone(self) -> None:
        """Free the copies of what others deleted; looked for beside a load, which takes longer."""
        if (revision := self.below.revision()) != self._revision:
            for tier in self._tiers.values():
                self._forget(name for name in tier.names() if name not in self.below)
            self._revision = revision

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
    def tiers(self) -> Mapping[str, Tier]:
        """See :attr:`PacketStore.tiers`: the copies on the device and in host memory, and those of the store below."""
        return {**self._tiers, **self.below.tiers}

    def drop_copies(self) -> None:
        """Empty the tiers; what is read from now on is copied again."""
        for tier in self._tiers.values():
            tier.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Let go of all copies and close the store below."""
        self.drop_copies()
        self.below.close()


class _Tier:
    """Copies of packets in one kind of memory, the least recently used evicted first."""

    def __init__(self, max_bytes: int, copy: Callable[[Tensor], Tensor]) -> None:
        self._max_bytes = max_bytes
        self._copy = copy
        self._packets: OrderedDict[str, Packet] = OrderedDict()
        self._lock = RLock()
        self.metrics = StoreMetrics()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._packets)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._packets)

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
                oldest = next(iter(self._packets))
                self.metrics.count(evictions=1, bytes_evicted=self._packets[oldest].size_bytes)
                self.forget(oldest)
            try:
                copied = replace(packet, tensors=tuple(map(self._copy, packet.tensors)))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning("a tier of packets was emptied: its memory is needed by others")
                self.clear()
                return packet
            self._packets[packet.packet_id] = copied
            self.size_bytes += copied.size_bytes
            self.metrics.count(loads=1, bytes_loaded=copied.size_bytes)
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
