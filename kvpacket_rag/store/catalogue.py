"""The catalogue of a disk store: which packets it knows, what state each is in and who owns it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from kvpacket_rag import database, database_repair
from kvpacket_rag.errors import StoreError, StoreFormatError, StoreFullError
from kvpacket_rag.store.changes import CatalogueChanges, PacketRow, Totals, count_rows, find_row, is_intact
from kvpacket_rag.store.metrics import StoreMetrics
from kvpacket_rag.store.protocol import KnownChunk, is_packet_id
from kvpacket_rag.store.schema import STORE_VERSION, check_version, damaged_owners, prepare, row_digest, written_version

logger = logging.getLogger(__name__)

_PAGE_ROWS = 1000
_LARGEST_FILE = 1 << 40
_LOG_WAIT_SECONDS = 1.0  # for readers to finish before the log is emptied of what was deleted
_FOREIGN_CODES = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


class Catalogue:
    """One SQLite file, shared by threads and processes; readers never wait for a writer.

    Where nothing can be written, it is read, and every change is refused with the reason.

    Args:
        path: the file, created when missing. The write-ahead log needs memory that its processes share.
        metrics: where damaged rows are counted.

    Raises:
        StoreFormatError: the file is something else, or of another format version.
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path, metrics: StoreMetrics) -> None:
        self._path = path
        self._metrics = metrics
        self._read_lock, self._write_lock = RLock(), RLock()
        self._writer: sqlite3.Connection | None = None
        self._no_writing = ""  # the reason, where nothing can be written
        self._seen: object = None  # file and log as they were when they were opened for reading alone
        self._unclean = self._erased = False  # log and file may hold what was deleted
        self._is_sound = False  # SQLite's indexes were seen to lead to the rows of their tables
        with self._translated():
            try:
                self._writer = self._prepared()
                self._reader = database.connect(path)
            except sqlite3.OperationalError as error:
                self._close_writer()
                self._read_only(error)
            except BaseException:
                self._close_writer()
                raise

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written."""
        return self._writer is None

    @contextmanager
    def transaction(
        self, *, durable: bool = False, wait_seconds: float = database.BUSY_SECONDS
    ) -> Iterator[CatalogueChanges]:
        """Change rows, all or nothing, while no other thread or process changes any.

        Args:
            durable: also survive a power cut once done. A row that a power cut takes back only costs an
                encoding when it was new, but would bring back a text that was deleted.
            wait_seconds: for other processes to end their changes.
        """
        with self._write_lock, self._translated():
            writer = self._writer
            if writer is None:
                raise StoreError(f"the packet store {str(self._path.parent)!r} can only be read: {self._no_writing}")
            writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            writer.execute(f"PRAGMA busy_timeout = {int(1000 * wait_seconds)}")
            writer.execute("BEGIN IMMEDIATE")
            changes = CatalogueChanges(writer)
            try:
                check_version(writer, self._path)
                if not self._is_sound:
                    self._is_sound = True  # looked for once
                    changes.mend_lookups(self.faults())
                yield changes
                writer.execute("COMMIT")
            except BaseException:
                self._is_sound = False  # what was mended is as it was
                try:
                    changes.undo()
                finally:  # else this process would keep all others from writing
                    if writer.in_transaction:
                        writer.execute("ROLLBACK")
                raise
            if changes.has_rebuilt:
                database.compact(writer, at_any_size=True)
            if changes.erased or self._unclean:
                self._erased |= changes.erased
                self._unclean = not database.empty_log(writer, _LOG_WAIT_SECONDS if changes.erased else 0.0)

    def find(self, packet_id: str) -> PacketRow | None:
        """The row of a packet, if it is known."""
        with self._read_lock, self._translated():
            self._look_again()
            return find_row(self._reader, packet_id)

    def is_intact(self, packet_id: str) -> bool:
        """Whether the row of a packet is known and says what was written."""
        with self._read_lock, self._translated():
            self._look_again()
            return is_intact(self._reader, packet_id)

    def is_owner(self, packet_id: str, owner: str) -> bool:
        """Whether the packet has that owner."""
        return bool(self._rows("SELECT 1 FROM owners WHERE packet_id = ? AND owner = ?", packet_id, owner))

    def owners(self, packet_id: str) -> list[str]:
        """The owners of a packet."""
        return [owner for (owner,) in self._rows("SELECT owner FROM owners WHERE packet_id = ?", packet_id)]

    def damaged_owners(self) -> list[str]:
        """The packets of owners whose names are not what was written."""
        with self._read_lock, self._translated():
            self._look_again()
            return damaged_owners(self._reader)

    def totals(self) -> Totals:
        """Counts, bytes and revision now.

        Raises:
            StoreFormatError: they are damaged.
        """
        rows = self._rows("SELECT stored, size_bytes, revision FROM totals")
        if len(rows) != 1 or not all(isinstance(n, int) and n >= 0 for n in rows[0]):
            raise StoreFormatError(
                f"the counts of {str(self._path)!r} are damaged; 'kvpacket check DIR --repair' counts anew"
            )
        return Totals(*rows[0])

    def known(self, signature: str) -> Iterator[KnownChunk]:
        """Every chunk text of a signature, oldest first; read page by page, so that no reader holds up the log."""
        for packet_id, found, text, num_tokens, digest in self.rows(signature):
            if is_packet_id(packet_id) and row_digest(packet_id, found, text, num_tokens) == digest:
                yield KnownChunk(packet_id, text, num_tokens)
            else:
                self._metrics.count(damaged_rows=1)
                logger.warning("the row of packet %.64s is damaged and passed over", packet_id)

    def rows(self, signature: str | None = None) -> Iterator[tuple[str, str, str, Any, bytes]]:
        """Packet id, signature, text, tokens and digest of every row, or of those of a signature; unverified."""
        last = 0
        query = (
            "SELECT number, packet_id, signature, text, num_tokens, digest FROM packets "
            f"WHERE number > ?1 AND (?2 IS NULL OR signature = ?2) ORDER BY number LIMIT {_PAGE_ROWS}"
        )
        while page := self._rows(query, last, signature):
            last = page[-1][0]
            for _, packet_id, *rest, digest in page:
                yield (str(packet_id), *map(_as_text, rest[:2]), rest[2], digest)

    def signatures(self) -> dict[str, int]:
        """Number of stored packets by signature."""
        query = "SELECT signature, COUNT(*) FROM packets WHERE state = 'stored' GROUP BY signature"
        return dict(self._rows(query))

    def signatures_but(self, reason: str) -> dict[str, int]:
        """Number of known packets by signature, but for those that are not stored for this reason."""
        query = "SELECT signature, COUNT(*) FROM packets WHERE reason != ? GROUP BY signature"
        return dict(self._rows(query, reason))

    def ids(self, state: str) -> set[str]:
        """The packets in one state."""
        return {name for (name,) in self._rows("SELECT packet_id FROM packets NOT INDEXED WHERE state = ?", state)}

    def owned(self) -> list[tuple[str, str, bytes]]:
        """Packet id, owner and digest of every ownership, unverified."""
        return self._rows("SELECT packet_id, owner, digest FROM owners WHERE packet_id >= ''")

    def wrong_sizes(self) -> list[str]:
        """Packets whose rows state a size that no packet file has."""
        query = f"typeof(size_bytes) != 'integer' OR size_bytes NOT BETWEEN 0 AND {_LARGEST_FILE}"
        return [str(packet_id) for (packet_id,) in self._rows(f"SELECT packet_id FROM packets WHERE {query}")]

    def counted(self) -> tuple[int, int]:
        """Stored packets and bytes of all files, by counting rows."""
        with self._read_lock, self._translated():
            self._look_again()
            return count_rows(self._reader)

    def counts_are_right(self) -> bool:
        """Whether the noted counts are those of the rows."""
        return self._rows("SELECT stored, size_bytes FROM totals") == [self.counted()]

    def fact(self, key: str) -> str | None:
        """What was noted under a key, such as the time of the last sweep."""
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def faults(self) -> list[str]:
        """What SQLite finds wrong with the file's structure."""
        with self._read_lock, self._translated():
            self._look_again()
            return database_repair.faults(self._reader)

    def latest_use(self) -> int:
        """The greatest ``last_used`` of all rows."""
        return int(self._rows("SELECT COALESCE(MAX(CAST(last_used AS INTEGER)), 0) FROM packets NOT INDEXED")[0][0])

    def compact(self) -> bool:
        """Write the file anew, so that no gap in it holds what was deleted; whether that was done."""
        with self._write_lock:
            return self._writer is not None and database.compact(self._writer, at_any_size=True)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            if self._writer is not None and self._erased:
                database.compact(self._writer)
                self._erased = False
            self._close_writer()

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._read_lock, self._translated():
            self._look_again()
            return self._reader.execute(query, values).fetchall()

    def _prepared(self) -> sqlite3.Connection:
        """A connection that writes, to tables of this version; what another program wrote is left as it was."""
        writer = database.connect(self._path)
        try:
            version = written_version(writer, self._path)
            database.use_write_ahead_log(writer, self._path)
            if version != STORE_VERSION:  # else nothing is written: another process may be at it for long
                prepare(writer, self._path)
        except BaseException:
            writer.close()
            raise
        return writer

    def _read_only(self, error: sqlite3.OperationalError) -> None:
        """Read what there is where nothing can be written."""
        if error.sqlite_errorcode & 0xFF not in database.NO_WRITE_CODES or not self._path.is_file():
            raise error
        self._no_writing = f"{error}; make its folder and files writable, or free some room, and open it again"
        try:
            self._seen = database.stamp(self._path)
            self._reader = database.connect_read_only(self._path)
        except sqlite3.Error:
            raise error from None
        if (version := written_version(self._reader, self._path)) != STORE_VERSION:
            self._reader.close()
            raise StoreFormatError(
                f"the packet store {str(self._path)!r} has format version {version} and cannot be written; run "
                f"'kvpacket check {self._path.parent}' once where it can, which brings it to version {STORE_VERSION}"
            )

    def _look_again(self) -> None:
        """Where there was no log, SQLite took the file for unchanging; connect again once it did change."""
        if self._writer is None and self._seen != (now := database.stamp(self._path)):
            self._reader.close()
            self._seen, self._reader = now, database.connect_read_only(self._path)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # of SQLite's message, which quotes what is damaged
            raise self._unreadable("its structure is damaged") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise StoreFullError(f"the disk of {str(self._path)!r} is full; free some room") from error
            if code in _FOREIGN_CODES:
                raise self._unreadable(str(error)) from error
            advice = database.advice_on(error)[1]
            raise StoreError(f"the packet catalogue {str(self._path)!r} cannot be used: {error}; {advice}") from error

    def _unreadable(self, why: str) -> StoreFormatError:
        return StoreFormatError(
            f"{str(self._path)!r} is no readable packet catalogue ({why}); "
            "run 'kvpacket check DIR --repair', and where that fails too, move the folder away and ingest the "
            "documents again"
        )


def _as_text(value: object) -> str:
    """A column that should hold text; after damage it may hold anything."""
    return value if isinstance(value, str) else repr(value)
