"""What a disk must give to several processes, and what is said where it does not."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

import pytest
from filelock import FileLock

from kvpacket_rag import database
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import change_lock
from kvpacket_rag.store import DiskStore


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of mounted disks: the folder "far away" below the test's own is one of the network."""
    table = tmp_path / "mounts"
    lines = [
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
        f"28 27 0:9 / {tmp_path}/far\\040away rw shared:7 master:2 - nfs4 server:/export rw,vers=4.2",
        f"29 28 0:8 / {tmp_path}/far\\040away/near rw - ext4 /dev/vdb rw",
        f"30 27 0:7 / {tmp_path}/far rw - fuse.sshfs me@there: rw",
    ]
    table.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(database, "_MOUNTS", table)
    database.warn_of_network.cache_clear()
    return tmp_path


def test_the_deepest_mount_tells_the_file_system(mounts: Path) -> None:
    (mounts / "link").symlink_to("far away/below")
    for name, kind in (
        ("far away", "nfs4"),
        ("far away/below/it", "nfs4"),
        ("far away/near/it", "ext4"),
        ("far", "fuse.sshfs"),
        ("farther", "ext4"),
        ("link", "nfs4"),
    ):
        assert database.file_system(mounts / name) == kind


def test_where_the_system_does_not_tell_nothing_is_said(mounts: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mounts / "mounts").unlink()
    DiskStore(mounts / "far away").close()
    assert database.file_system(mounts) == "" and not caplog.records


def test_opening_a_store_and_an_index_on_a_network_disk_is_told_once(
    mounts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        DiskStore(mounts / "far away" / "library").close()
        PacketIndex.open(mounts / "far away" / "library").close()
        DiskStore(mounts / "here").close()
    (told,) = caplog.records
    assert told.levelno == logging.WARNING and "network disk (nfs4)" in told.getMessage()
    assert "no other machine at the same time" in told.getMessage() and str(mounts / "far away") in told.getMessage()


@pytest.mark.parametrize("name", ["SQLITE_IOERR_LOCK", "SQLITE_IOERR_SHMMAP", "SQLITE_PROTOCOL"])
def test_a_disk_without_locks_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    class NoLocks(sqlite3.Connection):
        def execute(self, *arguments: object) -> sqlite3.Cursor:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, name), name
            raise error

    connection = NoLocks(":memory:")
    with pytest.raises(StoreError, match=r"has no locks .* use a local disk"):
        database.use_write_ahead_log(connection, tmp_path / "packets.sqlite")
    connection.close()


@pytest.mark.parametrize("error", [NotImplementedError("no flock here"), PermissionError(13, os.strerror(13))])
def test_a_folder_that_cannot_be_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(StoreError, match=r"cannot be locked .* network disk with locks"), change_lock(tmp_path):
        pass
