"""What only the store on disk promises: files, reopening, killed and refused writes."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from test_store import SIGNATURE, closing, make_packet, open_store, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.errors import PacketMismatchError, PacketNotFoundError, StoreError, StoreFormatError, StoreFullError
from kvpacket_rag.packet import Packet, packet_id
from kvpacket_rag.store import DiskStore
from kvpacket_rag.store import disk as disk_module
from kvpacket_rag.store import packet_file as packet_file_module
from kvpacket_rag.store.changes import CatalogueChanges


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files(root: Path) -> list[Path]:
    """Every file of packets, whole or not."""
    return [path for folder in ("packets", "quarantine") for path in (root / folder).rglob("*") if path.is_file()]


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


def test_the_file_is_one_that_the_safetensors_library_reads(root: Path) -> None:
    packet = make_packet(1)
    DiskStore(root).put(packet, "text")
    name = packet.packet_id
    loaded = load_file(root / "packets" / name[:2] / f"{name}.safetensors")
    assert len(files(root)) == 1 and sorted(loaded) == ["0", "1"]
    assert torch.equal(loaded["0"], packet.tensors[0]) and torch.equal(loaded["1"], packet.tensors[1])


def test_a_tensor_that_is_a_view_is_stored_by_its_values(root: Path) -> None:
    view = torch.randn(2, 3, 8, 5).transpose(2, 3)[:, 1:]
    packet = Packet(packet_id([1], SIGNATURE), SIGNATURE, (view,), 7, 5)
    store = DiskStore(root)
    store.put(packet, "text")
    assert torch.equal(store.get(packet.packet_id, SIGNATURE).tensors[0], view)


def test_a_store_opened_again_holds_what_it_held(root: Path) -> None:
    first = DiskStore(root)
    first.put(make_packet(1), "text", "owner")
    before = (len(first), first.size_bytes, first.signatures(), first.revision(), list(first.known(SIGNATURE)))
    first.close()
    first.close()
    again = DiskStore(str(root))
    assert before == (len(again), again.size_bytes, again.signatures(), again.revision(), list(again.known(SIGNATURE)))
    assert same(again.get(packet_id([1], SIGNATURE), SIGNATURE), make_packet(1))
    assert again.drop_owners(["owner"]) == [packet_id([1], SIGNATURE)]


def test_a_closed_store_says_so(root: Path) -> None:
    store = DiskStore(root)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put(make_packet(1), "text")


def test_writing_into_a_read_tensor_cannot_change_the_packet(root: Path) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(packet, "text")
    store.get(packet.packet_id, SIGNATURE).tensors[0].zero_()
    assert same(store.get(packet.packet_id, SIGNATURE), packet)
    assert same(DiskStore(root).get(packet.packet_id, SIGNATURE), packet)


def test_a_deleted_file_is_gone_at_once_and_stays_readable_where_it_is_mapped(root: Path) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(packet, "text", "owner")
    mapped = store.get(packet.packet_id, SIGNATURE)
    store.drop_owners(["owner"])
    assert files(root) == [] and same(mapped, packet)


def test_the_deleted_text_is_not_left_in_the_catalogue(root: Path) -> None:
    store = DiskStore(root)
    store.put(make_packet(1), "a secret nobody may find", "owner")
    store.put(make_packet(2), "another text", "other")
    store.drop_owners(["owner"])
    store.close()
    content = b"".join(path.read_bytes() for path in root.iterdir() if path.is_file())
    assert b"another text" in content and b"a secret" not in content


def test_an_evicted_packet_leaves_no_file(tmp_path: Path, root: Path) -> None:
    store = open_store("disk", tmp_path, room=2)
    for seed in range(5):
        store.put(make_packet(seed), "text", "owner")
    assert len(files(root)) == 2 and sum(path.stat().st_size for path in files(root)) == store.size_bytes


def test_what_was_used_last_is_remembered_after_reopening(tmp_path: Path) -> None:
    first = open_store("disk", tmp_path, room=2)
    first.put(make_packet(1), "text")
    first.put(make_packet(2), "text")
    first.get(packet_id([1], SIGNATURE), SIGNATURE)
    first.close()
    again = open_store("disk", tmp_path, room=2)
    again.put(make_packet(3), "text")
    assert packet_id([1], SIGNATURE) in again and packet_id([2], SIGNATURE) not in again


def test_a_clock_that_goes_back_does_not_make_the_newest_packet_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("disk", tmp_path, room=2)
    store.put(make_packet(1), "text")
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    store.put(make_packet(2), "text")
    store.put(make_packet(3), "text")
    assert packet_id([1], SIGNATURE) not in store and packet_id([2], SIGNATURE) in store


def test_a_smaller_cap_is_kept_from_the_opening_on(tmp_path: Path) -> None:
    first = open_store("disk", tmp_path)
    for seed in range(5):
        first.put(make_packet(seed), "text")
    first.close()
    assert len(open_store("disk", tmp_path, room=2)) == 2


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_write_that_fails_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    packet, store = make_packet(1), DiskStore(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail(error))
        with pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt):
            store.put(packet, "text", "owner")
    assert (files(root), len(store), packet.packet_id in store, list(store.known(SIGNATURE))) == ([], 0, False, [])
    store.put(packet, "text", "owner")
    assert same(store.get(packet.packet_id, SIGNATURE), packet)


@pytest.mark.parametrize("step", ["fsync", "replace", "write"])
def test_a_full_disk_is_named_and_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(make_packet(0), "text")
    full = fail(OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr("kvpacket_rag.store.folder.open", full, raising=False)
        else:
            patch.setattr(os, step, full)
        with pytest.raises(StoreFullError, match="free some room"):
            store.put(packet, "text")
    assert len(files(root)) == len(store) == 1
    assert same(store.get(packet_id([0], SIGNATURE), SIGNATURE), make_packet(0))


def test_a_row_that_cannot_be_written_leaves_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    monkeypatch.setattr(CatalogueChanges, "store", fail(sqlite3.OperationalError("disk I/O error")))
    with pytest.raises(StoreError, match="disk I/O error"):
        store.put(make_packet(1), "text")
    assert files(root) == [] and len(store) == 0


def test_a_missing_file_is_a_packet_not_found_whose_text_stays_known(root: Path) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(packet, "text", "owner")
    files(root)[0].unlink()
    assert packet.packet_id not in store
    with pytest.raises(PacketNotFoundError, match="missing"):
        store.get(packet.packet_id, SIGNATURE)
    assert (len(store), store.size_bytes, len(list(store.known(SIGNATURE)))) == (0, 0, 1)
    store.put(packet, "text")
    assert same(store.get(packet.packet_id, SIGNATURE), packet)


def test_a_foreign_signature_is_refused_before_the_file_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root)
    store.put(make_packet(1), "text")
    monkeypatch.setattr(disk_module, "read_packet", fail(AssertionError("a file was opened")))
    with pytest.raises(PacketMismatchError):
        store.get(packet_id([1], SIGNATURE), replace(SIGNATURE, rope="other"))


def test_a_file_is_verified_once_and_again_after_it_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(packet, "text")
    checksum = Mock(wraps=packet_file_module._checksum)
    monkeypatch.setattr(packet_file_module, "_checksum", checksum)
    time.sleep(0.15)  # a file younger than the tick of file times is verified every time
    for _ in range(3):
        store.get(packet.packet_id, SIGNATURE)
    assert checksum.call_count == 1
    os.utime(files(root)[0])
    store.get(packet.packet_id, SIGNATURE)
    assert checksum.call_count == 2


def test_running_out_of_open_files_is_not_taken_for_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packet, store = make_packet(1), DiskStore(root)
    store.put(packet, "text")
    for name, error in {
        "safe_open": FileNotFoundError("the library says this of every file it cannot open"),
        "open": OSError(errno.EMFILE, "Too many open files"),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(packet_file_module, name, fail(error), raising=False)
            with pytest.raises(StoreError, match="cannot be"):
                store.get(packet.packet_id, SIGNATURE)
    assert same(store.get(packet.packet_id, SIGNATURE), packet)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_many_packets_in_use_need_no_open_files(root: Path) -> None:
    store = DiskStore(root)
    for seed in range(40):
        store.put(make_packet(seed), "text")
    before = len(os.listdir("/proc/self/fd"))
    in_use = [store.get(packet_id([seed], SIGNATURE), SIGNATURE) for seed in range(40)]
    assert len(os.listdir("/proc/self/fd")) == before and len(in_use) == 40


@pytest.mark.parametrize("name", [".", "packets", "quarantine", "below/it"])
def test_a_path_that_is_a_file_is_no_store(root: Path, name: str) -> None:
    blocked = root if name == "below/it" else root / name
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("notes")
    with pytest.raises(StoreError, match="is a file; name a folder"):
        DiskStore(root / name if name == "below/it" else root)
    assert blocked.read_text() == "notes"


def test_a_folder_without_permission_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", fail(PermissionError(errno.EACCES, "Permission denied", str(root))))
    with pytest.raises(StoreError, match="check the permissions"):
        DiskStore(root)


def test_another_format_version_is_refused_and_left_as_it_was(root: Path) -> None:
    DiskStore(root).close()
    with sqlite3.connect(root / "packets.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format_version'")
    connection.close()
    before = (root / "packets.sqlite").read_bytes()
    with pytest.raises(StoreFormatError, match="format version 99, expected 3"):
        DiskStore(root)
    assert (root / "packets.sqlite").read_bytes() == before


def test_what_is_no_catalogue_is_refused_and_left_as_it_was(root: Path) -> None:
    root.mkdir()
    catalogue = root / "packets.sqlite"
    catalogue.write_bytes(b"my novel, chapter one. " * 100)
    with pytest.raises(StoreFormatError, match="no readable packet catalogue"):
        DiskStore(root)
    assert catalogue.read_bytes().startswith(b"my novel")
    catalogue.unlink()
    with sqlite3.connect(catalogue) as connection:
        connection.execute("CREATE TABLE novel (chapter)")
    connection.close()
    with pytest.raises(StoreFormatError, match="no packet store"):
        DiskStore(root)
