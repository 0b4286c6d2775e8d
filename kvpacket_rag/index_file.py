"""The SQLite file of an index: opening, format check, snapshots and transactions. Knows no chunk."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpacket_rag.errors import StoreError, StoreFormatError, StoreFullError

APPLICATION_ID = 0x6B767069  # "kvpi", in the header of the file
FORMAT_VERSION = 1
_BUSY_SECONDS = 30.0

# A vector gets a new id whenever it is written, and no id comes twice: the ids alone tell what changed.
_SCHEMA = (
    """CREATE TABLE chunks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL,
        text TEXT NOT NULL, metadata TEXT NOT NULL, packet_id TEXT NOT NULL)""",
    "CREATE INDEX chunks_by_document ON chunks (document_id)",
    """CREATE TABLE vectors (
        vector_id INTEGER PRIMARY KEY AUTOINCREMENT,
        seq INTEGER NOT NULL UNIQUE REFERENCES chunks ON DELETE CASCADE, vector BLOB NOT NULL)""",
    "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT_VERSION}",
)
_ADVICE: dict[str, tuple[type[StoreError], str]] = {
    "SQLITE_NOTADB": (StoreFormatError, "choose another folder, or move the file away and build the index again"),
    "SQLITE_CORRUPT": (StoreError, "the file is damaged: move it away and build the index again"),
    "SQLITE_FULL": (StoreFullError, "make room on the disk and repeat the change; nothing of it was kept"),
    "SQLITE_BUSY": (StoreError, "another process keeps writing to it; try again when that has ended"),
    "SQLITE_READONLY": (StoreError, "make the file and its folder writable"),
    "SQLITE_CANTOPEN": (StoreError, "make sure that the folder can be written and the file is a plain file"),
    "SQLITE_IOERR": (StoreError, "the disk failed; nothing of this change was kept"),
}


class IndexFile:
    """One connection under one lock, so threads may share it.

    Other processes may open the same file on a local disk (SQLite's write-ahead log needs memory
    that they share). Every change is one transaction: whole or not at all, also if the process is killed.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file or create it; ``None`` keeps all in memory.

        Raises:
            StoreFormatError: the file is no index, or one of another format version.
            StoreError: it cannot be read or written.
        """
        self.name = str(path) if path else "in memory"
        self._lock = threading.RLock()
        self._closed = False
        with self._explained():
            self._db = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot for all that is read inside. May be nested, also in :meth:`writing`."""
        with self._lock, self._explained():
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.rollback()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all that is written inside, or nothing.

        Raises:
            StoreError: this thread is in the middle of reading, or another process keeps writing.
            StoreFullError: the disk is full.
        """
        with self._lock, self._explained():
            if self._db.in_transaction:
                raise StoreError(f"index {self.name} cannot change while it is searched; change it afterwards")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if not self._closed:
                    self._db.rollback()
                raise

    def version(self) -> tuple[int, int]:
        """Changes whenever this or another process may have changed a row."""
        with self.reading() as db:
            (others,) = db.execute("PRAGMA data_version").fetchone()
            return others, db.total_changes

    def close(self) -> None:
        """Release the file. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._db.close()

    def _prepare(self) -> None:
        empty = self._is_empty()  # before anything is written: the file may be another program's
        self._db.execute("PRAGMA page_size = 8192")  # of a new file: four vectors of 384 numbers to a page
        self._keep_write_ahead_log()
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        if empty:
            with self.writing() as db:
                if self._is_empty():  # another process may have been quicker
                    for statement in _SCHEMA:
                        db.execute(statement)

    def _keep_write_ahead_log(self) -> None:
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:  # two processes start the file: SQLite does not wait here
                if "SQLITE_BUSY" not in error.sqlite_errorname or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _is_empty(self) -> bool:
        """Whether the file is new; raises if it is not and is no index of this format."""
        with self.reading() as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if application == 0 and tables == 0:
            return True
        if application != APPLICATION_ID:
            raise StoreFormatError(
                f"{self.name} is a database of another program (application id {application:#x}, an index has "
                f"{APPLICATION_ID:#x}); choose another folder for the index"
            )
        if version != FORMAT_VERSION:
            raise StoreFormatError(
                f"index {self.name} has format {version}, this version of kvpacket-rag reads format "
                f"{FORMAT_VERSION}; open it with the version that wrote it, or build it again in another folder"
            )
        return False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if self._closed:
                raise StoreError(f"index {self.name} is closed; open it again") from error
            name = getattr(error, "sqlite_errorname", "")
            kind, advice = _ADVICE.get("_".join(name.split("_")[:2]), (StoreError, "close it and open it again"))
            raise kind(f"index {self.name}: {error}; {advice}") from error
