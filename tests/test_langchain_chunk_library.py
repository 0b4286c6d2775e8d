"""The library of chunks beneath LangChain's vector store."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import CHUNKS
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_kvpacket import KVPacketVectorStore
from langchain_kvpacket.chunk_library import ChunkLibrary
from langchain_kvpacket.embeddings import LangChainEmbedder
from langchain_samples import WordEmbeddings, documents

from kvpacket_rag import Backbone, Chunk, DiskStore, KVPacketEngine, PacketIndex, PacketNotFoundError, StoreError


def test_an_index_of_unknown_vectors_is_compared_and_never_given_a_name(backbone: Backbone, tmp_path: Path):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path))
    index = PacketIndex.open(tmp_path)
    names = engine.encode(CHUNKS, [str(n) for n in range(4)])
    vectors = np.array(WordEmbeddings().embed_documents(CHUNKS), np.float32)
    index.add([Chunk(str(n), text) for n, text in enumerate(CHUNKS)], vectors, names)
    ChunkLibrary(engine, index, LangChainEmbedder(WordEmbeddings()))
    assert index.get_setting("embedder") is None
    with pytest.raises(StoreError, match="not of the embedder"):
        ChunkLibrary(engine, index, LangChainEmbedder(DeterministicFakeEmbedding(size=vectors.shape[1])))


def test_an_id_that_looks_like_a_passing_owner_keeps_its_packet(engine: KVPacketEngine):
    store = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)
    before = len(store.engine.store)
    store.add_texts(["The ferry at seven goes to the islands, the one at nine does not."], ids=["x (being added)"])
    store.add_texts(["Nets are mended on Mondays in the long shed behind the old quay."], ids=["x"])
    assert len(store.engine.store) == before + 2


def filled(backbone: Backbone, folder: Path, text: str) -> Path:
    """A folder with an index and the packet of one text, under the id that all such folders use."""
    engine = KVPacketEngine(backbone, DiskStore(folder))
    KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(folder)).add_texts([text], ids=["0"])
    engine.close()
    return folder


def known(engine: KVPacketEngine) -> set[str]:
    return {chunk.text for chunk in engine.store.known(engine.signature)}


def test_two_folders_of_equal_ids_share_the_packets_of_one(backbone: Backbone, tmp_path: Path):
    one = filled(backbone, tmp_path / "one", CHUNKS[0])
    other = filled(backbone, tmp_path / "other", CHUNKS[1])
    engine = KVPacketEngine(backbone, DiskStore(one))
    engine.encode(CHUNKS[1:2])  # as a store that both were ingested into
    KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(one))
    second = KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(other))
    second.add_texts(CHUNKS[2:3], ids=["0"])
    assert known(engine) == {CHUNKS[0], CHUNKS[2]}
    second.delete()
    assert known(engine) == {CHUNKS[0]}


def test_a_copied_folder_owns_packets_of_its_own_beside_the_first(backbone: Backbone, tmp_path: Path):
    one = filled(backbone, tmp_path / "one", CHUNKS[0])
    shutil.copytree(one, tmp_path / "copy")
    engine = KVPacketEngine(backbone, DiskStore(one))
    first = KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(one))
    copy = KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(tmp_path / "copy"))
    copy.delete()
    assert known(engine) == {CHUNKS[0]}
    again = KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(tmp_path / "copy"))
    again.add_texts(CHUNKS[:1], ids=["0"])
    first.delete()
    assert known(engine) == {CHUNKS[0]}
    again.delete()
    assert known(engine) == set()


def test_an_index_without_its_packets_is_refused(backbone: Backbone, tmp_path: Path):
    folder = filled(backbone, tmp_path / "one", CHUNKS[0])
    engine = KVPacketEngine(backbone)
    engine.encode(CHUNKS[1:])
    with pytest.raises(PacketNotFoundError, match="holds 1 chunks, but the engine's store has none of their packets"):
        KVPacketVectorStore(WordEmbeddings(), engine, PacketIndex.open(folder))
