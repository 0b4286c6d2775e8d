"""A vector store's folder, opened again: by the same engine, by another one, and by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index_kvpacket import KVPacketVectorStore
from llama_index_samples import embed, nodes

from kvpacket_rag import (
    Adapter,
    Backbone,
    Chunk,
    DiskStore,
    KVPacketEngine,
    KVPacketError,
    PacketIndex,
    PacketMismatchError,
    PacketNotFoundError,
)
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


def test_an_index_made_without_llama_index_opens_as_plain_nodes(engine: KVPacketEngine, tmp_path: Path):
    index = PacketIndex.open(tmp_path)
    index.add([Chunk("c", CHUNKS[0], "doc", {"page": 3})], [embed(CHUNKS[0])], engine.encode(CHUNKS[:1], ["c"]))
    index.close()
    store = KVPacketVectorStore(engine, tmp_path)
    (found,) = store.get_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value="doc")]))
    assert (found.node_id, found.get_content(), found.ref_doc_id) == ("c", CHUNKS[0], "doc")
    store.delete("doc")
    assert len(engine.store) == 0


def test_another_adapter_is_told_apart_and_can_be_encoded_for(backbone: Backbone, adapter: Adapter, tmp_path: Path):
    KVPacketVectorStore(KVPacketEngine(backbone, DiskStore(tmp_path)), tmp_path).add(nodes())
    other = KVPacketEngine(backbone, DiskStore(tmp_path), adapter)
    with pytest.raises(PacketMismatchError, match=r"adapter: packet has 'none'.*reencode=True"):
        KVPacketVectorStore(other, tmp_path)
    store = KVPacketVectorStore(other, tmp_path, reencode=True)
    assert PacketSignature.from_json(*other.store.signatures()) == other.signature and len(other.store) == 4
    store.delete("doc")
    assert len(other.store) == 0
    KVPacketVectorStore(other, tmp_path)


def test_an_engine_without_the_packets_is_told_apart(engine: KVPacketEngine, backbone: Backbone, tmp_path: Path):
    KVPacketVectorStore(engine, tmp_path).add(nodes())
    with pytest.raises(PacketNotFoundError, match="holds 4 nodes"):
        KVPacketVectorStore(KVPacketEngine(backbone), tmp_path)
    fresh = KVPacketEngine(backbone)
    KVPacketVectorStore(fresh, tmp_path, reencode=True)
    assert len(fresh.store) == 4


def test_without_an_engine_one_is_loaded_with_its_packets_in_the_folder(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    loads: list[Any] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda name, **given: loads.append((name, given["store"])) or engine)
    KVPacketVectorStore(path=tmp_path, model_name="mine").add(nodes())
    KVPacketVectorStore(path=tmp_path)
    assert loads == [("mine", tmp_path), ("tiny", tmp_path)]  # the second time by the name in the index
    with pytest.raises(KVPacketError, match="takes no 'adapter'"):
        KVPacketVectorStore(engine, adapter="x")
