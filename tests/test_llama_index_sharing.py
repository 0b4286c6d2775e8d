"""Vector stores that share an engine, threads that share a vector store, and processes that were killed in it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index_kvpacket import KVPacketVectorStore
from llama_index_samples import embed, node, nodes

from kvpacket_rag import Adapter, Backbone, DiskStore, KVPacketEngine, PacketIndex
from kvpacket_rag.ownership import Ownership


class Killed(BaseException):
    """Ends what a killed process would have ended."""


def known(engine: KVPacketEngine) -> list[str]:
    return sorted(chunk.text for chunk in engine.store.known(engine.signature))


def files(folder: Path) -> int:
    return len(list((folder / "packets").rglob("*.safetensors")))


def found(store: KVPacketVectorStore, text: str) -> list[str]:
    return [node.text for node in store.query(VectorStoreQuery(embed(text), similarity_top_k=9)).nodes or []]


@pytest.fixture
def on_disk(backbone: Backbone, tmp_path: Path) -> KVPacketEngine:
    return KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)


def kill(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """End a process at a method: nothing that would be done after it, or on the way out, is done."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(owner, method, killed)
    monkeypatch.setattr(Ownership, "_settle", lambda self: None)


def test_stores_with_equal_ids_do_not_drop_each_others_packets(engine: KVPacketEngine):
    one, other = KVPacketVectorStore(engine), KVPacketVectorStore(engine)
    one.add(nodes(CHUNKS[:2]))
    other.add(nodes(CHUNKS[1:3]))
    one.add(nodes(CHUNKS[3:]))
    assert known(engine) == sorted(CHUNKS[1:])
    one.clear()
    assert known(engine) == sorted(CHUNKS[1:3])
    other.delete("doc")
    assert known(engine) == []


def test_encoding_anew_leaves_the_packets_of_others(
    engine: KVPacketEngine, backbone: Backbone, adapter: Adapter, tmp_path: Path
):
    soft = KVPacketEngine(backbone, engine.store, adapter)
    KVPacketVectorStore(engine, tmp_path).add(nodes(CHUNKS[:2]))
    KVPacketVectorStore(engine).add(nodes(CHUNKS[1:3]))
    KVPacketVectorStore(soft, tmp_path, reencode=True)
    assert known(engine) == sorted(CHUNKS[1:3]) and known(soft) == sorted(CHUNKS[:2])


def test_packets_that_another_store_made_are_owned_after_encoding_anew(
    engine: KVPacketEngine, backbone: Backbone, tmp_path: Path
):
    KVPacketVectorStore(KVPacketEngine(backbone), tmp_path).add(nodes())
    other = KVPacketVectorStore(engine)
    other.add(nodes(CHUNKS[:3]))
    KVPacketVectorStore(engine, tmp_path, reencode=True)
    other.clear()
    assert known(engine) == sorted(CHUNKS)


def test_a_packet_that_was_there_before_stays_when_the_node_goes(engine: KVPacketEngine):
    engine.encode(CHUNKS[:1], ["somebody else"])
    store = KVPacketVectorStore(engine)
    store.add(nodes(CHUNKS[:2]))
    store.delete("doc")
    assert known(engine) == CHUNKS[:1]


def test_threads_add_and_delete_at_once(engine: KVPacketEngine):
    store = KVPacketVectorStore(engine)

    def work(number: int) -> None:
        store.add([node(f"{number}-{at}", text, f"doc{number}") for at, text in enumerate(CHUNKS)])
        if number % 2:
            store.delete(f"doc{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(store.client) == 16 and known(engine) == sorted(CHUNKS)
    for number in range(8):
        store.delete(f"doc{number}")
    assert known(engine) == []


def test_the_packet_files_go_with_the_last_node(on_disk: KVPacketEngine, tmp_path: Path):
    store = KVPacketVectorStore(on_disk, tmp_path)
    store.add([*nodes(CHUNKS[:2], "one"), node("again", CHUNKS[1], "two")])
    assert files(tmp_path) == 2
    store.delete("one")
    assert files(tmp_path) == 1
    store.delete("two")
    assert files(tmp_path) == 0


def test_a_process_killed_before_the_rows_leaves_no_packet(
    on_disk: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = KVPacketVectorStore(on_disk, tmp_path)
    store.add(nodes(CHUNKS[:1]))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill(patch, PacketIndex, "add")
        store.add([node("n0", CHUNKS[1], "doc"), node("new", CHUNKS[2], "doc")])
    assert files(tmp_path) == 3
    again = KVPacketVectorStore(on_disk, tmp_path)
    assert found(again, CHUNKS[0]) == known(on_disk) == CHUNKS[:1] and files(tmp_path) == 1


def test_a_process_killed_after_the_rows_leaves_each_its_packet(
    on_disk: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = KVPacketVectorStore(on_disk, tmp_path)
    store.add(nodes(CHUNKS[:2]))
    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "_settle", lambda self: None)
        store.add([node("n0", CHUNKS[2], "doc"), node("new", CHUNKS[3], "doc")])
    again = KVPacketVectorStore(on_disk, tmp_path)
    assert sorted(found(again, CHUNKS[0])) == known(on_disk) == sorted(CHUNKS[1:])
    again.delete("doc")
    assert known(on_disk) == [] and files(tmp_path) == 0


def test_a_process_killed_in_a_deletion_leaves_neither_row_nor_packet(
    on_disk: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = KVPacketVectorStore(on_disk, tmp_path)
    store.add(nodes())
    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "_settle", lambda self: None)
        store.delete_nodes(["n1"])
    assert len(on_disk.store) == 4
    again = KVPacketVectorStore(on_disk, tmp_path)
    assert sorted(found(again, CHUNKS[1])) == known(on_disk) == sorted({*CHUNKS} - {CHUNKS[1]})


def test_opening_does_not_touch_what_another_process_is_about_to_do(
    on_disk: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, opened = KVPacketVectorStore(on_disk, tmp_path), []
    add = PacketIndex.add

    def meanwhile(*given: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            opened.append(other.submit(KVPacketVectorStore, on_disk, tmp_path).result())
        add(*given)

    monkeypatch.setattr(PacketIndex, "add", meanwhile)
    store.add(nodes())
    assert known(on_disk) == sorted(CHUNKS) == sorted(found(opened[0], CHUNKS[0]))


def in_folder(backbone: Backbone, folder: Path, texts: list[str]) -> Path:
    """A folder with nodes and their packets, under ids that all such folders use."""
    engine = KVPacketEngine(backbone, DiskStore(folder))
    store = KVPacketVectorStore(engine, folder)
    store.add(nodes(texts))
    store.close()
    engine.close()
    return folder


def test_two_folders_of_equal_ids_are_kept_apart_over_the_packets_of_one(backbone: Backbone, tmp_path: Path):
    one = in_folder(backbone, tmp_path / "one", CHUNKS[:1])
    other = in_folder(backbone, tmp_path / "other", CHUNKS[1:2])
    engine = KVPacketEngine(backbone, DiskStore(one))
    first, second = KVPacketVectorStore(engine, one), KVPacketVectorStore(engine, other, reencode=True)
    assert known(engine) == sorted(CHUNKS[:2])
    second.add([node("n0", CHUNKS[2], "doc")])
    assert known(engine) == sorted([CHUNKS[0], CHUNKS[2]])
    first.delete("doc")
    assert known(engine) == CHUNKS[2:3]
    engine.close()
    at_home = KVPacketEngine(backbone, DiskStore(other))  # where its names are what they were
    again = KVPacketVectorStore(at_home, other, reencode=True)
    assert known(at_home) == CHUNKS[2:3]
    again.clear()
    assert known(at_home) == []


def test_a_folder_with_packets_is_not_taken_for_that_of_the_engine(backbone: Backbone, tmp_path: Path):
    DiskStore(tmp_path / "one").close()
    engine = KVPacketEngine(backbone, DiskStore(tmp_path / "other"))
    one, other = (KVPacketVectorStore(engine, tmp_path / name) for name in ("one", "other"))
    one.add(nodes(CHUNKS[:1]))
    other.add(nodes(CHUNKS[1:2]))
    one.clear()
    assert known(engine) == CHUNKS[1:2]


@pytest.mark.parametrize("at_home", [True, False])
def test_a_copied_folder_leaves_the_packets_of_the_first(backbone: Backbone, tmp_path: Path, at_home: bool):
    one = in_folder(backbone, tmp_path / "one", CHUNKS[:2])
    engine = KVPacketEngine(backbone, DiskStore(one if at_home else tmp_path / "packets"))
    first = KVPacketVectorStore(engine, one, reencode=True)
    shutil.copytree(one, tmp_path / "copy")
    copy = KVPacketVectorStore(engine, tmp_path / "copy")
    copy.delete("doc")
    assert known(engine) == sorted(CHUNKS[:2])
    copy.add(nodes(CHUNKS[1:2]))
    first.clear()
    assert known(engine) == CHUNKS[1:2]


def test_a_folder_that_was_moved_keeps_its_names(backbone: Backbone, engine: KVPacketEngine, tmp_path: Path):
    store = KVPacketVectorStore(engine, tmp_path / "one")
    store.add(nodes(CHUNKS[:2]))
    store.close()
    (tmp_path / "one").rename(tmp_path / "moved")
    KVPacketVectorStore(engine, tmp_path / "moved").clear()
    assert known(engine) == []
