"""A vector store in memory, copied to a folder: repeatedly, by several stores, and by processes that were killed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index_kvpacket import KVPacketVectorStore, persistence, vector_store
from llama_index_samples import node, nodes

from kvpacket_rag import Backbone, DiskStore, KVPacketEngine, MemoryStore, PacketIndex, StoreError
from kvpacket_rag.journal import remove_document
from kvpacket_rag.ownership import Ownership
from kvpacket_rag.store.remote_cache import RemoteCache

NAME = "default__vector_store.json"


class Killed(BaseException):
    """Ends what a killed process would have ended."""


def texts(store: KVPacketVectorStore) -> list[str]:
    return sorted(node.get_content() for node in store.get_nodes())


def known(engine: KVPacketEngine) -> list[str]:
    return sorted(chunk.text for chunk in engine.store.known(engine.signature))


def reopened(backbone: Backbone, folder: Path) -> KVPacketVectorStore:
    """By a process that has nothing but the folder."""
    engine = KVPacketEngine(backbone, DiskStore(folder / "default__vector_store.kvpacket"), min_match_tokens=4)
    return KVPacketVectorStore.from_persist_dir(str(folder), engine=engine)


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    store = KVPacketVectorStore(engine)
    store.add(nodes(CHUNKS[:2]))
    return store


def kill(patch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    patch.setattr(owner, method, killed)
    patch.setattr(Ownership, "_settle", lambda self: None)


def test_a_copy_follows_its_store(store: KVPacketVectorStore, backbone: Backbone, tmp_path: Path):
    store.persist(str(tmp_path / NAME))
    store.add([node("n0", CHUNKS[2], "doc"), node("new", CHUNKS[3], "doc")])
    store.delete_nodes(["n1"])
    store.persist(str(tmp_path / NAME))
    again = reopened(backbone, tmp_path)
    assert texts(again) == sorted(CHUNKS[2:]) == known(again.engine)
    again.delete("doc")
    assert known(again.engine) == []


def test_a_script_that_runs_again_leaves_nothing_of_its_last_run(backbone: Backbone, tmp_path: Path):
    for run in (CHUNKS[:3], CHUNKS[1:]):
        store = KVPacketVectorStore(KVPacketEngine(backbone))
        store.add([node(f"n{CHUNKS.index(text)}", text) for text in run])
        store.persist(str(tmp_path / NAME))
    again = reopened(backbone, tmp_path)
    assert texts(again) == sorted(CHUNKS[1:]) == known(again.engine)
    again.clear()
    assert known(again.engine) == []


def test_a_store_that_was_emptied_leaves_an_empty_copy(store: KVPacketVectorStore, backbone: Backbone, tmp_path: Path):
    store.persist(str(tmp_path / NAME))
    store.clear()
    store.persist(str(tmp_path / NAME))
    again = reopened(backbone, tmp_path)
    assert texts(again) == known(again.engine) == []
    again.add(nodes())
    assert known(again.engine) == sorted(CHUNKS)


def test_a_copy_and_its_store_over_one_engine_keep_each_others_packets(store: KVPacketVectorStore, tmp_path: Path):
    store.persist(str(tmp_path / NAME))
    copy = KVPacketVectorStore.from_persist_dir(str(tmp_path), engine=store.engine)
    copy.delete_nodes(["n0"])
    store.delete_nodes(["n1"])
    assert known(store.engine) == sorted(CHUNKS[:2])
    copy.clear()
    store.clear()
    assert known(store.engine) == []


def test_a_copy_has_its_packet_of_what_was_evicted(backbone: Backbone, tmp_path: Path):
    probe = KVPacketEngine(backbone)
    probe.encode(CHUNKS)
    store = KVPacketVectorStore(KVPacketEngine(backbone, MemoryStore(max_bytes=probe.store.size_bytes // 2)))
    store.add(nodes())
    assert len(store.engine.store) < 4
    store.persist(str(tmp_path / NAME))
    assert len(reopened(backbone, tmp_path).engine.store) == 4


@pytest.mark.parametrize(
    ("owner", "method", "is_new"),
    [
        (persistence, "_copy_packet", False),
        (persistence, "_write_rows", False),
        (PacketIndex, "delete", True),  # while the rows are taken over, the new ones being there already
        (vector_store, "write_pointer", True),
    ],
)
def test_a_killed_copy_is_the_old_one_or_the_new_one(
    store: KVPacketVectorStore,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: Any,
    owner: Any,
    method: str,
    is_new: bool,
):
    store.persist(str(tmp_path / NAME))
    store.add([node("n0", CHUNKS[2], "doc"), node("new", CHUNKS[3], "doc")])
    store.delete_nodes(["n1"])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill(patch, owner, method)
        store.persist(str(tmp_path / NAME))
    again = reopened(backbone, tmp_path)
    assert texts(again) == known(again.engine) == sorted(CHUNKS[2:] if is_new else CHUNKS[:2])
    store.persist(str(tmp_path / NAME))
    assert texts(again) == known(again.engine) == sorted(CHUNKS[2:])


def test_the_core_deletes_documents_of_a_store_that_shares_its_engine(store: KVPacketVectorStore, tmp_path: Path):
    store.persist(str(tmp_path / NAME))
    folder = tmp_path / "default__vector_store.kvpacket"
    index, packets = PacketIndex.open(folder), DiskStore(folder)
    assert remove_document(index, packets, "doc") == 2 and not len(packets)
    assert remove_document(store.client, store.engine.store, "doc") == 2 and not known(store.engine)


def test_a_folder_is_the_same_from_everywhere(store: KVPacketVectorStore, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("HOME", str(tmp_path))
    packets = DiskStore("~/library")
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "library" / "packets").is_dir() and not (tmp_path / "~").exists()
    packets.close()


def test_a_relative_folder_stays_the_same_when_the_process_moves_on(
    backbone: Backbone, tmp_path: Path, monkeypatch: Any
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = KVPacketVectorStore(KVPacketEngine(backbone, DiskStore("library")), "library")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.add(nodes(CHUNKS[:2]))
    store.persist(str(tmp_path / NAME))
    again = KVPacketVectorStore.from_persist_dir(
        str(tmp_path), engine=KVPacketEngine(backbone, DiskStore("../library"))
    )
    assert texts(again) == sorted(CHUNKS[:2]) and not list((tmp_path / "elsewhere").iterdir())


def test_deleting_the_empty_document_deletes_nothing(store: KVPacketVectorStore):
    store.add([node("alone", CHUNKS[2])])
    store.delete("")
    assert "alone" in [found.node_id for found in store.get_nodes()]


def test_packets_are_not_copied_into_the_cache_of_an_object_store(store: KVPacketVectorStore, tmp_path: Path):
    """They would be lost with the next look at what that has."""
    with closing(RemoteCache(tmp_path / "copy.kvpacket")) as cache:
        cache.tie("s3://bucket/packets")
    with pytest.raises(StoreError, match="lie in the object store at s3://bucket/packets"):
        store.persist(str(tmp_path / "copy.json"))
