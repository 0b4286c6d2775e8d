"""Copies in faster memory never change what a store says."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_store import SIGNATURE, make_packet, same

from kvpacket_rag.errors import PacketMismatchError, PacketNotFoundError, StoreError
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore, TieredStore

SIZE = make_packet(0).size_bytes


def filled(below: PacketStore, packets: int, room: int) -> TieredStore:
    store = TieredStore(below, host_bytes=room * SIZE)
    for seed in range(packets):
        store.put(make_packet(seed), f"text {seed}", f"chunk {seed}")
    return store


def hits(store: TieredStore) -> dict[str, int]:
    return {name: tier.metrics.snapshot().hits for name, tier in store.tiers.items()}


def test_it_is_a_store_and_a_second_reading_comes_from_memory(tmp_path: Path):
    store = filled(DiskStore(tmp_path), 1, 4)
    assert isinstance(store, PacketStore)
    first, second = (store.get(make_packet(0).packet_id, SIGNATURE) for _ in range(2))
    assert same(first, make_packet(0)) and second is first
    assert hits(store) == {"device": 0, "host": 1, "disk": 1}
    assert store.below.metrics.snapshot().loads == 1
    store.close()


def test_the_cap_holds_and_the_least_recently_used_goes():
    store = filled(MemoryStore(), 4, 2)
    for seed in (0, 1, 0, 2, 0, 1):
        assert same(store.get(make_packet(seed).packet_id, SIGNATURE), make_packet(seed))
        assert store.tiers["host"].size_bytes == SIZE * len(store.tiers["host"]) <= 2 * SIZE
    assert hits(store) == {"device": 0, "host": 2, "memory": 4}
    found = store.tiers["host"].metrics.snapshot()
    assert (found.loads, found.bytes_loaded, found.evictions, found.bytes_evicted) == (4, 4 * SIZE, 2, 2 * SIZE)


def test_a_packet_larger_than_the_tier_is_given_all_the_same():
    store = TieredStore(MemoryStore(), host_bytes=SIZE - 1)
    store.put(make_packet(0), "text")
    assert same(store.get(make_packet(0).packet_id, SIGNATURE), make_packet(0))
    assert {name: tier.size_bytes for name, tier in store.tiers.items()} == {"device": 0, "host": 0, "memory": SIZE}


@pytest.mark.parametrize("how", ["delete", "drop_owners", "behind its back"])
def test_what_was_deleted_is_not_given_from_a_copy(how: str):
    store, name = filled(MemoryStore(), 1, 4), make_packet(0).packet_id
    store.get(name, SIGNATURE)
    if how == "delete":
        store.delete(name)
    elif how == "drop_owners":
        assert store.drop_owners(["chunk 0"]) == [name]
    else:
        store.below.delete(name)
    with pytest.raises(PacketNotFoundError):
        store.get(name, SIGNATURE)
    assert store.tiers["host"].size_bytes == 0 and name not in store


def test_copies_of_what_another_process_deleted_are_freed_beside_the_next_load(tmp_path: Path):
    store, other = filled(DiskStore(tmp_path), 4, 9), DiskStore(tmp_path)
    for seed in range(3):
        store.get(make_packet(seed).packet_id, SIGNATURE)
    other.drop_owners(["chunk 0", "chunk 1"])
    other.close()
    store.get(make_packet(3).packet_id, SIGNATURE)
    assert len(store.tiers["host"]) == 2 and store.tiers["host"].size_bytes == 2 * SIZE
    store.close()


def test_no_tier_outgrows_its_cap_while_eight_threads_read():
    store = TieredStore(MemoryStore(), host_bytes=3 * SIZE, device_bytes=2 * SIZE, device="meta")
    for seed in range(9):
        store.put(make_packet(seed), f"text {seed}")
    largest = dict.fromkeys(("host", "device"), 0)

    def read(worker: int):
        for seed in random.Random(worker).choices(range(9), k=100):
            store.get(make_packet(seed).packet_id, SIGNATURE)
            for name in largest:
                largest[name] = max(largest[name], store.tiers[name].size_bytes)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert largest == {"host": 3 * SIZE, "device": 2 * SIZE}
    assert sum(hits(store).values()) == 800


def test_a_copy_of_another_signature_is_refused():
    store = filled(MemoryStore(), 1, 4)
    store.get(make_packet(0).packet_id, SIGNATURE)
    with pytest.raises(PacketMismatchError, match="adapter"):
        store.get(make_packet(0).packet_id, replace(SIGNATURE, adapter="a" * 64))
    assert store.tiers["host"].metrics.snapshot().misses == {"mismatch": 1}


def test_writing_into_a_copy_leaves_the_store_below_as_it_was():
    store = filled(MemoryStore(), 1, 4)
    store.get(make_packet(0).packet_id, SIGNATURE).tensors[0].zero_()
    assert same(store.below.get(make_packet(0).packet_id, SIGNATURE), make_packet(0))


def test_where_memory_runs_out_the_tier_is_emptied_and_the_packet_given(monkeypatch, caplog):
    store = filled(MemoryStore(), 2, 4)
    store.get(make_packet(0).packet_id, SIGNATURE)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    assert same(store.get(make_packet(1).packet_id, SIGNATURE), make_packet(1))
    assert store.tiers["host"].size_bytes == 0 and "emptied" in caplog.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"host_bytes": 1 << 60}, "host_bytes is .* bytes of memory there are"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"device_bytes": 1}, "device_bytes needs a device of its own"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(options: dict[str, int], told: str):
    with pytest.raises(StoreError, match=told):
        TieredStore(MemoryStore(), **options)
