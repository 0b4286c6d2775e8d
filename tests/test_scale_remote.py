"""A real S3 server that is killed while packets go to it and come from it: nothing half-written is ever read."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from remote_samples import s3
from test_store import SIGNATURE, closing, same  # noqa: F401 (closing is a fixture)
from test_store_remote import files

from kvpacket_rag.errors import StoreError
from kvpacket_rag.packet import Packet, packet_id
from kvpacket_rag.store import RemoteStore

pytestmark = pytest.mark.scale

PATIENT = {"max_retries": 2, "pause_seconds": 0.0, "timeout_seconds": 20.0}


def large_packet(seed: int) -> Packet:
    """8 MB, so that a transfer takes a while."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(torch.randn(8, 4, 250, width, generator=generator) for width in (128, 128))
    return Packet(packet_id([seed], SIGNATURE), SIGNATURE, tensors, 250, 250)


def keep_putting(store: RemoteStore, seeds: range) -> tuple[list[int], list[str]]:
    """Seeds whose packets were taken, and what was said of the others."""
    taken, errors = [], []
    for seed in seeds:
        try:
            store.put(large_packet(seed), f"text {seed}", "owner")
            taken.append(seed)
        except StoreError as error:
            errors.append(str(error))
    return taken, errors


@pytest.mark.parametrize("after_seconds", [0.3, 0.6, 0.9])
def test_a_server_killed_while_packets_are_written(tmp_path: Path, after_seconds: float):
    server, url = s3(), s3().url()
    store = RemoteStore(url, tmp_path / "first", **PATIENT)
    killer = threading.Timer(after_seconds, server.kill)
    killer.start()
    taken, errors = keep_putting(store, range(12))
    killer.join()
    server.start()
    assert errors and all("does not answer" in error or "is asked again" in error for error in errors)
    second = RemoteStore(url, tmp_path / "second", **PATIENT)
    seen = [seed for seed in range(12) if large_packet(seed).packet_id in second]
    assert set(taken) <= set(seen)
    assert all(same(second.get(large_packet(seed).packet_id, SIGNATURE), large_packet(seed)) for seed in seen)
    assert keep_putting(store, range(12)) == (list(range(12)), [])
    second.refresh()
    assert all(same(second.get(large_packet(seed).packet_id, SIGNATURE), large_packet(seed)) for seed in range(12))


@pytest.mark.parametrize("after_seconds", [0.1, 0.25, 0.4])
def test_a_server_killed_while_packets_are_read(tmp_path: Path, after_seconds: float):
    server, url = s3(), s3().url()
    assert keep_putting(RemoteStore(url, tmp_path / "first", **PATIENT), range(4)) == ([0, 1, 2, 3], [])
    second = RemoteStore(url, tmp_path / "second", max_bytes=1, **PATIENT)  # fetches every time
    killer = threading.Timer(after_seconds, server.kill)
    killer.start()
    deadline, right = time.monotonic() + 60, []
    with pytest.raises(StoreError, match=r"does not answer|broke off"):
        while time.monotonic() < deadline:
            for seed in range(4):
                right.append(same(second.get(large_packet(seed).packet_id, SIGNATURE), large_packet(seed)))
    killer.join()
    server.start()
    assert all(right) and files(tmp_path / "second" / "incoming") == files(tmp_path / "second" / "packets") == []
    assert all(same(second.get(large_packet(seed).packet_id, SIGNATURE), large_packet(seed)) for seed in range(4))


def test_wrong_keys_and_a_missing_bucket_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    url = s3().url()
    with pytest.raises(StoreError, match="no such bucket"):
        RemoteStore("s3://nobody-made-this/p", tmp_path / "a", max_retries=0)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match=r"credentials are refused.*SignatureDoesNotMatch.*check keys"):
        RemoteStore(url, tmp_path / "b", max_retries=0)


def test_two_machines_that_put_the_same_packets_at_the_same_time(tmp_path: Path):
    url = s3().url()
    stores = [RemoteStore(url, tmp_path / name) for name in ("a", "b")]
    threads = [threading.Thread(target=keep_putting, args=(store, range(6))) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.metrics.snapshot().puts for store in stores) == 6
    assert [chunk.text for chunk in RemoteStore(url, tmp_path / "c").known(SIGNATURE)] == [
        f"text {n}" for n in range(6)
    ]
    assert len(stores[0].drop_owners(["owner"])) == 6 and stores[0].size_bytes == 0
    stores[1].refresh()
    assert len(stores[1]) == 0
