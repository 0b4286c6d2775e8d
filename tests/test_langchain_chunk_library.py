"""The library of chunks beneath LangChain's vector store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import CHUNKS
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_kvpacket import KVPacketVectorStore
from langchain_kvpacket.chunk_library import ChunkLibrary
from langchain_kvpacket.embeddings import LangChainEmbedder
from langchain_samples import WordEmbeddings, documents

from kvpacket_rag import Backbone, Chunk, DiskStore, KVPacketEngine, PacketIndex, StoreError


def test_an_index_of_unknown_vectors_is_compared_and_never_given_a_name(backbone: Backbone, tmp_path: Path):
    engine = KVPacketEngine(backbone, DiskStore(tmp_path))
    index = PacketIndex.open(tmp_path)
    names = engine.encode(CHUNKS, [str(n) for n in range(4)])
    vectors = np.array(WordEmbeddings().embed_documents(CHUNKS), np.float32)
    index.add([Chunk(str(n), text) for n, text in enumerate(CHUNKS)], vectors, names)
    ChunkLibrary(engine, index, LangChainEmbedder(WordEmbeddings()), tmp_path)
    assert index.get_setting("embedder") is None
    with pytest.raises(StoreError, match="not of the embedder"):
        ChunkLibrary(engine, index, LangChainEmbedder(DeterministicFakeEmbedding(size=vectors.shape[1])), tmp_path)


def test_an_id_that_looks_like_a_passing_owner_keeps_its_packet(engine: KVPacketEngine):
    store = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)
    before = len(store.engine.store)
    store.add_texts(["The ferry at seven goes to the islands, the one at nine does not."], ids=["x (being added)"])
    store.add_texts(["Nets are mended on Mondays in the long shed behind the old quay."], ids=["x"])
    assert len(store.engine.store) == before + 2
