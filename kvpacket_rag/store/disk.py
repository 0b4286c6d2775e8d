"""Packets on disk: one file each and a catalogue beside them, kept between runs and shared by processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Self

from kvpacket_rag.errors import PacketCorruptError, PacketNotFoundError, StoreError
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.catalogue import Catalogue
from kvpacket_rag.store.changes import FILE_MISSING, QUARANTINED, STORED, PacketRow
from kvpacket_rag.store.check import StoreCheck, StoreState, check, state
from kvpacket_rag.store.eviction import Eviction, require_eviction
from kvpacket_rag.store.folder import StoreFolder
from kvpacket_rag.store.metrics import MissReason, StoreMetrics, Tier
from kvpacket_rag.store.packet_file import FileStamp, packet_parts, read_packet, remedy
from kvpacket_rag.store.protocol import KnownChunk, is_packet_id, require_byte_cap, require_packet_id
from kvpacket_rag.store.read_ahead import read_ahead
from kvpacket_rag.store.reads import Reads
from kvpacket_rag.store.upkeep import Limits, Upkeep

_READ_ATTEMPTS = 5  # a file can be exchanged under a reader only by a deletion and a new put


class DiskStore:
    """A :class:`~kvpacket_rag.store.PacketStore` in a folder of a local disk.

    A packet becomes visible when its row is committed, after its file was synced, so a killed writer leaves nothing to
    read. A file is verified once per process and again whenever it changed; a power cut, a flipped bit or an exchanged
    file shows as :class:`PacketCorruptError`, never as an answer. Tensors are mapped, and stay readable when deleted.

    Holds are those of this process: what another process evicts is a miss if it was not loaded yet. Where the folder
    cannot be written, what it holds is read. Processes of one machine may share a store. On a network disk (NFS, SMB,
    sshfs, …) only one machine may use it at a time, and the disk needs locks: SQLite's log is held together by memory
    that processes share and machines do not. Such a disk is told of in a warning (on Linux), one without locks is
    refused. Machines share a ``RemoteStore``.

    Args:
        path: the folder, created when missing.
        max_bytes: cap on the bytes of all packet files.
        eviction: what makes room under the cap: the least recently used packets (``"lru"``), or of those the ones
            that are encoded again soonest for the bytes they free (``"cost"``).
        namespace: whose packets these are; each namespace is a store of its own below ``path``, see
            :func:`~kvpacket_rag.namespace.namespace_folder`.
        sweep: put right at opening what killed processes left; without, :meth:`state` and :meth:`check` show it.

    Attributes:
        folder: where the packets lie, that of the namespace.
        max_bytes: the cap.
        metrics: what this object counted since it was opened.

    Raises:
        StoreFormatError: the folder holds another format version.
        StoreError: the path is a file, or the folder cannot be created or read.
    """

    def __init__(
        self,
        path: Path | str,
        max_bytes: int | None = None,
        *,
        eviction: Eviction = "lru",
        namespace: str = "",
        sweep: bool = True,
    ) -> None:
        require_byte_cap(max_bytes)
        require_eviction(eviction)
        self._folder = StoreFolder(namespace_folder(path, namespace))
        self.folder = self._folder.root
        self.max_bytes = max_bytes
        self.metrics = StoreMetrics()
        self._catalogue = Catalogue(self._folder.catalogue(), self.metrics)
        self._closed = self._owners_are_intact = False
        try:
            self._reads = Reads(self._catalogue.latest_use())
            limits = Limits(max_bytes, eviction)
            self._upkeep = Upkeep(self._folder, self._catalogue, self._reads, limits, self.metrics)
            if sweep and not self._catalogue.is_read_only:
                self._upkeep.sweep()
                self._upkeep.keep_cap()
        except BaseException:
            self._catalogue.close()
            raise

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """See :meth:`PacketStore.put`."""
        require_packet_id(packet.packet_id)
        row = self._catalogue.find(packet.packet_id)
        if self._is_stored(packet.packet_id, row):
            if self._has_nothing_to_add(packet, row, owner):
                return
            parts: list[bytes | memoryview] = []
        else:
            parts = packet_parts(packet)  # the checksum takes as long as the write: outside the lock
        while not self._try_put(packet, text, owner, parts, only_known):
            parts = parts or packet_parts(packet)

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """See :meth:`PacketStore.get`."""
        require_packet_id(packet_id)
        for _ in range(_READ_ATTEMPTS):
            row = self._catalogue.find(packet_id)
            if row is None or row.state != STORED:
                self.metrics.miss(_fate(row))
                raise _not_found(packet_id, row)
            if row.signature != signature.to_json():
                self.metrics.miss("mismatch")
                signature.require(PacketSignature.from_json(row.signature), packet_id)
            packet = self._counted(lambda: self._try_get(packet_id, signature))
            if packet is not None:
                self._reads.used(packet_id)
                self.metrics.count(hits=1)
                return packet
        self.metrics.miss("unreadable")
        raise StoreError(f"packet {packet_id!r} keeps changing while it is read; stop what rewrites its file")

    def __contains__(self, packet_id: object) -> bool:
        return isinstance(packet_id, str) and self._is_stored(packet_id, self._catalogue.find(packet_id))

    def add_owner(self, packet_id: str, owner: str) -> None:
        """See :meth:`PacketStore.add_owner`."""
        require_packet_id(packet_id)
        with self._catalogue.transaction() as changes:
            if changes.find(packet_id) is None:
                raise PacketNotFoundError(f"packet {packet_id!r} is not in this store; put it before naming an owner")
            changes.own(packet_id, owner)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """See :meth:`PacketStore.drop_owners`; what only damaged owners have goes too, for one of them may be meant."""
        with self._catalogue.transaction(durable=True) as changes:
            gone = changes.disown(owners)  # damage is looked for once, for that reads all owners
            gone += [] if self._owners_are_intact else changes.disown_damaged()
            self._owners_are_intact = True
            for packet_id in gone:
                changes.remove(packet_id)
        self._upkeep.discard(gone)
        return gone

    def delete(self, packet_id: str) -> None:
        """See :meth:`PacketStore.delete`."""
        require_packet_id(packet_id)
        with self._catalogue.transaction(durable=True) as changes:
            changes.remove(packet_id)
        self._upkeep.discard([packet_id])

    def known(self, signature: PacketSignature) -> Iterator[KnownChunk]:
        """See :meth:`PacketStore.known`."""
        return self._catalogue.known(signature.to_json())

    def signatures(self) -> dict[str, int]:
        """See :meth:`PacketStore.signatures`."""
        return self._catalogue.signatures()

    def revision(self) -> int:
        """See :meth:`PacketStore.revision`."""
        return self._catalogue.totals().revision

    def hold(self, packet_ids: Iterable[str]) -> AbstractContextManager[None]:
        """See :meth:`PacketStore.hold`; files that are not in the page cache are read from here on, by a thread."""
        names = list(packet_ids)
        read_ahead(self._folder.path_of(name) for name in names if is_packet_id(name))
        return self._upkeep.holds.hold(names)

    def __len__(self) -> int:
        return self._catalogue.totals().stored

    @property
    def size_bytes(self) -> int:
        """Bytes of all packet files, those set aside as damaged included."""
        return self._catalogue.totals().size_bytes

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """See :attr:`PacketStore.tiers`."""
        return {"disk": self}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Note what was used last, if that can be written, and close the catalogue; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            uses = self._reads.take_uses()
            if uses and not self._catalogue.is_read_only:
                with suppress(StoreError), self._catalogue.transaction() as changes:
                    changes.touch(uses)
        finally:
            self._catalogue.close()

    def check(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> StoreCheck:
        """Verify every row and every packet file; see :func:`kvpacket_rag.store.check.check`."""
        return check(self._folder, self._catalogue, self._upkeep, repair=repair, progress=progress)

    def state(self) -> StoreState:
        """Counts and bytes as the catalogue has them, and where files and rows disagree."""
        return state(self._catalogue, self._upkeep)

    def _try_put(
        self, packet: Packet, text: str, owner: str | None, parts: list[bytes | memoryview], only_known: bool
    ) -> bool:
        """One transaction towards storing a packet: False when it only made room or found the file gone.

        The file is written inside the transaction, so that neither another writer of the same packet
        nor an eviction can come between file and row, and the cap holds with several processes.
        """
        packet_id = packet.packet_id
        size_bytes = sum(len(part) for part in parts)
        with self._catalogue.transaction() as changes:
            row = changes.find(packet_id)
            if row is None and only_known:
                return True
            intact = row is None or changes.is_intact(packet_id)
            if row is not None and intact:
                packet.signature.require(PacketSignature.from_json(row.signature), packet_id)
            if not intact or not self._is_stored(packet_id, row):
                if not parts or self._upkeep.make_room(changes, size_bytes):
                    return False
                if not intact:
                    self.metrics.count(damaged_rows=1)
                    changes.drop_row(packet_id)
                changes.on_failure(lambda: self._folder.withdraw(packet_id))
                self._folder.save(packet_id, parts)
                self._folder.forget_damaged(packet_id)
                changes.store(packet, text, size_bytes, self._reads.tick())
                self.metrics.count(puts=1, bytes_put=size_bytes)
            if owner is not None:
                changes.own(packet_id, owner)
        return True

    def _has_nothing_to_add(self, packet: Packet, row: PacketRow | None, owner: str | None) -> bool:
        same = row is not None and row.signature == packet.signature.to_json()
        owned = owner is None or self._catalogue.is_owner(packet.packet_id, owner)
        return same and owned and self._catalogue.is_intact(packet.packet_id)

    def _counted(self, read: Callable[[], Packet | None]) -> Packet | None:
        """What ``read`` gives, and its failures counted."""
        try:
            return read()
        except PacketCorruptError:
            self.metrics.miss("damaged")
            raise
        except PacketNotFoundError:
            self.metrics.miss("missing")
            raise
        except StoreError:
            self.metrics.miss("unreadable")
            raise

    def _try_get(self, packet_id: str, signature: PacketSignature) -> Packet | None:
        """The packet, or None when its file was exchanged meanwhile."""
        path = self._folder.path_of(packet_id)
        stamp: FileStamp | None = None
        try:
            stamp = self._folder.stamp(packet_id)
            settled, verify = stamp.is_settled(), not self._reads.is_verified(packet_id, stamp)
            packet = read_packet(path, packet_id, signature, verify=verify)
            if self._folder.stamp(packet_id) != stamp:
                return None
        except FileNotFoundError:
            self._upkeep.note_missing(packet_id)
            return None
        except PacketCorruptError as error:
            if stamp is None or not self._upkeep.set_aside(packet_id, stamp, str(error)):
                return None
            told = f"packet {packet_id!r} is damaged: {error}; its file was set aside, encode the chunk again"
            raise PacketCorruptError(told) from error
        except OSError as error:
            raise StoreError(f"packet file {str(path)!r} cannot be read: {error}; {remedy(error)}") from error
        if settled:
            self._reads.verified(packet_id, stamp)
        self.metrics.count(loads=1, bytes_loaded=stamp.size_bytes, verifications=int(verify))
        return packet

    def _is_stored(self, packet_id: str, row: PacketRow | None) -> bool:
        if row is None or row.state != STORED:
            return False
        try:
            stamp = self._folder.stamp(packet_id)
        except OSError:
            return False
        return stamp.is_regular and stamp.size_bytes == row.size_bytes


def _fate(row: PacketRow | None) -> MissReason:
    if row is None:
        return "unknown"
    if row.reason == FILE_MISSING:
        return "missing"
    return "quarantined" if row.state == QUARANTINED else "evicted"


def _not_found(packet_id: str, row: PacketRow | None) -> PacketNotFoundError:
    fate = "is not in this store" if row is None else f"is no longer stored ({row.state}: {row.reason})"
    return PacketNotFoundError(f"packet {packet_id!r} {fate}; encode the chunk again")
