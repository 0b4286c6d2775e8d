"""SQLite files as store and index keep them: a write-ahead log, nothing left of what was deleted, no links followed."""

from __future__ import annotations

import functools
import logging
import os
import re
import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path
from urllib.request import pathname2url

from kvpacket_rag.errors import StoreError, StoreFormatError, StoreFullError

logger = logging.getLogger(__name__)

NO_WRITE_CODES = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
BUSY_SECONDS = 60.0
ADVICE: dict[str, tuple[type[StoreError], str]] = {
    "SQLITE_NOTADB": (StoreFormatError, "choose another folder, or move the file away and build the index again"),
    "SQLITE_CORRUPT": (
        StoreError,
        "the file is damaged: run 'kvpacket check DIR --repair', and where that fails too, move the file away and "
        "build the index again",
    ),
    "SQLITE_ERROR": (
        StoreError,
        "the file is not as this program knows it: open it again, for another version of kvpacket-rag may have brought "
        "it up to date; else 'kvpacket check DIR' tells what is wrong",
    ),
    "SQLITE_FULL": (StoreFullError, "make room on the disk and repeat the change; nothing of it was kept"),
    "SQLITE_BUSY": (StoreError, "another process keeps writing to it; try again when that has ended"),
    "SQLITE_READONLY": (StoreError, "make the file and its folder writable, and see that the disk has room"),
    "SQLITE_CANTOPEN": (StoreError, "make the folder writable, and see that files may still be opened (ulimit -n)"),
    "SQLITE_IOERR": (StoreError, "nothing of this change was kept; see that the disk works and has room (ulimit -f)"),
}
_NEEDS = (
    "has no locks or no shared memory, by which processes take turns; use a local disk, or, from one machine at a "
    "time, a network disk with locks (NFS 4, SMB)"
)
_NO_LOCKS = {f"SQLITE_{name}" for name in ("PROTOCOL", "IOERR_LOCK", "IOERR_RDLOCK", "IOERR_SHMLOCK", "IOERR_SHMMAP")}
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    (
        "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.rclone fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs lustre "
        "nfs nfs4 smb3 smbfs virtiofs"
    ).split()
)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # also ends a journal that names a super-journal
_COMPACT_BYTES = 64_000_000  # a file up to this size is written anew in less than a second, and in memory


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection that may write; None keeps everything in memory.

    Raises:
        StoreError: the file is a link, which may lead out of the store's folder, or no file, or a planted journal lies
            beside it.
    """
    if path is not None:
        require_plain(path)
        _require_own_journal(Path(f"{path}-journal"))
    return _set_up(
        sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    )


def require_plain(path: Path) -> None:
    """Refuse what is no plain file where the file, or what SQLite keeps beside it, belongs.

    Raises:
        StoreError: a link, a folder, a pipe or a device lies there.
    """
    for name in (f"{path}{ending}" for ending in ("", "-wal", "-shm", "-journal")):
        try:
            mode = os.lstat(name).st_mode
        except OSError:
            continue  # opening it tells what is wrong
        if stat.S_ISLNK(mode):
            raise StoreError(f"{name!r} is a link; store and index keep their own files, so link the whole folder")
        if not stat.S_ISREG(mode):
            kind = next((what for is_one, what in _KINDS if is_one(mode)), "no file")
            raise StoreError(f"{name!r} is {kind}, expected a plain file; move it away, or use another folder")


def require_objects(connection: sqlite3.Connection, name: str, schema: tuple[str, ...], *, is_current: bool) -> None:
    """Refuse a file with other tables, indexes, triggers or views than ours: they would run when we write.

    Args:
        connection: of the file.
        name: of the file, for the error.
        schema: statements that make the tables of this version.
        is_current: the file is of this version; else only triggers and views are compared.

    Raises:
        StoreFormatError: something is there that should not be, or is missing.
    """
    expected, found = _objects_of(schema), _objects(connection)
    wrong = {key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)}
    wrong = {(kind, what) for kind, what in wrong if is_current or kind not in ("table", "index")}
    if wrong:
        told = ", ".join(f"{kind} {what[:80]!r}" for kind, what in sorted(wrong))
        raise StoreFormatError(
            f"{name} is not laid out as this program does it: {told}. It was damaged, or changed to run something; "
            "move its folder away and ingest the documents again"
        )


@functools.cache
def _objects_of(schema: tuple[str, ...]) -> dict[tuple[str, str], str]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in schema:
            connection.execute(statement)
        return _objects(connection)


def _objects(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """SQL by kind and name, but for what SQLite makes itself; a column added later looks like one from the start."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    own = [row for row in rows if not (row[0] in ("table", "index") and str(row[1]).startswith("sqlite_"))]
    return {(str(kind), str(name)): re.sub(r"\s+|DEFAULT (x''|-1)", "", str(sql)) for kind, name, sql in own}


def drop_defaults(connection: sqlite3.Connection) -> None:
    """Take away the defaults with which sealed columns were added, so that statements of earlier versions fail.

    Else a process of such a version, still open, would write rows without seals. SQLite's documentation of ALTER TABLE
    changes defaults this way.
    """
    (version,) = connection.execute("PRAGMA schema_version").fetchone()
    connection.execute("PRAGMA writable_schema = ON")
    try:
        sql = "UPDATE sqlite_master SET sql = replace(replace(sql, ?, ''), ?, '') WHERE type = 'table'"
        connection.execute(sql, (" DEFAULT x''", " DEFAULT -1"))
        connection.execute(f"PRAGMA schema_version = {version + 1}")
    finally:
        connection.execute("PRAGMA writable_schema = RESET")


def advice_on(error: sqlite3.Error) -> tuple[type[StoreError], str]:
    """What to raise in place of an error of SQLite's, and what to do."""
    name = getattr(error, "sqlite_errorname", "")
    return ADVICE.get("_".join(name.split("_")[:2]), (StoreError, "close it and open it again"))


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection to a file in a folder where nothing can be written.

    While nobody writes, there is no log beside the file and none can be made, so the file is read as it is;
    whoever reads must look at :func:`stamp` and connect again when it changed.
    """
    alone = stamp(path)[1] is None
    uri = f"file:{pathname2url(str(path))}?mode=ro{'&immutable=1' if alone else ''}"
    opened = sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
    try:
        opened.execute("SELECT COUNT(*) FROM sqlite_master")
    except BaseException:
        opened.close()
        raise
    return _set_up(opened)


def stamp(path: Path) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
    """What file and log look like from outside; None for one that is missing or empty."""
    return _stamp(path), _stamp(Path(f"{path}-wal"))


def use_write_ahead_log(connection: sqlite3.Connection, path: Path | None) -> None:
    """Switch modes; SQLite does not wait by itself when another process is switching too.

    Raises:
        StoreError: the file system has no locks, or no memory that processes share.
    """
    if path is not None:
        warn_of_network(path.parent)
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                if error.sqlite_errorname in _NO_LOCKS:
                    raise StoreError(f"the file system of {str(path)!r} {_NEEDS} ({error})") from error
                raise
            time.sleep(0.01)
    if path is not None and mode != "wal":
        raise StoreError(f"the file system of {str(path)!r} {_NEEDS}")


@functools.cache
def warn_of_network(folder: Path) -> None:
    """Say, once a folder, that it lies on a disk that other machines may reach, which no lock of SQLite keeps out.

    The write-ahead log is held together by memory that processes share, and machines do not share memory: two of them
    that change one store at once would damage it, and neither would notice. Known on Linux only.
    """
    kind = file_system(folder)
    if kind in _NETWORK:
        logger.warning(
            "%s lies on a network disk (%s): several processes of this machine may use it, but no other machine at "
            "the same time, for their locks do not reach each other",
            folder,
            kind,
        )


def file_system(folder: Path) -> str:
    """The kind of file system a folder lies on, as Linux names it; "" where that is not known."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found, place = "", os.path.realpath(folder)
    for line in lines:
        mounted, _, kinds = line.partition(" - ")
        root = mounted.split(" ")[4].replace("\\040", " ")
        if place == root or place.startswith(root.rstrip("/") + "/"):
            found = max(found, f"{len(root):06} {kinds.split(' ')[0]}")  # the deepest holds it
    return found[7:]


def empty_log(connection: sqlite3.Connection, wait_seconds: float) -> bool:
    """Move the log into the file and cut it to nothing, so that no deleted text is left in it; whether that went."""
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * wait_seconds)}")
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    except sqlite3.OperationalError:
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_SECONDS)}")


def compact(connection: sqlite3.Connection, *, at_any_size: bool = False) -> bool:
    """Write the file anew, without what deletions left in the gaps of its pages; whether that was done.

    ``secure_delete`` overwrites what is deleted, but not the copies SQLite leaves behind, now and then, when it
    moves rows to another page.
    """
    try:
        (pages,), (size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        if pages * size > _COMPACT_BYTES and not at_any_size:
            return False
        connection.execute("VACUUM")
    except sqlite3.Error:  # no room, or another process is at work: the rows themselves are gone all the same
        return False
    return empty_log(connection, wait_seconds=0.0)


def _require_own_journal(path: Path) -> None:
    """Refuse a rollback journal that names a further file, which SQLite would delete.

    Ours is there only for moments, while a new file is switched to the write-ahead log, and names none.
    """
    if not path.exists():
        return
    if path.is_file():
        try:
            with path.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - len(_JOURNAL_MAGIC), 0))
                if file.read() != _JOURNAL_MAGIC:
                    return
        except FileNotFoundError:
            return
    raise StoreError(f"{str(path)!r} was not written by this program and may make SQLite delete files; remove it")


def _set_up(connection: sqlite3.Connection) -> sqlite3.Connection:
    # A flipped bit may leave bytes that are no text; the row's digest then tells.
    connection.text_factory = lambda content: content.decode(errors="replace")
    for setting in ("trusted_schema = OFF", "secure_delete = ON", "cell_size_check = ON", "temp_store = MEMORY"):
        connection.execute(f"PRAGMA {setting}")
    return connection


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None
