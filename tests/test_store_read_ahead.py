"""Packet files are read before they are wanted, and only those that are not in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_store import SIGNATURE, make_packet, same

from kvpacket_rag.store import DiskStore, read_ahead


def dropped(path: Path) -> Path:
    """The file, its pages out of memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def settle() -> None:
    """Wait for what the thread was given."""
    read_ahead._reader().submit(lambda: None).result()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    *paths, looked_at = [tmp_path / name for name in "abcd"]  # Linux may begin to read what is looked at
    for path in (*paths, looked_at):
        path.write_bytes(os.urandom(3 << 20))
    if read_ahead._is_cached(dropped(looked_at)):
        pytest.skip("this file system drops no pages, or cannot tell")
    return paths


def test_what_is_not_in_memory_is_read_and_what_is_wakes_no_thread(files: list[Path], monkeypatch: pytest.MonkeyPatch):
    for path in files[:2]:
        dropped(path)
    assert read_ahead.read_ahead(files) == 2
    settle()
    assert all(map(read_ahead._is_cached, files))
    monkeypatch.setattr(read_ahead, "_reader", lambda: pytest.fail("woken"))
    assert read_ahead.read_ahead(files) == 0


def test_a_file_half_in_memory_is_read(files: list[Path]):
    with dropped(files[0]).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # or the system reads ahead, at times all of it
        file.read(1)
    assert read_ahead.read_ahead(files[:1]) == 1


def test_a_file_that_goes_is_left_to_whoever_loads_it(files: list[Path], monkeypatch: pytest.MonkeyPatch):
    files[0].unlink()
    assert read_ahead.read_ahead(files[:1]) == 0
    monkeypatch.setattr(read_ahead, "_is_cached", lambda path: False)  # it goes after the look
    assert read_ahead.read_ahead(files[:2]) == 2
    settle()


def test_a_store_reads_what_a_request_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, asked = DiskStore(tmp_path), []
    for seed in range(3):
        store.put(make_packet(seed), f"text {seed}")
    monkeypatch.setattr("kvpacket_rag.store.disk.read_ahead", lambda paths: asked.extend(path.stem for path in paths))
    names = [make_packet(seed).packet_id for seed in (2, 0)]
    with store.hold(iter(names)):
        assert asked == names and same(store.get(names[0], SIGNATURE), make_packet(2))
    store.close()
