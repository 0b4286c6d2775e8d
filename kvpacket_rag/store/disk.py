"""Packets on disk: one file each and a catalogue beside them, kept between runs and shared by processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import Self

from kvpacket_rag.errors import PacketCorruptError, PacketNotFoundError, StoreError, StoreFullError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.catalogue import Catalogue
from kvpacket_rag.store.changes import QUARANTINED, STORED, CatalogueChanges, PacketRow
from kvpacket_rag.store.folder import StoreFolder
from kvpacket_rag.store.holds import Holds
from kvpacket_rag.store.packet_file import FileStamp, packet_parts, read_packet
from kvpacket_rag.store.protocol import KnownChunk, require_byte_cap, require_packet_id

_READ_ATTEMPTS = 5  # a file can be exchanged under a reader only by a deletion and a new put


class DiskStore:
    """A :class:`~kvpacket_rag.store.PacketStore` in a folder of a local disk.

    A packet becomes visible when its row is committed, after its file was synced, so a killed writer
    leaves nothing to read. A file is verified once per process and again whenever it changed; a power
    cut, a flipped bit or an exchanged file shows as :class:`PacketCorruptError`, never as an answer.
    Tensors are mapped, not copied, and stay readable after their packet was deleted.

    Holds are those of this process: what another process evicts is a miss if it was not loaded yet.

    Args:
        path: the folder, created when missing.
        max_bytes: cap on the bytes of all packet files; the least recently used packets make room.

    Raises:
        StoreFormatError: the folder holds another format version.
        StoreError: the path is a file, or the folder cannot be created or written.
    """

    def __init__(self, path: Path | str, max_bytes: int | None = None) -> None:
        require_byte_cap(max_bytes)
        self._max_bytes = max_bytes
        self._folder = StoreFolder(Path(path))
        self._catalogue = Catalogue(self._folder.root / "packets.sqlite")
        self._holds = Holds()
        self._verified: dict[str, FileStamp] = {}
        self._uses: dict[str, int] = {}  # written in batches: a read must not cost a transaction
        self._clock = self._catalogue.latest_use()
        self._clock_lock = Lock()
        self._closed = False
        try:
            self._folder.sweep(self._catalogue.ids(STORED), self._catalogue.ids(QUARANTINED))
            if max_bytes is not None and self.size_bytes > max_bytes:
                with self._catalogue.transaction() as changes:
                    self._evict(changes, 0)
        except BaseException:
            self._catalogue.close()
            raise

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """See :meth:`PacketStore.put`."""
        require_packet_id(packet.packet_id)
        row = self._catalogue.find(packet.packet_id)
        if row is not None:
            packet.signature.require(PacketSignature.from_json(row.signature), packet.packet_id)
        if self._is_stored(packet.packet_id, row):
            if owner is None or self._catalogue.is_owner(packet.packet_id, owner):
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
                raise _not_found(packet_id, row)
            if row.signature != signature.to_json():
                signature.require(PacketSignature.from_json(row.signature), packet_id)
            packet = self._try_get(packet_id, signature)
            if packet is not None:
                self._uses[packet_id] = self._tick()
                return packet
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
        """See :meth:`PacketStore.drop_owners`."""
        with self._catalogue.transaction(durable=True) as changes:
            gone = changes.disown(owners)
            for packet_id in gone:
                changes.remove(packet_id)
        self._discard(gone)
        return gone

    def delete(self, packet_id: str) -> None:
        """See :meth:`PacketStore.delete`."""
        require_packet_id(packet_id)
        with self._catalogue.transaction(durable=True) as changes:
            changes.remove(packet_id)
        self._discard([packet_id])

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
        """See :meth:`PacketStore.hold`."""
        return self._holds.hold(packet_ids)

    def __len__(self) -> int:
        return self._catalogue.totals().stored

    @property
    def size_bytes(self) -> int:
        """Bytes of all packet files, those set aside as damaged included."""
        return self._catalogue.totals().size_bytes

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Note what was used last and close the catalogue; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if uses := self._take_uses():
                with self._catalogue.transaction() as changes:
                    changes.touch(uses)
        finally:
            self._catalogue.close()

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
            if not self._is_stored(packet_id, row):
                if not parts:
                    return False
                if self._max_bytes is not None and changes.size_bytes() + size_bytes > self._max_bytes:
                    self._evict(changes, size_bytes)
                    return False
                changes.on_failure(lambda: self._folder.withdraw(packet_id))
                self._folder.save(packet_id, parts)
                self._folder.forget_damaged(packet_id)
                changes.store(packet, text, size_bytes, self._tick())
            if owner is not None:
                changes.own(packet_id, owner)
        return True

    def _try_get(self, packet_id: str, signature: PacketSignature) -> Packet | None:
        """The packet, or None when its file was exchanged meanwhile."""
        path = self._folder.path_of(packet_id)
        stamp: FileStamp | None = None
        try:
            stamp = FileStamp.of(path)
            settled = stamp.is_settled()
            packet = read_packet(path, packet_id, signature, verify=self._verified.get(packet_id) != stamp)
            if FileStamp.of(path) != stamp:
                return None
        except FileNotFoundError:
            self._note_missing(packet_id)
            return None
        except PacketCorruptError as error:
            if stamp is None or not self._set_aside(packet_id, stamp, str(error)):
                return None
            raise PacketCorruptError(
                f"packet {packet_id!r} is damaged: {error}; its file was set aside, encode the chunk again"
            ) from error
        except OSError as error:
            raise StoreError(f"packet file {str(path)!r} cannot be read: {error}; check the permissions") from error
        if settled:
            self._verified[packet_id] = stamp
        return packet

    def _is_stored(self, packet_id: str, row: PacketRow | None) -> bool:
        if row is None or row.state != STORED:
            return False
        try:
            stamp = FileStamp.of(self._folder.path_of(packet_id))
        except OSError:
            return False
        return stamp.is_regular and stamp.size_bytes == row.size_bytes

    def _evict(self, changes: CatalogueChanges, size_bytes: int) -> None:
        """Delete files until ``size_bytes`` more fit under the cap."""
        changes.touch(self._take_uses())
        with self._holds.frozen() as held:
            excess = changes.size_bytes() + size_bytes - (self._max_bytes or 0)
            chosen = changes.least_used(excess, held)
            if chosen is None:
                raise StoreFullError(
                    f"a packet of {size_bytes} bytes does not fit under the cap of {self._max_bytes} bytes beside "
                    "what running requests hold; raise max_bytes"
                )
            for packet_id in chosen:
                self._folder.remove(packet_id)
                changes.evict(packet_id, "evicted to stay under the byte cap")
                self._verified.pop(packet_id, None)

    def _discard(self, packet_ids: Sequence[str]) -> None:
        """Delete the files of packets whose rows are gone: after a crash between the two, nobody sees the file."""
        if not packet_ids:
            return
        with self._catalogue.transaction() as changes:
            for packet_id in packet_ids:
                if changes.find(packet_id) is None:  # else another writer stored it again meanwhile
                    self._folder.remove(packet_id)
                self._verified.pop(packet_id, None)
                self._uses.pop(packet_id, None)

    def _note_missing(self, packet_id: str) -> None:
        """Correct the row of a packet whose file is gone; a catalogue that cannot be written changes nothing of that.

        Raises:
            PacketNotFoundError: the row could not be corrected.
        """
        try:
            with self._catalogue.transaction() as changes:
                row = changes.find(packet_id)
                if row is not None and row.state == STORED and not self._folder.holds(packet_id):
                    changes.evict(packet_id, "its file is missing")
        except StoreError as error:
            raise PacketNotFoundError(f"the file of packet {packet_id!r} is missing, and {error}") from error

    def _set_aside(self, packet_id: str, stamp: FileStamp, reason: str) -> bool:
        """Quarantine a damaged file; False when a whole one may have taken its place.

        Raises:
            PacketCorruptError: it could not be moved; it stays where it is and is refused every time.
        """
        try:
            with self._catalogue.transaction() as changes:
                row = changes.find(packet_id)
                if row is None or row.state != STORED or not self._folder.holds(packet_id, stamp):
                    return False
                self._folder.set_aside(packet_id)
                changes.set_aside(packet_id, stamp.size_bytes, reason)
        except StoreError as error:
            raise PacketCorruptError(f"packet {packet_id!r} is damaged: {reason}; {error}") from error
        self._verified.pop(packet_id, None)
        return True

    def _take_uses(self) -> dict[str, int]:
        uses, self._uses = self._uses, {}
        return uses

    def _tick(self) -> int:
        """Nanoseconds that only grow, even when the system's clock goes back."""
        with self._clock_lock:
            self._clock = max(self._clock + 1, time.time_ns())
            return self._clock


def _not_found(packet_id: str, row: PacketRow | None) -> PacketNotFoundError:
    fate = "is not in this store" if row is None else f"is no longer stored ({row.state}: {row.reason})"
    return PacketNotFoundError(f"packet {packet_id!r} {fate}; encode the chunk again")
