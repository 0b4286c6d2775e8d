"""What one transaction may do to the rows of a catalogue."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from kvpacket_rag import database_repair
from kvpacket_rag.packet import Packet
from kvpacket_rag.store.eviction import Candidate, Eviction, choose
from kvpacket_rag.store.schema import DAMAGED_OWNER, create_functions, owner_digest, row_digest, rows_are_whole

logger = logging.getLogger(__name__)

STORED, EVICTED, QUARANTINED = "stored", "evicted", "quarantined"
FILE_MISSING = "its file is missing"  # as the reason of an evicted row

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


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole catalogue.

    Attributes:
        stored: packets stored now.
        size_bytes: bytes of their files and of those set aside.
        revision: changes whenever a text becomes known or unknown.
    """

    stored: int
    size_bytes: int
    revision: int


def find_row(connection: sqlite3.Connection, packet_id: str) -> PacketRow | None:
    """The row of a packet, if it is known."""
    query = "SELECT signature, size_bytes, state, reason FROM packets WHERE packet_id = ?"
    row = connection.execute(query, (packet_id,)).fetchone()
    return PacketRow(str(row[0]), row[1], str(row[2]), str(row[3])) if row else None


def is_intact(connection: sqlite3.Connection, packet_id: str) -> bool:
    """Whether the row of a packet is known and says what was written."""
    query = "SELECT signature, text, num_tokens, digest FROM packets WHERE packet_id = ?"
    row = connection.execute(query, (packet_id,)).fetchone()
    if row is None or not isinstance(row[0], str) or not isinstance(row[1], str):
        return False
    return bool(row_digest(packet_id, *row[:3]) == row[3])


def count_rows(connection: sqlite3.Connection) -> tuple[int, int]:
    """Stored packets and bytes of all files, by counting."""
    query = (
        "SELECT COALESCE(SUM(state = 'stored'), 0), COALESCE(SUM(MAX(CAST(size_bytes AS INTEGER), 0)), 0) "
        "FROM packets NOT INDEXED WHERE state IN ('stored', 'quarantined')"
    )
    stored, size_bytes = connection.execute(query).fetchone()
    return int(stored), int(size_bytes)


class CatalogueChanges:
    """The open transaction of a :class:`~kvpacket_rag.store.catalogue.Catalogue`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._undo: list[Callable[[], None]] = []
        self.erased = False  # whether a text was deleted that may stay nowhere
        self.has_rebuilt = False  # whether the file has pages that nothing leads to

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

    def is_intact(self, packet_id: str) -> bool:
        """Whether the row of a packet is known and says what was written."""
        return is_intact(self._connection, packet_id)

    def size_bytes(self) -> int:
        """Bytes of all files, as this transaction sees them."""
        query = "SELECT COALESCE(MAX(CAST(size_bytes AS INTEGER)), 0) FROM totals"
        return int(self._connection.execute(query).fetchone()[0])

    def store(self, packet: Packet, text: str, size_bytes: int, used: int) -> None:
        """Say that a packet's file is in place."""
        said = packet.packet_id, packet.signature.to_json(), text, packet.num_tokens
        self._connection.execute(
            "INSERT INTO packets (packet_id, signature, text, num_tokens, size_bytes, state, last_used, digest) "
            "VALUES (?, ?, ?, ?, ?, 'stored', ?, ?) ON CONFLICT (packet_id) DO UPDATE SET "
            "size_bytes = excluded.size_bytes, state = 'stored', reason = '', last_used = excluded.last_used",
            (*said, size_bytes, used, row_digest(*said)),
        )

    def know(self, packet_id: str, signature: str, text: str, num_tokens: int, reason: str) -> None:
        """Say that there is a packet without a file here; one that is known already stays as it is."""
        said = packet_id, signature, text, num_tokens
        self._connection.execute(
            "INSERT OR IGNORE INTO packets (packet_id, signature, text, num_tokens, size_bytes, state, reason, "
            "last_used, digest) VALUES (?, ?, ?, ?, 0, 'evicted', ?, 0, ?)",
            (*said, reason, row_digest(*said)),
        )

    def resize(self, packet_id: str, size_bytes: int) -> None:
        """Say how large a packet's file is."""
        self._connection.execute("UPDATE packets SET size_bytes = ? WHERE packet_id = ?", (size_bytes, packet_id))

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
        said = packet_id, owner
        self._connection.execute("INSERT OR IGNORE INTO owners VALUES (?, ?, ?)", (*said, owner_digest(*said)))

    def disown(self, owners: Iterable[str]) -> list[str]:
        """Forget owners; returns the packets that had one of them and have none left, oldest first."""
        touched: set[str] = set()
        remaining = iter(owners)
        while batch := list(islice(remaining, _BATCH)):
            marks = ",".join("?" * len(batch))
            rows = self._connection.execute(  # all of the table: a damaged index would leave some out
                f"SELECT packet_id, owner FROM owners WHERE packet_id >= '' AND +owner IN ({marks})", batch
            ).fetchall()
            touched.update(packet_id for packet_id, _ in rows)
            self._connection.executemany("DELETE FROM owners WHERE packet_id = ? AND owner = ?", rows)
        return self._unowned(touched)

    def disown_damaged(self) -> list[str]:
        """Forget owners whose names are not what was written; returns the packets that have none left, oldest first."""
        create_functions(self._connection)
        rows = self._connection.execute(f"DELETE FROM owners WHERE {DAMAGED_OWNER} RETURNING packet_id").fetchall()
        return self._unowned({str(packet_id) for (packet_id,) in rows})

    def _unowned(self, packet_ids: Set[str]) -> list[str]:
        """Those of the packets that were disowned that nobody owns, oldest first."""
        self.erased |= bool(packet_ids)
        query = "SELECT 1 FROM owners WHERE packet_id = ?"
        unowned = [name for name in packet_ids if not self._connection.execute(query, (name,)).fetchone()]
        found = ((self._numbers(name), name) for name in unowned)
        return [name for numbers, name in sorted(found) if numbers]

    def _numbers(self, packet_id: str) -> list[tuple[int]]:
        """Where a packet's row lies; found without the index where that does not lead to one that is whole."""
        by = "" if self.is_intact(packet_id) else "NOT INDEXED"
        return self._connection.execute(f"SELECT number FROM packets {by} WHERE packet_id = ?", (packet_id,)).fetchall()

    def remove(self, packet_id: str) -> None:
        """Forget a packet, its text and its owners."""
        self._connection.execute("DELETE FROM owners WHERE packet_id = ?", (packet_id,))
        self.drop_row(packet_id)

    def drop_nameless(self) -> None:
        """Forget the rows whose packet id is none; no other statement would find all of them."""
        query = "DELETE FROM packets NOT INDEXED WHERE typeof(packet_id) != 'text' OR packet_id NOT GLOB ?"
        self._connection.execute(query, ("[0-9a-f]" * 64,))

    def drop_row(self, packet_id: str) -> None:
        """Forget what is said of a packet, and keep its owners."""
        self._connection.executemany("DELETE FROM packets WHERE number = ?", self._numbers(packet_id))
        self.erased = True

    def mend_lookups(self, faults: Sequence[str]) -> None:
        """Make SQLite's indexes anew if they are damaged and the rows are not; else the one may tell of the other."""
        if faults and rows_are_whole(self._connection):
            logger.warning("SQLite's indexes of the packet catalogue are damaged, and made anew from its rows")
            self.rebuild_indexes()

    def rebuild_indexes(self) -> None:
        """Make SQLite's indexes anew, however damaged."""
        database_repair.rebuild_indexes(self._connection)
        self.has_rebuilt = True

    def note(self, key: str, value: str) -> None:
        """Note a fact about the store."""
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def count_anew(self) -> None:
        """Replace the counts by those of the rows; the revision moves on, so that nobody goes by what it knew."""
        (revision,) = self._connection.execute("SELECT MAX(revision) FROM totals").fetchone()
        revision = revision + 1 if isinstance(revision, int) else 0
        self._connection.execute("DELETE FROM totals")
        self._connection.execute("INSERT INTO totals VALUES (?, ?, ?)", (*count_rows(self._connection), revision))

    def touch(self, uses: Mapping[str, int]) -> None:
        """Note when packets were last used."""
        self._connection.executemany(
            "UPDATE packets SET last_used = MAX(last_used, ?2) WHERE packet_id = ?1", list(uses.items())
        )

    def choose_victims(self, size_bytes: int, held: Set[str], eviction: Eviction) -> list[Candidate] | None:
        """Packets whose files together free ``size_bytes``: damaged ones first, then as ``eviction`` says.

        Returns:
            None when all that is not held would not be enough.
        """
        damaged = choose(self._candidates(QUARANTINED), size_bytes, held, "lru")
        if damaged is not None:
            return damaged
        damaged = [found for found in self._candidates(QUARANTINED) if found.packet_id not in held]
        size_bytes -= sum(found.size_bytes for found in damaged)
        stored = choose(self._candidates(STORED), size_bytes, held, eviction)
        return None if stored is None else damaged + stored

    def _candidates(self, state: str) -> Iterator[Candidate]:
        columns = "packet_id, CAST(num_tokens AS INTEGER), CAST(size_bytes AS INTEGER)"
        query = f"SELECT {columns} FROM packets WHERE state = ? ORDER BY last_used"
        return (Candidate(*row) for row in self._connection.execute(query, (state,)))
