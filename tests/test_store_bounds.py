"""Caps hold, holds end with their requests, and what is dear to make again may be spared."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from harm_samples import SHORT, prompts
from test_store import SIGNATURE, capped_kind, closing, make_packet, open_store, stored_bytes  # noqa: F401 (fixtures)

from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore, TieredStore
from kvpacket_rag.store.eviction import Candidate, choose


def lasting(seed: int, text_tokens: int) -> Any:
    """A packet of the usual size that stands for more text, as a compressed one does."""
    return replace(make_packet(seed), num_tokens=text_tokens, span=text_tokens + 2)


def opened(kind: str, folder: Path, room: int) -> PacketStore:
    max_bytes = room * stored_bytes(kind, make_packet(0)) + 99  # spans of three digits make a header longer
    return DiskStore(folder, max_bytes, eviction="cost") if kind == "disk" else MemoryStore(max_bytes, eviction="cost")


def test_the_cheapest_to_encode_again_for_its_bytes_goes_first(capped_kind: str, tmp_path: Path) -> None:  # noqa: F811
    store = opened(capped_kind, tmp_path, room=3)
    for seed, text_tokens in enumerate([500, 5, 400]):
        store.put(lasting(seed, text_tokens), f"text {seed}", f"owner {seed}")
    store.put(lasting(3, 300), "text 3")
    assert [packet_id([seed], SIGNATURE) in store for seed in range(4)] == [True, False, True, True]


def test_by_cost_the_order_of_use_still_counts() -> None:
    candidates = [Candidate(f"p{n}", 9 if n < 30 else 1, 100) for n in range(40)]  # the cheapest were used last
    chosen = choose(candidates, 1000, set(), "cost")
    assert chosen is not None and [found.packet_id for found in chosen] == [f"p{n}" for n in range(10)]
    assert choose(candidates, 4000, {"p3"}, "cost") is None
    assert choose(candidates, 0, set(), "cost") == []


def test_an_unknown_order_of_eviction_is_refused(tmp_path: Path) -> None:
    for opener in (lambda: MemoryStore(eviction="fifo"), lambda: DiskStore(tmp_path, eviction="fifo")):  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="expected 'lru' or 'cost'"):
            opener()


def test_ten_thousand_requests_a_third_of_them_broken_off_leave_nothing_held(capped_kind: str, tmp_path: Path) -> None:  # noqa: F811
    store = open_store(capped_kind, tmp_path, room=3)
    holds = store._upkeep.holds if isinstance(store, DiskStore) else store._holds  # type: ignore[attr-defined]

    def request(number: int) -> Any:
        with store.hold([packet_id([number % 7], SIGNATURE), packet_id([number % 3], SIGNATURE)]):
            yield number
            if number % 3 == 1:
                raise RuntimeError("failed")

    def work(worker: int) -> None:
        for number in range(worker, 10_000, 4):
            running = request(number)
            next(running)
            if number % 3 == 0:
                running.close()  # cancelled
            else:
                with contextlib.suppress(RuntimeError):
                    next(running, None)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with holds.frozen() as held:
        assert set(held) == set()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="resident memory is read in /proc")
@pytest.mark.parametrize("requests", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_of_which_a_third_are_cancelled_leave_nothing_pinned_and_memory_flat(
    backbone: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, requests: int
) -> None:
    caplog.set_level("CRITICAL", "kvpacket_rag")  # records that are kept keep what they tell of
    with contextlib.closing(DiskStore(tmp_path / "sizes")) as sizes:
        KVPacketEngine(backbone, sizes, min_match_tokens=4).encode(CHUNKS)
        cap = sizes.size_bytes * 3 // 4
    store = TieredStore(DiskStore(tmp_path / "store", cap), host_bytes=cap // 2)
    engine = KVPacketEngine(backbone, store, min_match_tokens=4)  # room for three of four: packets come and go
    engine.encode(CHUNKS, [f"owner {n}" for n in range(len(CHUNKS))])
    asked, resident, files = prompts(), [], len(os.listdir("/proc/self/fd"))

    def work(worker: int) -> None:
        for number in range(worker, requests, 4):
            stream = engine.stream(asked[number % len(asked)], SHORT)
            if number % 3:
                stream.read_all()
            elif number % 2:
                next(iter(stream), None)  # cancelled as the first piece was there; else before it began
            if number % (requests // 10) == 0:
                gc.collect()
                resident.append(resident_bytes())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    gc.collect()
    with store.below._upkeep.holds.frozen() as held:  # type: ignore[attr-defined]
        assert not held
    assert len(backbone.pool._idle) <= backbone.pool.max_idle
    assert store.below.size_bytes <= cap and store.tiers["host"].size_bytes <= cap // 2
    assert resident_bytes() - resident[len(resident) // 3] < 16 << 20
    assert len(os.listdir("/proc/self/fd")) <= files + 8  # a connection or two of SQLite's, and none a request
    assert store.tiers["disk"].metrics.snapshot().evictions > requests / 20
    engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_count_that_is_wrong_does_not_make_a_store_refuse_for_ever(tmp_path: Path) -> None:
    store = open_store("disk", tmp_path, room=3)
    store._catalogue._writer.execute("UPDATE totals SET size_bytes = 1 << 40")  # type: ignore[attr-defined]
    store.put(make_packet(1), "text")
    assert store.size_bytes == stored_bytes("disk", make_packet(1))
