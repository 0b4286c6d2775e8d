"""The packets of an object store that lie near by, and what is known of those that do not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from kvpacket_rag.errors import PacketNotFoundError, StoreError, StoreFullError
from kvpacket_rag.packet import Packet
from kvpacket_rag.store.changes import EVICTED, QUARANTINED, STORED, PacketRow
from kvpacket_rag.store.disk import DiskStore
from kvpacket_rag.store.folder import CATALOGUE
from kvpacket_rag.store.protocol import is_packet_id
from kvpacket_rag.store.remote_record import ChunkRecord

_GONE = "it is gone from the object store"
_FAR = "it lies in the object store alone"
_REMOTE = "object_store"  # under which the catalogue notes whose packets these are
_MARKED = "object_store_has_mark"  # and that a mark was seen there


class RemoteCache(DiskStore):
    """A store on disk whose rows are those of an object store; what is evicted here is still there.

    Every row has an owner of its own beside the chunks', so that it outlives its file.
    """

    @property
    def url(self) -> str | None:
        """Of the object store whose packets these are; None for those of a store on disk alone."""
        return self._catalogue.fact(_REMOTE)

    @property
    def saw_mark(self) -> bool:
        """Whether the object store was seen with its :class:`~kvpacket_rag.store.remote_mark.Mark`."""
        return self._catalogue.fact(_MARKED) is not None

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written into the folder."""
        return self._catalogue.is_read_only

    def row(self, packet_id: object) -> PacketRow | None:
        """What is known of a packet."""
        return self._catalogue.find(packet_id) if isinstance(packet_id, str) and is_packet_id(packet_id) else None

    def intact_row(self, packet_id: str) -> PacketRow | None:
        """The same, unless the row is damaged."""
        return self.row(packet_id) if self._catalogue.is_intact(packet_id) else None

    def is_there(self, packet_id: object) -> bool:
        """Whether the object store has the packet, as far as is known."""
        row = self.row(packet_id)
        return row is not None and row.reason != _GONE

    def is_owner(self, packet_id: str, owner: str) -> bool:
        """Whether this host named that owner."""
        return self._catalogue.is_owner(packet_id, owner)

    def held(self) -> set[str]:
        """Packets that running requests hold."""
        with self._upkeep.holds.frozen() as held:
            return set(held)

    def ids(self) -> set[str]:
        """Every packet that is known."""
        return {name for state in (STORED, EVICTED, QUARANTINED) for name in self._catalogue.ids(state)}

    def there(self) -> dict[str, int]:
        """Number of packets that the object store has, by signature."""
        return self._catalogue.signatures_but(_GONE)

    def learn(self, records: Sequence[ChunkRecord]) -> None:
        """Know of packets that others put into the object store."""
        with self._catalogue.transaction() as changes:
            for record in records:
                changes.know(record.packet_id, record.signature, record.text, record.num_tokens, _FAR)
                changes.own(record.packet_id, _keeper(record.packet_id))

    def keep(self, packet: Packet, text: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write the file of a packet, unless the packet was forgotten meanwhile.

        Args:
            packet: what to keep.
            text: of its chunk; a row that is intact keeps its own.
            parts: the bytes of the file.

        Raises:
            StoreFullError: there is no room.
        """
        while not self._try_put(packet, text, _keeper(packet.packet_id), list(parts), only_known=True):
            pass  # room was made

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes fit under the cap, now that what nobody holds made way."""
        try:
            with self._catalogue.transaction() as changes:
                self._upkeep.make_room(changes, size_bytes)
        except StoreFullError:
            return False
        return True

    def name_owner(self, packet_id: str, owner: str) -> None:
        """Remember an owner of a packet, if the packet is known."""
        try:
            self.add_owner(packet_id, owner)
        except PacketNotFoundError:
            return

    def note_gone(self, packet_id: str) -> None:
        """Remember that the object store lost a packet; its text stays known."""
        with self._catalogue.transaction() as changes:
            changes.evict(packet_id, _GONE)

    def forget(self, packet_ids: Iterable[str]) -> list[str]:
        """Know nothing more of packets; returns them oldest first, and last those that were not known."""
        names = set(packet_ids)
        if not names:
            return []
        ordered = self.drop_owners(_keeper(name) for name in names)
        for name in names - set(ordered):
            self.delete(name)  # an owner of it was named here, and its mark deleted by another host
        return [*ordered, *sorted(names - set(ordered))]

    def rows_to_upload(self, url: str) -> Iterator[tuple[str, str, str, list[str]]]:
        """Packet id, signature, text and owners of packets that a store on disk had before it became a cache.

        Raises:
            StoreError: the folder is the cache of another object store.
        """
        noted = self.url
        if noted not in (None, url):
            raise StoreError(f"{str(self.folder)!r} is the cache of {noted}, not of {url}; name another folder")
        if noted is None:
            for packet_id, signature, text, _, _ in self._catalogue.rows():
                yield packet_id, signature, text, self._catalogue.owners(packet_id)

    def tie(self, url: str) -> None:
        """Note that the packets are those of an object store."""
        if self.url != url:
            with self._catalogue.transaction() as changes:
                changes.note(_REMOTE, url)

    def note_mark(self) -> None:
        """Note that the object store has a mark."""
        with self._catalogue.transaction() as changes:
            changes.note(_MARKED, "true")


def tied_to(folder: Path | str) -> str | None:
    """URL of the object store whose packets a folder keeps; None for packets of its own, or none at all."""
    if not os.path.isfile(Path(folder, CATALOGUE).expanduser()):
        return None
    with closing(RemoteCache(folder, sweep=False)) as cache:
        return cache.url


def was_never_put(folder: Path | str) -> bool:
    """Whether a folder holds packets that no object store has, as far as the folder knows."""
    with closing(RemoteCache(folder, sweep=False)) as cache:
        return cache.url is None and bool(cache.ids())


def _keeper(packet_id: str) -> str:
    """The owner under which a row is kept while the object store has the packet."""
    return f"object store: {packet_id}"
