"""Packet files read into the page cache by a thread, while those before them are put to use.

Packets are mapped, so a file that is not in the page cache is read where its numbers are first
touched, a few pages at a time, and assembly waits for the disk. A thread that reads the files in the
order in which they will be wanted stays ahead of that. Where all is cached no thread wakes up: a
read that would have to wait says so.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_STEP = 1 << 20  # bytes of a read, and between two places that are looked at


def read_ahead(paths: Iterable[Path]) -> int:
    """Begin to read files, in order, and return at once; how many are not in the page cache.

    Nothing is done where the system cannot tell. What cannot be read is left to whoever loads it.
    """
    missing = [path for path in paths if not _is_cached(path)]
    if missing:
        with suppress(RuntimeError):  # the process ends
            _reader().submit(_read, missing)
    return len(missing)


def _is_cached(path: Path) -> bool:
    """Whether the file's pages are in memory, as far as a look at some of them tells; True where it cannot be told."""
    if not hasattr(os, "RWF_NOWAIT"):  # Linux alone has it
        return True
    byte = bytearray(1)
    try:
        with _plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(0, size, _STEP):
                os.preadv(file.fileno(), [byte], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # it is gone, or its file system knows no such reads
        return True
    return True


def _plain(path: Path) -> io.FileIO:
    """An open file; an error for a link, and for a pipe or device, which could be waited for without end."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return file


def _read(paths: Sequence[Path]) -> None:
    buffer = bytearray(_STEP)
    for path in paths:
        with suppress(OSError), _plain(path) as file:
            while file.readinto(buffer):
                pass


@functools.cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvpacket-read-ahead")


os.register_at_fork(after_in_child=_reader.cache_clear)  # threads do not live on in a forked process
