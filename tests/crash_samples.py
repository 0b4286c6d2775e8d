"""Kills a process at a chosen step of what it writes: a file written, synced, renamed or deleted, or a statement."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Step = Callable[[str], None]


def watch(step: Step) -> None:
    """Call ``step`` before every write from now on; for a process of its own, since it is never undone."""
    for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
        _watch_function(os, name, step)
    connect = sqlite3.connect

    def connecting(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda statement: None if statement.startswith("SELECT") else step("statement"))
        return connection

    sqlite3.connect = connecting  # type: ignore[assignment]
    from kvpacket_rag.store import folder

    def opening(*arguments: Any) -> _HalfFile:
        return _HalfFile(open(*arguments), step)

    folder.open = opening  # type: ignore[attr-defined]


def _watch_function(module: Any, name: str, step: Step) -> None:
    real = getattr(module, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        step(name)
        return real(*arguments, **options)

    setattr(module, name, watched)


class _HalfFile:
    """A file whose first write stops half way, takes a step, and then goes on."""

    def __init__(self, file: Any, step: Step) -> None:
        self._file, self._step = file, step

    def writelines(self, parts: Any) -> None:
        content = b"".join(map(bytes, parts))
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._step("write")
        self._file.write(content[len(content) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _HalfFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a process that is killed before its step of that number; False if it ended before."""
    left = [number]

    def step(_: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        _work_and_exit(work, step)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the work failed before step {number}")
    return os.WIFSIGNALED(status)


def killed_after(seconds: float, work: Callable[[], None]) -> bool:
    """Run ``work`` in a process that is killed after so many seconds; False if it ended before."""
    child = os.fork()
    if not child:
        _work_and_exit(work, None)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def failing_at(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a process whose step of that number, and all after it of that kind, meet a disk that fails.

    Statements are SQLite's own and do not fail. False if the work ended before that step.
    """
    read, write = os.pipe()
    left, kinds = [number], set[str]()

    def step(kind: str) -> None:
        if kind == "statement":
            return
        left[0] -= 1
        if left[0] < 0 and not kinds:
            kinds.add(kind)
            os.write(write, b"met")
        if kind in kinds:
            raise OSError(errno.EIO, "the disk fails")

    child = os.fork()
    if not child:
        _work_and_exit(work, step)
    os.close(write)
    with os.fdopen(read) as pipe:
        met = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"the work failed otherwise at step {number}")
    return met == "met"


def _work_and_exit(work: Callable[[], None], step: Step | None) -> NoReturn:
    """Do it in this process, which ends with it: 0 if it ended well, 1 after an error, which is printed."""
    code = 1
    try:
        if step is not None:
            watch(step)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def fast_folder(fallback: Path) -> Path:
    """A folder in memory where there is one: a kill loses nothing that was handed to the system, synced or not."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else fallback
