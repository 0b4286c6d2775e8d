"""Packets in an object store that several machines share: never half, never another, never lost to a full cache."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from test_store import SIGNATURE, closing, make_packet, same, stored_bytes  # noqa: F401 (closing is a fixture)

from kvpacket_rag.errors import (
    PacketNotFoundError,
    StoreError,
)
from kvpacket_rag.packet import Packet
from kvpacket_rag.store import DiskStore, RemoteStore
from kvpacket_rag.store.remote_bucket import Bucket
from kvpacket_rag.store.remote_mark import MARK

PACKET = make_packet(1)
SIZE = stored_bytes("disk", PACKET)


@pytest.fixture(name="objects")
def objects_fixture(tmp_path: Path) -> Path:
    """The folder that stands for a bucket."""
    return tmp_path / "objects"


@pytest.fixture(name="machine")
def machine_fixture(tmp_path: Path, objects: Path) -> Callable[..., RemoteStore]:
    """Opens the store on a machine of that name, which has a cache of its own."""
    return lambda name="first", **options: RemoteStore(f"file://{objects}", tmp_path / name, **options)


def file_of(objects: Path, packet: Packet = PACKET) -> Path:
    return objects / "packets" / packet.packet_id[:2] / f"{packet.packet_id}.safetensors"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def texts(store: RemoteStore) -> list[str]:
    return [chunk.text for chunk in store.known(SIGNATURE)]


def test_what_one_machine_put_another_one_reads_bit_for_bit(machine: Callable[..., RemoteStore]):
    first, waiting = machine(), machine("waiting")
    for seed in range(3):
        first.put(make_packet(seed), f"text {seed}", "owner")
    waiting.refresh()
    for store in (waiting, machine("late")):
        assert texts(store) == ["text 0", "text 1", "text 2"] and len(store) == 3
        assert all(same(store.get(make_packet(seed).packet_id, SIGNATURE), make_packet(seed)) for seed in range(3))
        assert store.metrics.snapshot().bytes_loaded == 3 * SIZE


def test_it_is_found_without_a_refresh_when_it_is_asked_for(machine: Callable[..., RemoteStore]):
    first, second = machine(), machine("second")
    first.put(PACKET, "text")
    assert PACKET.packet_id not in second
    assert same(second.get(PACKET.packet_id, SIGNATURE), PACKET) and texts(second) == ["text"]


def test_other_machines_are_looked_after_while_prompts_are_answered(machine: Callable[..., RemoteStore]):
    first, second = machine(), machine("second", refresh_seconds=0.0)
    before = second.revision()
    first.put(PACKET, "text")
    deadline = time.monotonic() + 30
    while second.revision() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert PACKET.packet_id in second


def test_what_one_machine_deleted_is_a_miss_for_another_and_then_forgotten(machine: Callable[..., RemoteStore]):
    first = machine()
    first.put(PACKET, "text", "owner")
    second = machine("second")
    first.delete(PACKET.packet_id)
    with pytest.raises(PacketNotFoundError, match="gone from file://"):
        second.get(PACKET.packet_id, SIGNATURE)
    assert PACKET.packet_id not in second and texts(second) == ["text"]
    second.refresh()
    assert texts(second) == [] and len(second) == 0


def test_a_packet_lives_as_long_as_an_owner_on_any_machine(machine: Callable[..., RemoteStore], objects: Path):
    first = machine()
    first.put(PACKET, "text", "a")
    second = machine("second")
    second.add_owner(PACKET.packet_id, "b")
    assert first.drop_owners(["a"]) == [] and PACKET.packet_id in first
    third = machine("third")  # knows of owners from the object store alone
    assert third.drop_owners(["b", "nobody"]) == [PACKET.packet_id]
    assert files(objects) == [objects / MARK] and len(third) == 0


def test_deleting_goes_on_where_it_was_interrupted(
    machine: Callable[..., RemoteStore], objects: Path, monkeypatch: pytest.MonkeyPatch
):
    first = machine()
    first.put(PACKET, "text", "owner")
    deleted = Bucket.delete
    for calls in range(1, 4):
        with monkeypatch.context() as patch:
            left = iter(range(calls))

            def breaking(self: Bucket, keys: Any, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise StoreError("the line is cut")
                deleted(self, keys)

            patch.setattr(Bucket, "delete", breaking)
            with pytest.raises(StoreError) if calls < 3 else nullcontext():
                first.drop_owners(["owner"])
    assert files(objects) == [objects / MARK] and len(first) == 0


def test_a_full_cache_loses_nothing(machine: Callable[..., RemoteStore]):
    store = machine(max_bytes=2 * SIZE)
    for seed in range(6):
        store.put(make_packet(seed), f"text {seed}", "owner")
        assert store.tiers["disk"].size_bytes <= 2 * SIZE
    for seed in range(6):
        packet = make_packet(seed)
        assert packet.packet_id in store and same(store.get(packet.packet_id, SIGNATURE), packet)
        assert store.tiers["disk"].size_bytes <= 2 * SIZE
    assert len(store) == 6 and store.size_bytes == 6 * SIZE


def test_a_packet_for_which_the_cache_has_no_room_is_given(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().put(PACKET, "text")
    store = machine("small", max_bytes=SIZE - 1)
    store.put(make_packet(2), "other text")
    with store.hold([PACKET.packet_id]):
        assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
    assert same(store.get(make_packet(2).packet_id, SIGNATURE), make_packet(2))
    assert store.tiers["disk"].size_bytes == 0 and files(tmp_path / "small" / "incoming") == []


def test_what_had_no_room_is_let_go_of_when_nobody_holds_it_or_it_is_deleted(
    machine: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch
):
    machine().put(PACKET, "text")
    store, may_come, download = machine("small", max_bytes=SIZE - 1), threading.Event(), Bucket.download

    def waiting(self: Bucket, *args: Any) -> int | None:
        assert may_come.wait(30)
        return download(self, *args)

    monkeypatch.setattr(Bucket, "download", waiting)
    fetching = store._transfer._fetching
    with store.hold([PACKET.packet_id]):
        late = fetching[PACKET.packet_id]
    may_come.set()
    assert same(late.result(30), PACKET)
    deadline = time.monotonic() + 30
    while fetching and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not fetching
    with store.hold([PACKET.packet_id]):
        with store.hold([PACKET.packet_id]):
            assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
        assert fetching
        store.delete(PACKET.packet_id)
        with pytest.raises(PacketNotFoundError):
            store.get(PACKET.packet_id, SIGNATURE)


def test_what_is_coming_in_takes_no_more_than_the_cap(
    machine: Callable[..., RemoteStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packets, first, download = [make_packet(seed) for seed in range(8)], machine(), Bucket.download
    seen: list[int] = []
    for packet in packets:
        first.put(packet, "text")

    def slow(self: Bucket, key: str, path: Path) -> int | None:
        size_bytes = download(self, key, path)
        time.sleep(0.05)
        seen.append(len(files(tmp_path / "second" / "incoming")))
        return size_bytes

    monkeypatch.setattr(Bucket, "download", slow)
    store, names = machine("second", max_bytes=2 * SIZE), [packet.packet_id for packet in packets]
    with store.hold(names):
        assert all(same(store.get(name, SIGNATURE), packet) for name, packet in zip(names, packets, strict=True))
    assert len(seen) == 8 and max(seen) <= 2


def test_the_folder_takes_no_more_than_its_cap_and_one_packet(
    machine: Callable[..., RemoteStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packets, first, download = [make_packet(seed) for seed in range(10)], machine(), Bucket.download
    names, folder, seen = [packet.packet_id for packet in packets], tmp_path / "second", []
    for packet in packets:
        first.put(packet, "text")

    def watched(self: Bucket, key: str, path: Path) -> int | None:
        size_bytes = download(self, key, path)
        for _ in range(5):
            time.sleep(0.01)
            with suppress(FileNotFoundError):
                there = [*files(folder / "incoming"), *(folder / "packets").rglob("*.safetensors")]
                seen.append(sum(path.stat().st_size for path in there))
        return size_bytes

    store = machine("second", max_bytes=4 * SIZE)
    for name in names[:4]:
        store.get(name, SIGNATURE)
    monkeypatch.setattr(Bucket, "download", watched)
    with store.hold(names[4:]):
        assert all(same(store.get(packet.packet_id, SIGNATURE), packet) for packet in packets[4:])
    assert 4 * SIZE <= max(seen) <= 5 * SIZE


def test_a_held_prompt_is_fetched_ahead_and_once(machine: Callable[..., RemoteStore]):
    packets, first = [make_packet(seed) for seed in range(8)], machine()
    for packet in packets:
        first.put(packet, "text")
    store = machine("second")
    with store.hold([packet.packet_id for packet in packets]):
        deadline = time.monotonic() + 30
        while len(store.tiers["disk"]) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(same(store.get(packet.packet_id, SIGNATURE), packet) for packet in packets)
    assert store.metrics.snapshot().loads == 8


def test_eight_threads_that_want_one_packet_fetch_it_once(
    machine: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch
):
    machine().put(PACKET, "text")
    store, download = machine("second"), Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda *arguments: time.sleep(0.2) or download(*arguments))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: store.get(PACKET.packet_id, SIGNATURE), range(8))
        assert all(same(packet, PACKET) for packet in found)
    assert store.metrics.snapshot().loads == 1


def test_a_cache_that_lost_its_files_fetches_them(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().put(PACKET, "text", "owner")
    machine().close()
    shutil.rmtree(tmp_path / "first" / "packets")
    store = machine()
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET) and store.metrics.snapshot().loads == 1


def test_a_damaged_file_in_the_cache_is_fetched_again(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().put(PACKET, "text")
    machine().close()
    path = tmp_path / "first" / "packets" / PACKET.packet_id[:2] / f"{PACKET.packet_id}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert same(machine().get(PACKET.packet_id, SIGNATURE), PACKET)


def test_a_store_on_disk_is_uploaded_and_then_a_cache(machine: Callable[..., RemoteStore], tmp_path: Path):
    disk = DiskStore(tmp_path / "first")
    for seed in range(3):
        disk.put(make_packet(seed), f"text {seed}", f"owner {seed}")
    disk.close()
    assert machine().metrics.snapshot().puts == 3
    assert machine().metrics.snapshot().puts == 0
    second = machine("second")
    assert texts(second) == ["text 0", "text 1", "text 2"]
    assert second.drop_owners(["owner 1"]) == [make_packet(1).packet_id]


def test_the_cache_of_one_url_is_none_of_another(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().put(PACKET, "text")
    with pytest.raises(StoreError, match=r"is the cache of file://.*objects, not of file://.*name another folder"):
        RemoteStore(f"file://{tmp_path}/elsewhere", tmp_path / "first")


def test_what_a_killed_process_was_fetching_is_cleared_away(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().close()
    old, new = (tmp_path / "first" / "incoming" / name for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    folder = old.with_name("folder")
    folder.mkdir()
    for path in (old, folder):
        os.utime(path, (0, 0))
    machine()
    assert not old.exists() and new.exists() and folder.exists()
