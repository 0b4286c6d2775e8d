"""An index is opened in one way: by the pipeline, by LangChain's vector store and by LlamaIndex's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document as LangChainDocument
from langchain_kvpacket import KVPacketTransformer
from langchain_kvpacket import KVPacketVectorStore as LangChainStore
from langchain_samples import WordEmbeddings
from langchain_samples import documents as langchain_documents
from llama_index_kvpacket import KVPacketTransform, drop_packets
from llama_index_kvpacket import KVPacketVectorStore as LlamaIndexStore
from llama_index_samples import node, nodes
from pipeline_samples import WordEmbedder, documents

from kvpacket_rag import (
    Backbone,
    DiskStore,
    Document,
    KVPacketEngine,
    KVPacketError,
    KVPacketRAG,
    PacketIndex,
    PacketMismatchError,
    PacketNotFoundError,
    StoreError,
)
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.ownership import Ownership

SHORT = GenerationSettings(max_new_tokens=2)
QUESTION = "Who signed the lease of the harbour office?"


def pipeline(folder: Path, **options: Any) -> KVPacketRAG:
    return KVPacketRAG.open(folder, embedder=WordEmbedder("WordEmbeddings"), **options)


def langchain(folder: Path, **options: Any) -> LangChainStore:
    return LangChainStore.open(folder, WordEmbeddings(), **options)


def llama_index(folder: Path, **options: Any) -> LlamaIndexStore:
    return LlamaIndexStore(path=folder, **options)


def add(opened: Any) -> Any:
    given = {KVPacketRAG: documents, LangChainStore: langchain_documents, LlamaIndexStore: nodes}[type(opened)]()
    (opened.add_documents if isinstance(opened, LangChainStore) else opened.add)(given)
    return opened


def close(opened: Any) -> None:
    opened.close()
    opened.engine.close()


WAYS = pytest.mark.parametrize("way", [pipeline, langchain, llama_index])
Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def _tiny(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model in place of the real one; everything else of the engine is loaded as ever."""
    monkeypatch.setattr("kvpacket_rag.engine.load_model", lambda *_, **__: (backbone.model, backbone.tokenizer))


@WAYS
def test_an_index_is_followed_to_the_url_of_its_packets(way: Open, tmp_path: Path):
    url = f"file://{tmp_path}/objects"
    close(add(way(tmp_path / "first", remote=url)))
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "first" / "index.sqlite", tmp_path / "second")
    opened = way(tmp_path / "second", cache_bytes=10**6)
    assert opened.engine.store.url == url and len(opened.engine.store) == 4
    assert opened.engine.generate(CHUNKS[1] + " So", SHORT).usage.chunks_reused == 1
    opened.delete({pipeline: "d1", langchain: ["d1"], llama_index: "doc"}[way])
    assert len(opened.engine.store) == (0 if way is llama_index else 3)
    close(opened)


def over(engine: KVPacketEngine, folder: Path, way: Open) -> Any:
    """An index in a folder, put together by hand."""
    if way is llama_index:
        return LlamaIndexStore(engine, folder)
    if way is langchain:
        return LangChainStore(WordEmbeddings(), engine, PacketIndex.open(folder))
    return KVPacketRAG(engine, PacketIndex.open(folder), WordEmbedder())


@WAYS
@pytest.mark.parametrize("has_engine", [True, False])
def test_rows_and_documents_of_other_stores_may_have_equal_ids(
    backbone: Backbone, way: Open, tmp_path: Path, has_engine: bool
):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4) if has_engine else None
    opened = over(engine, tmp_path, way) if engine else way(tmp_path)
    texts = [f"The {name} is told of in a file of its own." for name in ("quay", "crane", "dock")]
    if way is llama_index:
        opened.add([node("llama_index/a", texts[0], "doc"), node("langchain/b", texts[1], "doc")])
    elif way is langchain:
        opened.add_texts(texts[:2], ids=["llama_index/a", "langchain/b"])
    else:
        opened.add([Document("llama_index/a", texts[0]), Document("langchain/b", texts[1])])
    KVPacketTransform(opened.engine)([node("n", texts[2], "a")])
    KVPacketTransformer(opened.engine).transform_documents([LangChainDocument(id="b", page_content=texts[2])])
    assert drop_packets(opened.engine, ["a"]) == []
    assert len(KVPacketTransformer(opened.engine).drop(["b"])) == 1
    assert sorted(known.text for known in opened.engine.store.known(opened.engine.signature)) == sorted(texts[:2])
    close(opened)


@WAYS
def test_an_index_whose_rows_own_by_their_bare_ids_is_still_read_and_lets_go_of_its_packets(
    way: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as before:
        before.setattr("kvpacket_rag.owners._ROW", "")
        close(add(way(tmp_path)))
    opened = add(way(tmp_path))
    assert opened.engine.generate(CHUNKS[1] + " So", SHORT).usage.chunks_reused == 1
    opened.delete({pipeline: "d1", langchain: ["d1"], llama_index: "doc"}[way])
    assert len(opened.engine.store) == (0 if way is llama_index else 3)
    close(opened)


@WAYS
def test_an_index_without_any_of_its_packets_says_so_and_gets_them_back(way: Open, tmp_path: Path):
    close(add(way(tmp_path / "first")))
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "first" / "index.sqlite", tmp_path / "second")
    with pytest.raises(PacketNotFoundError, match=r"holds 4 chunks, but .* has none of their packets; .*reencode=True"):
        way(tmp_path / "second")
    opened = way(tmp_path / "second", reencode=True)
    assert len(opened.engine.store) == 4
    opened.delete({pipeline: "d1", langchain: ["d1"], llama_index: "doc"}[way])
    assert len(opened.engine.store) == (0 if way is llama_index else 3)
    close(opened)


@WAYS
def test_encoding_anew_brings_back_the_packets_that_are_lost_alone(way: Open, tmp_path: Path):
    opened = add(way(tmp_path))
    opened.engine.store.delete(opened.engine.encoder.identify(CHUNKS[1])[0])
    close(opened)
    opened = way(tmp_path)
    assert len(opened.engine.store) == 3
    close(opened)
    opened = way(tmp_path, reencode=True)
    assert len(opened.engine.store) == 4
    close(opened)


def test_a_hit_whose_packet_is_lost_is_a_miss_of_the_answer(tmp_path: Path):
    with add(pipeline(tmp_path)) as rag:
        lost = rag.engine.encoder.identify(CHUNKS[1])[0]
        rag.engine.store.delete(lost)
        usage = rag.ask(QUESTION, settings=SHORT).answer.usage
        assert usage.chunks_reused == 3 and [miss.packet_id for miss in usage.misses] == [lost]


def test_indexes_made_by_hand_over_one_engine_keep_their_packets_apart(engine: KVPacketEngine, tmp_path: Path):
    one, other = (KVPacketRAG(engine, PacketIndex.open(tmp_path / name), WordEmbedder()) for name in ("a", "b"))
    one.add(documents())
    other.add(documents())
    one.delete("d1")
    assert len(engine.store) == 4 and other.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4
    other.delete("d1")
    assert len(engine.store) == 3


def test_an_index_made_by_hand_is_checked_and_noted_as_an_opened_one(
    engine: KVPacketEngine, soft_engine: KVPacketEngine, backbone: Backbone, tmp_path: Path
):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    with KVPacketRAG(engine, PacketIndex.open(tmp_path), WordEmbedder("mine"), chunk_tokens=50) as rag:
        rag.add(documents())
    with pytest.raises(PacketMismatchError, match="adapter"):
        KVPacketRAG(soft_engine, PacketIndex.open(tmp_path), WordEmbedder("mine"))
    with pytest.raises(PacketNotFoundError, match="holds 4 chunks"):
        KVPacketRAG(KVPacketEngine(backbone), PacketIndex.open(tmp_path), WordEmbedder("mine"))
    with pytest.raises(StoreError, match="built with the embedder 'mine'"):
        KVPacketRAG(engine, PacketIndex.open(tmp_path), WordEmbedder("other"))
    with KVPacketRAG.open(tmp_path, embedder=WordEmbedder("mine")) as rag:
        assert rag.chunk_tokens == 50 and len(rag.engine.store) == 4


def test_a_url_without_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(KVPacketError, match="pass its path, too"):
        LlamaIndexStore(remote=f"file://{tmp_path}/objects")


def test_a_folder_saved_over_a_remote_store_holds_its_packets_itself(tmp_path: Path, backbone: Backbone):
    first = add(langchain(tmp_path / "first", remote=f"file://{tmp_path}/objects"))
    first.save(tmp_path / "saved")
    close(first)
    shutil.rmtree(tmp_path / "objects")
    store = langchain(tmp_path / "saved")
    assert isinstance(store.engine.store, DiskStore) and len(store.engine.store) == 4
    close(store)


@pytest.mark.parametrize("way", [langchain, llama_index])
@pytest.mark.parametrize("opening", [pipeline, langchain])
def test_what_a_killed_process_was_about_is_put_in_order_by_any_opening(
    way: Open, opening: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = add(way(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "_settle", lambda _: None)
        opened.delete({langchain: ["d1"], llama_index: "doc"}[way])
    assert len(opened.engine.store) == 4
    close(opened)
    opened = opening(tmp_path)
    assert len(opened.engine.store) == (0 if way is llama_index else 3)
    close(opened)
