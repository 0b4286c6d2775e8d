"""Ray workers make the packets that one process alone makes, whatever happens to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvpacket_rag.documents import Document
from kvpacket_rag.ingest_ray import RayWorkers
from kvpacket_rag.pipeline import KVPacketRAG

pytestmark = [pytest.mark.scale, pytest.mark.model, pytest.mark.filterwarnings("ignore")]

SUBJECTS = ["pump", "valve", "gate", "lamp", "sensor", "motor", "fan", "belt", "relay", "filter"]


def documents(count: int) -> list[Document]:
    """One chunk each, no two alike, of different lengths."""
    return [
        Document(
            f"d{n}",
            f"Note {n} on the {SUBJECTS[n % 10]}: it was checked on day {n * 7 % 365} by crew {n % 13}, who found "
            + "; ".join(f"reading {k} at {(n * 31 + k * 17) % 997} units" for k in range(1 + n % 6))
            + ".",
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "packets").rglob("*.safetensors")}


def rows(rag: KVPacketRAG) -> list[tuple[str, str, str]]:
    return sorted((chunk.chunk_id, chunk.text, packet_id) for chunk, packet_id in rag.index.rows())


def kill_a_worker(folder: Path, killed: list[int]) -> None:
    """Once the first packets are stored."""
    deadline = time.monotonic() + 300
    while len(stored(folder)) < 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    for child in psutil.Process().children(recursive=True):
        if "Worker" in " ".join(child.cmdline()) and child.name().startswith("ray::"):
            child.kill()
            killed.append(child.pid)
            return


def test_ray_ingest_with_a_killed_worker_equals_local_ingest_byte_for_byte(tmp_path: Path):
    given, killed = documents(200), []
    with KVPacketRAG.open(tmp_path / "local", dtype="float32") as rag:
        rag.add(given)
        expected = rows(rag)
    killer = threading.Thread(target=kill_a_worker, args=(tmp_path / "ray", killed))
    with KVPacketRAG.open(tmp_path / "ray", dtype="float32") as rag:
        killer.start()
        report = rag.add(given, workers=RayWorkers(2))
        killer.join()
        assert rows(rag) == expected
        assert (report.packets_encoded, report.added) == (200, 200)
    assert len(killed) == 1 and stored(tmp_path / "ray") == stored(tmp_path / "local")
    assert len(stored(tmp_path / "ray")) == 200


def test_workers_put_packets_into_an_object_store(tmp_path: Path):
    given, url = documents(20), f"file://{tmp_path}/objects"
    with KVPacketRAG.open(tmp_path / "local", dtype="float32") as rag:
        rag.add(given)
    with KVPacketRAG.open(tmp_path / "ray", remote=url, dtype="float32") as rag:
        assert rag.add(given, workers=RayWorkers(2)).packets_encoded == 20
        assert rag.add(given, workers=RayWorkers(2)).packets_encoded == 0
        assert rag.ask("Which crew checked the valve of note 11?").answer.usage.chunks_reused == 4
    assert stored(tmp_path / "objects") == stored(tmp_path / "local")
