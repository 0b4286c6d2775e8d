"""A vector store's folder, opened again: by the same engine, by another one, and by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index_kvpacket import KVPacketEmbedding, KVPacketLLM, KVPacketVectorStore
from llama_index_samples import WordEmbedding, documents, embed, no_stray_loop, node, nodes  # noqa: F401
from pipeline_samples import WordEmbedder, loader

from kvpacket_rag import (
    Adapter,
    Backbone,
    Chunk,
    DiskStore,
    KVPacketEngine,
    KVPacketError,
    KVPacketRAG,
    PacketIndex,
    PacketMismatchError,
    PacketNotFoundError,
    StoreError,
)
from kvpacket_rag.journal import remove_document
from kvpacket_rag.packet import PacketSignature


def test_a_store_opens_again_from_its_folder_and_encodes_nothing(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_packets = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    KVPacketVectorStore(with_packets, tmp_path).add(nodes())
    with_packets.close()
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    monkeypatch.setattr(backbone, "encode", None)
    store = KVPacketVectorStore(engine, tmp_path)
    store.add(nodes())
    assert store.query(VectorStoreQuery(embed(CHUNKS[3]))).ids == ["n3"] and len(engine.store) == 4
    assert engine.generate(CHUNKS[3] + " So").usage.chunks_reused == 1


def test_an_index_made_without_llama_index_opens_as_plain_nodes(backbone: Backbone, tmp_path: Path):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path))
    index = PacketIndex.open(tmp_path)
    chunk = Chunk("c", CHUNKS[0], "doc", {"page": 3, "ingest_mark": "of no use to a model"})
    index.add([chunk], [embed(CHUNKS[0])], engine.encode(CHUNKS[:1], ["c"]))
    index.close()
    store = KVPacketVectorStore(engine, tmp_path)
    (found,) = store.get_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value="doc")]))
    assert (found.node_id, found.get_content(), found.ref_doc_id) == ("c", CHUNKS[0], "doc")
    assert found.get_content(MetadataMode.LLM) == f"page: 3\n\n{CHUNKS[0]}"
    store.delete("doc")
    assert len(engine.store) == 0


def test_another_adapter_is_told_apart_and_can_be_encoded_for(backbone: Backbone, adapter: Adapter, tmp_path: Path):
    KVPacketVectorStore(KVPacketEngine(backbone, DiskStore(tmp_path)), tmp_path).add(nodes())
    other = KVPacketEngine(backbone, DiskStore(tmp_path), adapter)
    with pytest.raises(PacketMismatchError, match=r"adapter differ \(adapter: packet has .*\); .*reencode=True"):
        KVPacketVectorStore(other, tmp_path)
    store = KVPacketVectorStore(other, tmp_path, reencode=True)
    assert PacketSignature.from_json(*other.store.signatures()) == other.signature and len(other.store) == 4
    store.delete("doc")
    assert len(other.store) == 0
    KVPacketVectorStore(other, tmp_path)


def test_an_engine_without_the_packets_is_told_apart(engine: KVPacketEngine, backbone: Backbone, tmp_path: Path):
    KVPacketVectorStore(engine, tmp_path).add(nodes())
    with pytest.raises(PacketNotFoundError, match="holds 4 chunks"):
        KVPacketVectorStore(KVPacketEngine(backbone), tmp_path)
    fresh = KVPacketEngine(backbone)
    KVPacketVectorStore(fresh, tmp_path, reencode=True)
    assert len(fresh.store) == 4


def test_without_an_engine_one_is_loaded_with_its_packets_in_the_folder(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    loads: list[Any] = []
    monkeypatch.setattr(
        KVPacketEngine,
        "load",
        lambda name, **o: loads.append((name, getattr(o["store"], "folder", o["store"]), o.get("quantize"))) or engine,
    )
    KVPacketVectorStore(path=tmp_path, model_name="mine", quantize="int8").add(nodes())
    KVPacketVectorStore(path=tmp_path)
    assert loads == [("mine", tmp_path, "int8"), ("tiny", tmp_path, None)]  # by the name in the index, as it was made
    with pytest.raises(KVPacketError, match="takes no 'adapter'"):
        KVPacketVectorStore(engine, adapter="x")


def test_a_folder_remembers_dtype_and_adapter_of_its_engine(
    backbone: Backbone, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    KVPacketVectorStore(KVPacketEngine(backbone, DiskStore(tmp_path), adapter), tmp_path).add(nodes())

    def load(name: str, **given: Any) -> KVPacketEngine:
        return KVPacketEngine(backbone, given["store"], given["adapter"])

    monkeypatch.setattr(KVPacketEngine, "load", load)
    store = KVPacketVectorStore(path=tmp_path)
    assert store.engine.encoder.adapter.digest == adapter.digest and len(store.engine.store) == 4


def test_the_package_and_the_store_change_one_folder(engine: KVPacketEngine, backbone: Backbone, tmp_path: Path):
    on_disk = KVPacketEngine(backbone, DiskStore(tmp_path))
    KVPacketVectorStore(on_disk, tmp_path).add(nodes())
    index = PacketIndex.open(tmp_path)
    assert remove_document(index, on_disk.store, "doc") == 4
    assert len(index) == len(on_disk.store) == 0


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> KVPacketEmbedding:
    """A KVPacketEmbedding by name, of a model that is quick."""
    where = "llama_index_kvpacket.embedding.SentenceTransformerEmbedder"
    monkeypatch.setattr(where, lambda name, *_: WordEmbedder(name))
    return KVPacketEmbedding("mini")


def indexed(store: KVPacketVectorStore, embed_model: BaseEmbedding) -> KVPacketVectorStore:
    context = StorageContext.from_defaults(vector_store=store)
    VectorStoreIndex.from_documents(documents(), context, embed_model=embed_model)
    return store


def embedder_in(folder: Path) -> str | None:
    index = PacketIndex.open(folder)
    name = index.get_setting("embedder")
    index.close()
    return name


def test_a_folder_says_which_kvpacket_embedding_filled_it(
    engine: KVPacketEngine, tmp_path: Path, mini: KVPacketEmbedding
):
    indexed(KVPacketVectorStore(engine, tmp_path / "mini"), mini).close()
    indexed(KVPacketVectorStore(engine, tmp_path / "other"), WordEmbedding()).close()
    memory = indexed(KVPacketVectorStore(engine), mini)
    memory.persist(str(tmp_path / "copy.json"))
    folders = ("mini", "other", "copy.kvpacket")
    assert [embedder_in(tmp_path / folder) for folder in folders] == ["mini", None, "mini"]
    again = KVPacketVectorStore(engine, tmp_path / "mini")
    again.clear()
    indexed(again, WordEmbedding()).close()  # vectors of nobody knows what
    assert not embedder_in(tmp_path / "mini")


def test_a_folder_that_says_so_is_asked_without_naming_its_embedder(
    engine: KVPacketEngine, tmp_path: Path, mini: KVPacketEmbedding, monkeypatch: pytest.MonkeyPatch
):
    on_disk = KVPacketEngine(engine.backbone, DiskStore(tmp_path))
    indexed(KVPacketVectorStore(on_disk, tmp_path), mini).close()
    monkeypatch.setattr("kvpacket_rag.pipeline.SentenceTransformerEmbedder", WordEmbedder)
    monkeypatch.setattr(KVPacketEngine, "load", loader(engine.backbone))
    with KVPacketRAG.open(tmp_path) as rag:
        assert rag.embedder.name == "mini" and rag.ask(CHUNKS[1]).answer.usage.chunks_reused > 0


def test_a_window_is_the_folders_and_changed_by_encoding_anew(engine: KVPacketEngine, tmp_path: Path):
    given = [node(f"n{number}", "Short.", "doc", window=text) for number, text in enumerate(CHUNKS)]
    KVPacketVectorStore(engine, tmp_path, packet_text_key="window").add(given)
    again = KVPacketVectorStore(engine, tmp_path)
    assert again.packet_text_key == "window" and len(engine.store) == 4
    with pytest.raises(StoreError, match="made of 'window' of its nodes"):
        KVPacketVectorStore(engine, tmp_path, packet_text_key="")
    KVPacketVectorStore(engine, tmp_path, packet_text_key="", reencode=True)
    assert [chunk.text for chunk in engine.store.known(engine.signature)] == ["Short."]
    assert KVPacketVectorStore(engine, tmp_path).packet_text_key == ""


def test_encoding_anew_tells_its_progress_through_all_of_it(
    engine: KVPacketEngine, soft_engine: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llama_index_kvpacket.packets._BATCH_CHUNKS", 2)
    KVPacketVectorStore(engine, tmp_path).add(nodes([*CHUNKS, CHUNKS[0]]))
    told: list[tuple[int, int]] = []
    KVPacketVectorStore(soft_engine, tmp_path, reencode=True, progress=lambda *counts: told.append(counts))
    sizes = [engine.count_tokens(text) for text in CHUNKS]
    assert told == [(sum(sizes[: n + 1]), sum(sizes)) for n in range(4)]


def test_encoding_anew_that_was_stopped_goes_on_where_it_was(
    engine: KVPacketEngine, soft_engine: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("llama_index_kvpacket.packets._BATCH_CHUNKS", 1)
    KVPacketVectorStore(engine, tmp_path).add(nodes())
    encode, left = soft_engine.encoder.encode, [True, True]
    monkeypatch.setattr(soft_engine.encoder, "encode", lambda todo, *_: left.pop() and encode(todo))
    with pytest.raises(IndexError):
        KVPacketVectorStore(soft_engine, tmp_path, reencode=True)
    assert len(soft_engine.store) == 2
    for unfinished in (engine, soft_engine):
        with pytest.raises(PacketMismatchError, match="reencode=True"):
            KVPacketVectorStore(unfinished, tmp_path)
    monkeypatch.setattr(soft_engine.encoder, "encode", encode)
    KVPacketVectorStore(soft_engine, tmp_path, reencode=True)
    assert len(soft_engine.store) == 4
    KVPacketVectorStore(soft_engine, tmp_path)


@pytest.mark.parametrize("place", ["s3://bucket/nodes", "file:///nodes", Path("s3://bucket/nodes")])
def test_a_url_in_place_of_a_folder_is_refused(
    engine: KVPacketEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str | Path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"is a URL and no path on a disk.*store='s3://bucket/packets'"):
        KVPacketVectorStore(path=place)
    for call in (
        KVPacketVectorStore.from_persist_path,
        KVPacketVectorStore(engine).persist,
        PacketIndex.open,
        DiskStore,
    ):
        with pytest.raises(StoreError, match="is a URL and no path on a disk"):
            call(place)
    with pytest.raises(StoreError, match="is a URL and no path on a disk"):
        KVPacketLLM("smollm2-135m-instruct", store=Path("s3://bucket/nodes"))
    assert not list(tmp_path.iterdir())
