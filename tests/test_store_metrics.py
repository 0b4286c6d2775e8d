"""What a store counts is what happened, and Prometheus is told the same."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_store import SIGNATURE, capped_kind, closing, make_packet, open_store, stored_bytes  # noqa: F401 (fixtures)

from kvpacket_rag.errors import KVPacketError, MissingExtraError, PacketError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore, MemoryStore, TieredStore
from kvpacket_rag.store.prometheus import StoreCollector


def test_hits_misses_puts_and_evictions_are_counted(capped_kind: str, tmp_path: Path) -> None:  # noqa: F811
    store = open_store(capped_kind, tmp_path, room=2)
    size = stored_bytes(capped_kind, make_packet(0))
    for seed in range(3):
        store.put(make_packet(seed), "text", "owner")
    for seed in (2, 2, 0, 9):
        with contextlib.suppress(PacketError):
            store.get(packet_id([seed], SIGNATURE), SIGNATURE)
    found = store.metrics.snapshot()  # type: ignore[attr-defined]
    assert (found.puts, found.bytes_put, found.evictions, found.bytes_evicted) == (3, 3 * size, 1, size)
    assert found.hits == 2 and found.misses == {"evicted": 1, "unknown": 1}


def test_every_reason_of_a_miss_on_disk_is_told_apart(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for seed in range(4):
        store.put(make_packet(seed), "text", "owner")
    paths = [store._folder.path_of(packet_id([seed], SIGNATURE)) for seed in range(4)]
    paths[0].unlink()
    paths[1].write_bytes(b"")
    asked = [(0, SIGNATURE), (1, SIGNATURE), (1, SIGNATURE), (2, replace(SIGNATURE, rope="other")), (3, SIGNATURE)]
    for seed, signature in asked:
        with contextlib.suppress(KVPacketError):
            store.get(packet_id([seed], SIGNATURE), signature)
    found = store.metrics.snapshot()
    assert found.misses == {"missing": 1, "damaged": 1, "quarantined": 1, "mismatch": 1}
    assert (found.hits, found.loads, found.verifications) == (1, 1, 1) and found.bytes_loaded == paths[3].stat().st_size


def test_prometheus_is_told_the_counts_and_no_text(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    disk, memory, registry = DiskStore(tmp_path), MemoryStore(), prometheus_client.CollectorRegistry()
    tiered = TieredStore(disk, host_bytes=10_000)
    collector = StoreCollector({"handbook": tiered, "talk": memory}, registry)
    tiered.put(make_packet(1), "a secret text")
    for _ in range(2):
        tiered.get(packet_id([1], SIGNATURE), SIGNATURE)
    with pytest.raises(PacketError):
        memory.get(packet_id([1], SIGNATURE), SIGNATURE)
    told = prometheus_client.generate_latest(registry).decode()
    for line in (
        'kvpacket_store_hits_total{store="handbook",tier="disk"} 1.0',
        'kvpacket_store_hits_total{store="handbook",tier="host"} 1.0',
        'kvpacket_store_misses_total{reason="unknown",store="talk",tier="memory"} 1.0',
        'kvpacket_store_packets{store="handbook",tier="disk"} 1.0',
        f'kvpacket_store_size_bytes{{store="handbook",tier="disk"}} {float(disk.size_bytes)}',
        f'kvpacket_store_size_bytes{{store="handbook",tier="host"}} {float(make_packet(1).size_bytes)}',
    ):
        assert line in told
    assert "secret" not in told
    collector.close()
    assert prometheus_client.generate_latest(registry) == b""


def test_without_the_package_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[metrics\]"):
        StoreCollector({})
