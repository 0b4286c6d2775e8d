"""Packets in memory: the store of one process, gone when it ends."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Self

from torch import Tensor

from kvpacket_rag.errors import PacketNotFoundError, StoreFullError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.eviction import Candidate, Eviction, choose, require_eviction
from kvpacket_rag.store.holds import Holds
from kvpacket_rag.store.metrics import StoreMetrics, Tier
from kvpacket_rag.store.protocol import KnownChunk, require_byte_cap, require_packet_id


@dataclass(slots=True)
class _Entry:
    signature: PacketSignature
    chunk: KnownChunk
    owners: set[str] = field(default_factory=set)


class MemoryStore:
    """A :class:`~kvpacket_rag.store.PacketStore` in a dictionary.

    A reader gets the stored tensors themselves, not a copy.

    Args:
        max_bytes: cap on tensor bytes; packets that no request holds make room.
        eviction: which of them: see :class:`~kvpacket_rag.store.DiskStore`.

    Attributes:
        metrics: what this object counted.
    """

    def __init__(self, max_bytes: int | None = None, *, eviction: Eviction = "lru") -> None:
        require_byte_cap(max_bytes)
        require_eviction(eviction)
        self._max_bytes = max_bytes
        self._eviction: Eviction = eviction
        self.metrics = StoreMetrics()
        self._entries: dict[str, _Entry] = {}
        self._packets: OrderedDict[str, Packet] = OrderedDict()  # least recently used first
        self._size_bytes = 0
        self._revision = 0
        self._holds = Holds()
        self._lock = RLock()

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """See :meth:`PacketStore.put`."""
        require_packet_id(packet.packet_id)
        with self._lock:
            entry = self._entries.get(packet.packet_id)
            if entry is None and only_known:
                return
            if entry is not None:
                packet.signature.require(entry.signature, packet.packet_id)
            if packet.packet_id not in self._packets:
                self._make_room(packet.size_bytes)
                self._packets[packet.packet_id] = replace(packet, tensors=tuple(map(_alone, packet.tensors)))
                self._size_bytes += packet.size_bytes
                self.metrics.count(puts=1, bytes_put=packet.size_bytes)
            if entry is None:
                entry = _Entry(packet.signature, KnownChunk(packet.packet_id, text, packet.num_tokens))
                self._entries[packet.packet_id] = entry
                self._revision += 1
            if owner is not None:
                entry.owners.add(owner)

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """See :meth:`PacketStore.get`."""
        require_packet_id(packet_id)
        with self._lock:
            packet = self._packets.get(packet_id)
            if packet is None:
                was_evicted = packet_id in self._entries
                self.metrics.miss("evicted" if was_evicted else "unknown")
                fate = "was evicted" if was_evicted else "is not in this store"
                raise PacketNotFoundError(f"packet {packet_id!r} {fate}; encode the chunk again")
            if signature != packet.signature:
                self.metrics.miss("mismatch")
                signature.require(packet.signature, packet_id)
            self._packets.move_to_end(packet_id)
            self.metrics.count(hits=1)
            return packet

    def __contains__(self, packet_id: object) -> bool:
        with self._lock:
            return packet_id in self._packets

    def add_owner(self, packet_id: str, owner: str) -> None:
        """See :meth:`PacketStore.add_owner`."""
        require_packet_id(packet_id)
        with self._lock:
            if packet_id not in self._entries:
                raise PacketNotFoundError(f"packet {packet_id!r} is not in this store; put it before naming an owner")
            self._entries[packet_id].owners.add(owner)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """See :meth:`PacketStore.drop_owners`."""
        dropped = set(owners)
        with self._lock:
            gone = []
            for packet_id, entry in self._entries.items():
                if entry.owners & dropped:
                    entry.owners -= dropped
                    if not entry.owners:
                        gone.append(packet_id)
            for packet_id in gone:
                self.delete(packet_id)
        return gone

    def delete(self, packet_id: str) -> None:
        """See :meth:`PacketStore.delete`."""
        require_packet_id(packet_id)
        with self._lock:
            self._drop_tensors(packet_id)
            if self._entries.pop(packet_id, None) is not None:
                self._revision += 1

    def known(self, signature: PacketSignature) -> Iterator[KnownChunk]:
        """See :meth:`PacketStore.known`."""
        with self._lock:
            chunks = [entry.chunk for entry in self._entries.values() if entry.signature == signature]
        yield from chunks

    def signatures(self) -> dict[str, int]:
        """See :meth:`PacketStore.signatures`."""
        with self._lock:
            return dict(Counter(packet.signature.to_json() for packet in self._packets.values()))

    def revision(self) -> int:
        """See :meth:`PacketStore.revision`."""
        return self._revision

    def hold(self, packet_ids: Iterable[str]) -> AbstractContextManager[None]:
        """See :meth:`PacketStore.hold`."""
        return self._holds.hold(packet_ids)

    def __len__(self) -> int:
        return len(self._packets)

    @property
    def size_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return self._size_bytes

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """See :attr:`PacketStore.tiers`."""
        return {"memory": self}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Let go of every packet."""
        with self._lock:
            self._packets.clear()
            self._entries.clear()
            self._size_bytes = 0
            self._revision += 1

    def _make_room(self, size_bytes: int) -> None:
        if self._max_bytes is None:
            return
        with self._holds.frozen() as held:
            excess = self._size_bytes + size_bytes - self._max_bytes
            candidates = (
                Candidate(packet_id, packet.num_tokens, packet.size_bytes)
                for packet_id, packet in self._packets.items()
            )
            victims = choose(candidates, excess, held, self._eviction)
            if victims is None:
                raise StoreFullError(
                    f"a packet of {size_bytes} bytes does not fit under the cap of {self._max_bytes} bytes beside "
                    "what running requests hold; raise max_bytes"
                )
            for packet_id, _, freed in victims:
                self._drop_tensors(packet_id)
                self.metrics.count(evictions=1, bytes_evicted=freed)
                if not self._entries[packet_id].owners:
                    self.delete(packet_id)

    def _drop_tensors(self, packet_id: str) -> None:
        packet = self._packets.pop(packet_id, None)
        if packet is not None:
            self._size_bytes -= packet.size_bytes


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without a larger storage behind it: a slice of a batch would keep the whole batch alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
