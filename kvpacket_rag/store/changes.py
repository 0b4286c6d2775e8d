"""What one transaction may do to the rows of a catalogue."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import islice

from kvpacket_rag.packet import Packet

STORED, EVICTED, QUARANTINED = "stored", "evicted", "quarantined"

_BATCH = 500  # values a statement; SQLite allows 999 or more


@dataclass(frozen=True, slots=True)
class PacketRow:
    """A packet as the catalogue knows it.

    Attributes:
        signature: as canonical JSON.
        size_bytes: of its file, 0 when it has none.
        state: ``"stored"``, ``"evicted"`` or ``"quarantined"``.
        reason: why it is not stored.
    """

    signature: str
    size_bytes: int
    state: str
    reason: str


def find_row(connection: sqlite3.Connection, packet_id: str) -> PacketRow | None:
    """The row of a packet, if it is known."""
    query = "SELECT signature, size_bytes, state, reason FROM packets WHERE packet_id = ?"
    row = connection.execute(query, (packet_id,)).fetchone()
    return PacketRow(*row) if row else None


class CatalogueChanges:
    """The open transaction of a :class:`~kvpacket_rag.store.catalogue.Catalogue`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._undo: list[Callable[[], None]] = []

    def on_failure(self, action: Callable[[], None]) -> None:
        """Do this, still inside the transaction, if it does not come to be committed."""
        self._undo.append(action)

    def undo(self) -> None:
        """Do what was asked for on failure."""
        for action in self._undo:
            action()

    def find(self, packet_id: str) -> PacketRow | None:
        """The row of a packet, as this transaction sees it."""
        return find_row(self._connection, packet_id)

    def size_bytes(self) -> int:
        """Bytes of all files, as this transaction sees them."""
        return int(self._connection.execute("SELECT size_bytes FROM totals").fetchone()[0])

    def store(self, packet: Packet, text: str, size_bytes: int, used: int) -> None:
        """Say that a packet's file is in place."""
        self._connection.execute(
            "INSERT INTO packets (packet_id, signature, text, num_tokens, size_bytes, state, last_used) "
            "VALUES (?, ?, ?, ?, ?, 'stored', ?) ON CONFLICT (packet_id) DO UPDATE SET "
            "size_bytes = excluded.size_bytes, state = 'stored', reason = '', last_used = excluded.last_used",
            (packet.packet_id, packet.signature.to_json(), text, packet.num_tokens, size_bytes, used),
        )

    def set_aside(self, packet_id: str, size_bytes: int, reason: str) -> None:
        """Say that a packet's file was damaged and lies, with the size it has now, in quarantine."""
        self._connection.execute(
            "UPDATE packets SET state = 'quarantined', size_bytes = ?, reason = ? WHERE packet_id = ?",
            (size_bytes, reason, packet_id),
        )

    def evict(self, packet_id: str, reason: str) -> None:
        """Say that a packet has no file any more; without an owner the row goes too."""
        self._connection.execute(
            "DELETE FROM packets WHERE packet_id = ?1 AND NOT EXISTS (SELECT 1 FROM owners WHERE packet_id = ?1)",
            (packet_id,),
        )
        self._connection.execute(
            "UPDATE packets SET state = 'evicted', size_bytes = 0, reason = ? WHERE packet_id = ?", (reason, packet_id)
        )

    def own(self, packet_id: str, owner: str) -> None:
        """Name an owner."""
        self._connection.execute("INSERT OR IGNORE INTO owners VALUES (?, ?)", (packet_id, owner))

    def disown(self, owners: Iterable[str]) -> list[str]:
        """Forget owners; returns the packets that had one of them and have none left, oldest first."""
        touched: set[str] = set()
        remaining = iter(owners)
        while batch := list(islice(remaining, _BATCH)):
            marks = ",".join("?" * len(batch))
            rows = self._connection.execute(f"SELECT packet_id FROM owners WHERE owner IN ({marks})", batch)
            touched.update(packet_id for (packet_id,) in rows)
            self._connection.execute(f"DELETE FROM owners WHERE owner IN ({marks})", batch)
        query = (
            "SELECT number FROM packets WHERE packet_id = ?1 AND NOT EXISTS (SELECT 1 FROM owners WHERE packet_id = ?1)"
        )
        found = ((self._connection.execute(query, (packet_id,)).fetchone(), packet_id) for packet_id in touched)
        return [packet_id for row, packet_id in sorted(pair for pair in found if pair[0])]

    def remove(self, packet_id: str) -> None:
        """Forget a packet, its text and its owners."""
        self._connection.execute("DELETE FROM owners WHERE packet_id = ?", (packet_id,))
        self._connection.execute("DELETE FROM packets WHERE packet_id = ?", (packet_id,))

    def touch(self, uses: Mapping[str, int]) -> None:
        """Note when packets were last used."""
        self._connection.executemany(
            "UPDATE packets SET last_used = MAX(last_used, ?2) WHERE packet_id = ?1", list(uses.items())
        )

    def least_used(self, size_bytes: int, held: Set[str]) -> list[str] | None:
        """Packets whose files together free ``size_bytes``: damaged ones first, then the least recently used.

        Returns:
            Their ids; None when all that is not held would not be enough.
        """
        chosen: list[str] = []
        for state in (QUARANTINED, STORED):
            query = "SELECT packet_id, size_bytes FROM packets WHERE state = ? ORDER BY last_used"
            for packet_id, packet_bytes in self._connection.execute(query, (state,)):
                if size_bytes <= 0:
                    return chosen
                if packet_id not in held:
                    chosen.append(packet_id)
                    size_bytes -= packet_bytes
        return chosen if size_bytes <= 0 else None
