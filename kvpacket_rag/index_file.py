"""The SQLite file of an index: opening, format check, snapshots and transactions. Knows no chunk."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpacket_rag import database, database_repair
from kvpacket_rag.errors import StoreError, StoreFormatError

APPLICATION_ID = 0x6B767069  # "kvpi", in the header of the file
FORMAT_VERSION = 4
_LOG_WAIT_SECONDS = 1.0  # for readers to finish before the log is emptied of what was deleted

# A vector gets a new id whenever it is written, and no id comes twice: the ids alone tell what changed.
_SCHEMA = (
    """CREATE TABLE chunks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL,
        text TEXT NOT NULL, metadata TEXT NOT NULL, packet_id TEXT NOT NULL, digest BLOB NOT NULL)""",
    "CREATE INDEX chunks_by_document ON chunks (document_id)",
    """CREATE TABLE vectors (
        vector_id INTEGER PRIMARY KEY AUTOINCREMENT,
        seq INTEGER NOT NULL UNIQUE REFERENCES chunks ON DELETE CASCADE, vector BLOB NOT NULL,
        checksum INTEGER NOT NULL)""",
    "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL, digest BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
_BYTES = ", ".join(f"CAST({name} AS BLOB)" for name in ("chunk_id", "text", "document_id", "metadata", "packet_id"))
_MIGRATIONS = {  # from each version to the next one; what bore no seal is believed once more, and sealed
    1: (
        "ALTER TABLE chunks ADD COLUMN digest BLOB NOT NULL DEFAULT x''",
        f"UPDATE chunks SET digest = seal({_BYTES})",
    ),
    2: (
        "ALTER TABLE vectors ADD COLUMN checksum INTEGER NOT NULL DEFAULT -1",
        "UPDATE vectors SET checksum = vector_checksum(seq, vector)",
    ),
    3: (
        "ALTER TABLE settings ADD COLUMN digest BLOB NOT NULL DEFAULT x''",
        "UPDATE settings SET digest = seal(CAST(key AS BLOB), CAST(value AS BLOB))",
        f"UPDATE chunks SET digest = seal_again(digest, seq, {_BYTES})",
    ),
}


def row_digest(*columns: str) -> bytes:
    """16 bytes over the columns of a chunk: SQLite does not notice a bit that flips inside a text."""
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        content = column.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _seal(*columns: object) -> bytes:
    """The digest of what cannot be proved, for SQL; of a NULL, which only damage leaves, none that matches."""
    texts = [column.decode(errors="replace") for column in columns if isinstance(column, bytes)]
    return row_digest(*texts) if len(texts) == len(columns) else b""


def _seal_again(digest: object, seq: int, *columns: object) -> bytes:
    """The digest with a row's number, in place of one without; of a row that was damaged, none that matches."""
    return _seal(str(seq).encode(), *columns) if digest and _seal(*columns) == digest else b""


def _checksum(seq: object, vector: object) -> int:
    """``vector_checksum`` for SQL; of what damage made another type, none that matches."""
    return vector_checksum(seq, vector) if isinstance(seq, int) and isinstance(vector, bytes) else -1


def vector_checksum(seq: int, vector: bytes) -> int:
    """32 bits over a vector and the number of the chunk it belongs to: damage would find other chunks."""
    return zlib.crc32(vector, seq & 0xFFFFFFFF)


class IndexFile:
    """One connection under one lock, so threads may share it.

    Other processes of the same machine may open the same file (SQLite's write-ahead log needs memory that they
    share; for network disks see :class:`~kvpacket_rag.store.DiskStore`). Every change is one transaction: whole or
    not at all, also if the process is killed. Where nothing can be written, what there is can be read.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file or create it; ``None`` keeps all in memory.

        Raises:
            StoreFormatError: the file is no index, or one of another format version.
            StoreError: it cannot be read or written.
        """
        self.name = str(path) if path else "in memory"
        self.path = path
        self._lock = threading.RLock()
        self._closed = False
        self._seen: object = None  # file and log as they were when they were opened for reading alone
        self._reopened = 0
        self._unclean = self._erased = False  # log and file may hold what was deleted
        self._is_sound: bool | None = None  # SQLite's indexes lead to the rows of their tables; None: not looked yet
        with self._explained():
            self._db = database.connect(path)
            try:
                self._prepare()
            except sqlite3.OperationalError as error:
                self._db.close()
                self._read_only(error)
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
            self._look_again()
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.rollback()

    @contextmanager
    def writing(self, *, erases: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction: all that is written inside, or nothing.

        Args:
            erases: what is deleted or replaced inside shall not stay in the write-ahead log.

        Raises:
            StoreError: this thread is in the middle of reading, or another process keeps writing.
            StoreFullError: the disk is full.
        """
        with self._lock, self._explained():
            if self._db.in_transaction:
                raise StoreError(f"index {self.name} cannot change while it is searched; change it afterwards")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._require_same_format()
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._is_sound = None  # what was mended is as it was
                if not self._closed:
                    self._db.rollback()
                raise
            self._erased |= erases
            if erases or self._unclean:
                self._unclean = not database.empty_log(self._db, _LOG_WAIT_SECONDS if erases else 0.0)

    def _require_same_format(self) -> None:
        """Refuse to write rows of this format into a file that another version has brought up to date meanwhile."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > FORMAT_VERSION:
            raise StoreFormatError(
                f"index {self.name} was brought to format {version} by another version of kvpacket-rag while it was "
                f"open here in format {FORMAT_VERSION}; close it and open it again with that version"
            )

    def version(self) -> tuple[int, int, int]:
        """Changes whenever this or another process may have changed a row."""
        with self.reading() as db:
            (others,) = db.execute("PRAGMA data_version").fetchone()
            return others, db.total_changes, self._reopened

    def faults(self) -> list[str]:
        """What SQLite finds wrong with the file's structure."""
        with self.reading() as db:
            return database_repair.faults(db)

    def is_sound(self) -> bool:
        """Whether SQLite's indexes lead to the rows of their tables; looked for once (0.4 s for 100,000 chunks)."""
        if self._is_sound is None:
            self._is_sound = not self.faults()
        return self._is_sound

    def reindex(self, *, however_damaged: bool = False) -> None:
        """Make SQLite's indexes anew, inside of :meth:`writing`; where they are no trees any more, only if asked to."""
        if however_damaged:
            database_repair.rebuild_indexes(self._db)
        else:
            self._db.execute("REINDEX")
        self._is_sound = True  # whatever else is wrong with the file

    def compact(self) -> bool:
        """Write the file anew, so that no gap in it holds what was deleted; whether that was done."""
        with self._lock:
            return database.compact(self._db, at_any_size=True)

    def close(self) -> None:
        """Release the file. A second call does nothing."""
        with self._lock:
            if self._erased and not self._closed and self.path:
                database.compact(self._db)
            self._closed = True
            self._db.close()

    def _prepare(self) -> None:
        version = self._format()  # before anything is written: the file may be another program's
        self._db.execute("PRAGMA page_size = 8192")  # of a new file: four vectors of 384 numbers to a page
        database.use_write_ahead_log(self._db, self.path)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        if version != FORMAT_VERSION:
            for name, count, function in (
                ("seal", -1, _seal),
                ("seal_again", 7, _seal_again),
                ("vector_checksum", 2, _checksum),
            ):
                self._db.create_function(name, count, function, deterministic=True)
            with self.writing() as db:
                for statement in _steps_from(self._format()):  # another process may have been quicker
                    db.execute(statement)
                database.drop_defaults(db)
                self._format()

    def _read_only(self, error: sqlite3.OperationalError) -> None:
        """Read what there is where nothing can be written."""
        if error.sqlite_errorcode & 0xFF not in database.NO_WRITE_CODES or not (self.path and self.path.is_file()):
            raise error
        self._seen = database.stamp(self.path)
        try:
            self._db = database.connect_read_only(self.path)
        except sqlite3.Error:
            raise error from None
        if (version := self._format()) != FORMAT_VERSION:
            self._db.close()
            raise StoreFormatError(
                f"index {self.name} has format {version} and cannot be written; run 'kvpacket check "
                f"{self.path.parent}' once where it can, which brings it to format {FORMAT_VERSION}"
            )

    def _look_again(self) -> None:
        """Where there was no log, SQLite took the file for unchanging; connect again once it did change."""
        if self._seen is not None and self.path and self._seen != (now := database.stamp(self.path)):
            self._db.close()
            self._seen, self._db = now, database.connect_read_only(self.path)
            self._reopened += 1

    def _format(self) -> int:
        """The file's format version, 0 of a new file.

        Raises:
            StoreFormatError: it is no index, or one of a format that cannot be read here.
        """
        application, version, tables = self._db.execute(  # at once: another process may be starting the file
            "SELECT (SELECT application_id FROM pragma_application_id), "
            "(SELECT user_version FROM pragma_user_version), (SELECT COUNT(*) FROM sqlite_master)"
        ).fetchone()
        if application == 0 and tables == 0:
            return 0
        if application != APPLICATION_ID:
            raise StoreFormatError(
                f"{self.name} is a database of another program (application id {application:#x}, an index has "
                f"{APPLICATION_ID:#x}); choose another folder for the index"
            )
        if not 1 <= version <= FORMAT_VERSION:
            raise StoreFormatError(
                f"index {self.name} has format {version}, this version of kvpacket-rag reads format "
                f"{FORMAT_VERSION} and earlier ones; open it with the version that wrote it, or build it again in "
                "another folder"
            )
        database.require_objects(self._db, self.name, _SCHEMA, is_current=version == FORMAT_VERSION)
        return int(version)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # of SQLite's message, which quotes what is damaged
            raise StoreError(f"index {self.name}: {database.ADVICE['SQLITE_CORRUPT'][1]}") from error
        except sqlite3.Error as error:
            if self._closed:
                raise StoreError(f"index {self.name} is closed; open it again") from error
            kind, advice = database.advice_on(error)
            raise kind(f"index {self.name}: {error}; {advice}") from error


def _steps_from(version: int) -> list[str]:
    """The statements that make a file of a version, 0 for none, one of this version."""
    later = [step for earlier in range(max(version, 1), FORMAT_VERSION) for step in _MIGRATIONS[earlier]]
    return [*(later if version else _SCHEMA), f"PRAGMA user_version = {FORMAT_VERSION}"]
