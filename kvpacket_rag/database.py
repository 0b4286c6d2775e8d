"""SQLite files as store and index keep them: a write-ahead log, nothing left of what was deleted, no links followed."""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import time
from pathlib import Path
from urllib.request import pathname2url

from kvpacket_rag.errors import StoreError

logger = logging.getLogger(__name__)

NO_WRITE_CODES = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
BUSY_SECONDS = 60.0
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
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # also ends a journal that names a super-journal
_COMPACT_BYTES = 64_000_000  # a file up to this size is written anew in less than a second, and in memory


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection that may write; None keeps everything in memory.

    Raises:
        StoreError: the file is a link, which may lead out of the store's folder, or a planted journal lies beside it.
    """
    for name in (Path(f"{path}{ending}") for ending in ("", "-wal", "-shm", "-journal")):
        if path is not None and name.is_symlink():
            raise StoreError(
                f"{str(name)!r} is a link; store and index keep their own files, so link the whole folder instead"
            )
    if path is not None:
        _require_own_journal(Path(f"{path}-journal"))
    return _set_up(
        sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    )


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
