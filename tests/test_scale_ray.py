"""Ray workers make the packets that one process alone makes, whatever happens to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pipeline_samples import WordEmbedder, contents, long_document

from kvpacket_rag.documents import Document
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.ingest_ray import RayWorkers
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.store import MemoryStore, PacketStore, RemoteStore

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def workers() -> Iterator[RayWorkers]:
    """Two, in a cluster of this machine's."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield RayWorkers(2)
    ray.shutdown()


@pytest.fixture(scope="module")
def model(make_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder from which every process loads the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=12).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def documents(count: int) -> list[Document]:
    """Of ten chunks each."""
    return [long_document(10, f"d{number}", changed=number % 10) for number in range(count)]


def pipeline(model: str, folder: Path, store: PacketStore | Path) -> KVPacketRAG:
    engine = KVPacketEngine.load(model, store=store, adapter=None, dtype="float32", device="cpu", min_match_tokens=4)
    return KVPacketRAG(engine, PacketIndex.open(folder), WordEmbedder(), chunk_tokens=90)


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "packets").rglob("*.safetensors")}


def kill_workers(folder: Path, killed: list[int]) -> None:
    """All there are, once the first packets are stored."""
    deadline = time.monotonic() + 300
    while len(list((folder / "packets").rglob("*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    for child in psutil.Process().children(recursive=True):
        if "MapWorker" in "".join(child.cmdline()):
            child.kill()
            killed.append(child.pid)


def test_ray_ingest_with_a_killed_worker_equals_local_ingest_byte_for_byte(
    model: str, tmp_path: Path, workers: RayWorkers
):
    given = [
        Document(f"n{n}", f"Note {n}: the valve of section {n * 7} was checked by crew {n % 13}.") for n in range(200)
    ]
    killed: list[int] = []
    with pipeline(model, tmp_path / "local", tmp_path / "local") as rag:
        rag.add(given)
        expected = contents(rag)
    killer = threading.Thread(target=kill_workers, args=(tmp_path / "ray", killed))
    with pipeline(model, tmp_path / "ray", tmp_path / "ray") as rag:
        killer.start()
        report = rag.add(given, workers=workers)
        killer.join()
        assert contents(rag) == expected
        assert (report.packets_encoded, report.added) == (200, 200)
        assert rag.add(given, workers=workers).unchanged == 200
    assert killed and stored(tmp_path / "ray") == stored(tmp_path / "local")
    assert len(stored(tmp_path / "ray")) == 200


def test_workers_put_packets_into_an_object_store(model: str, tmp_path: Path, workers: RayWorkers):
    given, url = documents(6), f"file://{tmp_path}/objects"
    with pipeline(model, tmp_path / "local", tmp_path / "local") as rag:
        rag.add(given)
    with pipeline(model, tmp_path / "ray", RemoteStore(url, tmp_path / "ray")) as rag:
        report = rag.add(given, workers=workers)
        assert report.packets_encoded == len(rag.engine.store) == len(stored(tmp_path / "local"))
        assert rag.add(given, workers=workers).unchanged == 6
        assert rag.ask("Which section was written anew?").answer.usage.chunks_reused == 4
        rag.delete("d0")
    assert stored(tmp_path / "objects").items() < stored(tmp_path / "local").items()


def test_packets_in_memory_cannot_be_made_elsewhere(model: str, tmp_path: Path, workers: RayWorkers):
    with pipeline(model, tmp_path, MemoryStore()) as rag, pytest.raises(StoreError, match="keep them in a folder"):
        rag.add(documents(1), workers=workers)
