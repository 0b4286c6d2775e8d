"""The catalogue of a disk store: which packets it knows, what state each is in and who owns it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from kvpacket_rag.errors import StoreError, StoreFormatError, StoreFullError
from kvpacket_rag.store.changes import CatalogueChanges, PacketRow, find_row
from kvpacket_rag.store.protocol import KnownChunk

STORE_VERSION = 1

_BUSY_SECONDS = 60.0
_PAGE_ROWS = 1000
_FULL_CODES = {sqlite3.SQLITE_FULL}
_FOREIGN_CODES = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}

# The triggers keep counts, bytes and revision right whichever process changes a row, so that
# reading them costs one row and not a scan.
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('format_version', '{STORE_VERSION}');
CREATE TABLE packets (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    packet_id TEXT NOT NULL UNIQUE,
    signature TEXT NOT NULL,
    text TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('stored', 'evicted', 'quarantined')),
    reason TEXT NOT NULL DEFAULT '',
    last_used INTEGER NOT NULL
);
CREATE INDEX packets_by_use ON packets (state, last_used);
CREATE TABLE owners (packet_id TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (packet_id, owner)) WITHOUT ROWID;
CREATE INDEX owners_by_owner ON owners (owner);
CREATE TABLE totals (stored INTEGER NOT NULL, size_bytes INTEGER NOT NULL, revision INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
CREATE TRIGGER count_new AFTER INSERT ON packets BEGIN
    UPDATE totals SET stored = stored + (NEW.state = 'stored'), size_bytes = size_bytes + NEW.size_bytes,
        revision = revision + 1;
END;
CREATE TRIGGER count_gone AFTER DELETE ON packets BEGIN
    UPDATE totals SET stored = stored - (OLD.state = 'stored'), size_bytes = size_bytes - OLD.size_bytes,
        revision = revision + 1;
END;
CREATE TRIGGER count_changed AFTER UPDATE OF state, size_bytes ON packets BEGIN
    UPDATE totals SET stored = stored + (NEW.state = 'stored') - (OLD.state = 'stored'),
        size_bytes = size_bytes + NEW.size_bytes - OLD.size_bytes;
END;
"""


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


class Catalogue:
    """One SQLite file, shared by threads and processes; readers never wait for a writer.

    Args:
        path: the file, created when missing. It must lie on a local disk: the write-ahead log needs
            shared memory between its processes.

    Raises:
        StoreFormatError: the file is something else, or of another format version.
        StoreError: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_lock, self._write_lock = RLock(), RLock()
        with self._translated():
            self._writer = self._connect()
            try:
                self._prepare()
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[CatalogueChanges]:
        """Change rows, all or nothing, while no other thread or process changes any.

        Args:
            durable: also survive a power cut once done. A row that a power cut takes back only costs an
                encoding when it was new, but would bring back a text that was deleted.
        """
        with self._write_lock, self._translated():
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._writer.execute("BEGIN IMMEDIATE")
            changes = CatalogueChanges(self._writer)
            try:
                yield changes
                self._writer.execute("COMMIT")
            except BaseException:
                changes.undo()
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def find(self, packet_id: str) -> PacketRow | None:
        """The row of a packet, if it is known."""
        with self._read_lock, self._translated():
            return find_row(self._reader, packet_id)

    def is_owner(self, packet_id: str, owner: str) -> bool:
        """Whether the packet has that owner."""
        return bool(self._rows("SELECT 1 FROM owners WHERE packet_id = ? AND owner = ?", packet_id, owner))

    def totals(self) -> Totals:
        """Counts, bytes and revision now."""
        return Totals(*self._rows("SELECT stored, size_bytes, revision FROM totals")[0])

    def known(self, signature: str) -> Iterator[KnownChunk]:
        """Every chunk text of a signature, oldest first; read page by page, so that no reader holds up the log."""
        last = 0
        query = (
            "SELECT number, packet_id, text, num_tokens FROM packets "
            f"WHERE number > ? AND signature = ? ORDER BY number LIMIT {_PAGE_ROWS}"
        )
        while page := self._rows(query, last, signature):
            last = page[-1][0]
            for _, packet_id, text, num_tokens in page:
                yield KnownChunk(packet_id, text, num_tokens)

    def signatures(self) -> dict[str, int]:
        """Number of stored packets by signature."""
        query = "SELECT signature, COUNT(*) FROM packets WHERE state = 'stored' GROUP BY signature"
        return dict(self._rows(query))

    def ids(self, state: str) -> set[str]:
        """The packets in one state."""
        return {packet_id for (packet_id,) in self._rows("SELECT packet_id FROM packets WHERE state = ?", state)}

    def latest_use(self) -> int:
        """The greatest ``last_used`` of all rows."""
        return int(self._rows("SELECT COALESCE(MAX(last_used), 0) FROM packets")[0][0])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._read_lock, self._translated():
            return self._reader.execute(query, values).fetchall()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA secure_delete = ON")  # a deleted text leaves no copy in free pages
        return connection

    def _prepare(self) -> None:
        """Create the tables, or refuse what another program or version wrote before changing it."""
        self._require_version(self._tables())
        _use_write_ahead_log(self._writer)
        self._writer.execute("BEGIN IMMEDIATE")
        tables = self._tables()  # another process may have created them meanwhile
        self._require_version(tables)
        if not tables:
            for statement in _statements(_SCHEMA):
                self._writer.execute(statement)
        self._writer.execute("COMMIT")

    def _tables(self) -> set[str]:
        return {name for (name,) in self._writer.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def _require_version(self, tables: set[str]) -> None:
        if not tables:
            return
        if not {"meta", "packets", "owners"} <= tables:
            raise StoreFormatError(f"{str(self._path)!r} is a database, but no packet store; name another folder")
        row = self._writer.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
        if row is None or row[0] != str(STORE_VERSION):
            raise StoreFormatError(
                f"the packet store {str(self._path)!r} has format version {row[0] if row else 'none'}, expected "
                f"{STORE_VERSION}; ingest the documents into a new folder, or use the version that wrote it"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _FULL_CODES:
                raise StoreFullError(f"the disk of {str(self._path)!r} is full; free some room") from error
            if code in _FOREIGN_CODES:
                raise StoreFormatError(
                    f"{str(self._path)!r} is no readable packet catalogue ({error}); "
                    "move the folder away and ingest the documents again"
                ) from error
            raise StoreError(f"the packet catalogue {str(self._path)!r} cannot be used: {error}") from error


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch modes; SQLite does not wait by itself when another process is switching too."""
    give_up = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: executescript() would commit the open transaction."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
