"""LangChain's indexing: documents kept in step with the vector store, and packets with the documents."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_kvpacket import ChatKVPacket, KVPacketRetriever, KVPacketVectorStore
from langchain_samples import QUESTION, WordEmbeddings

from kvpacket_rag import KVPacketEngine

Cleanup = Literal["incremental", "full"]


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore(WordEmbeddings(), engine)


@pytest.fixture
def records() -> InMemoryRecordManager:
    manager = InMemoryRecordManager("library")
    manager.create_schema()
    return manager


def texts(*chunks: str, source: str = "a.txt") -> list[Document]:
    return [Document(chunk, metadata={"source": source}) for chunk in chunks]


def counts(result: Any) -> tuple[int, int, int]:
    return result["num_added"], result["num_skipped"], result["num_deleted"]


def known(store: KVPacketVectorStore) -> set[str]:
    return {chunk.text for chunk in store.engine.store.known(store.engine.signature)}


@pytest.mark.parametrize("cleanup", ["incremental", "full"])
async def test_packets_follow_the_documents(
    store: KVPacketVectorStore, records: InMemoryRecordManager, cleanup: Cleanup, monkeypatch: pytest.MonkeyPatch
):
    rules: dict[str, Any] = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
    assert counts(index(texts(*CHUNKS[:3]), records, store, **rules)) == (3, 0, 0)
    assert known(store) == set(CHUNKS[:3]) and len(store) == 3
    with monkeypatch.context() as patch:
        patch.setattr(store.engine.backbone, "encode", lambda *_: pytest.fail("encoded again"))
        assert counts(await aindex(texts(*CHUNKS[:3]), records, store, **rules)) == (0, 3, 0)
    changed = [*CHUNKS[:2], CHUNKS[3]]
    assert counts(index(texts(*changed), records, store, **rules)) == (1, 2, 1)
    assert known(store) == set(changed) and len(store) == 3
    assert {d.page_content for d in store.similarity_search(QUESTION, k=9)} == set(changed)


def test_a_full_clean_up_deletes_what_is_gone_and_an_incremental_one_other_sources_not(
    store: KVPacketVectorStore, records: InMemoryRecordManager
):
    rules: dict[str, Any] = {"source_id_key": "source", "key_encoder": "sha256"}
    index([*texts(*CHUNKS[:2]), *texts(CHUNKS[2], source="b.txt")], records, store, cleanup="full", **rules)
    assert counts(index(texts(CHUNKS[1]), records, store, cleanup="incremental", **rules)) == (0, 1, 1)
    assert known(store) == {CHUNKS[1], CHUNKS[2]}
    assert counts(index(texts(CHUNKS[1]), records, store, cleanup="full", **rules)) == (0, 1, 1)
    assert known(store) == {CHUNKS[1]} and len(store.engine.store) == 1
    assert counts(index([], records, store, cleanup="full", **rules)) == (0, 0, 1)
    assert not known(store) and not len(store)


def test_a_text_in_two_documents_keeps_its_packet_until_both_are_gone(
    store: KVPacketVectorStore, records: InMemoryRecordManager
):
    rules: dict[str, Any] = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    both = [*texts(CHUNKS[0]), *texts(CHUNKS[0], source="b.txt")]
    assert counts(index(both, records, store, **rules)) == (2, 0, 0) and len(store.engine.store) == 1
    index(both[:1], records, store, **rules)
    assert known(store) == {CHUNKS[0]} and len(store) == 1


def test_what_was_indexed_is_retrieved_and_reused(store: KVPacketVectorStore, records: InMemoryRecordManager):
    index(texts(*CHUNKS), records, store, cleanup=None, key_encoder="sha256")
    chunk = KVPacketRetriever(vectorstore=store, k=1).invoke(QUESTION)[0].page_content
    message = ChatKVPacket(engine=store.engine, max_tokens=1).invoke(chunk)
    assert chunk == CHUNKS[1] and message.response_metadata["chunks_reused"] == 1


def test_threads_that_add_one_id_leave_one_row_and_its_packet(engine: KVPacketEngine):
    store = KVPacketVectorStore(WordEmbeddings(), engine)
    stores = [store, KVPacketVectorStore(WordEmbeddings(), engine, store.index)]
    texts = [f"Version {n} of the lease names another tenant of the harbour office." for n in range(8)]
    together = threading.Barrier(8)

    def add(n: int) -> None:
        together.wait(20)
        stores[n % 2].add_texts([texts[n]], ids=["one"])

    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, range(8)))
        (row,) = store.get_by_ids(["one"])
        assert [known.text for known in engine.store.known(engine.signature)] == [row.page_content]
        assert len(store) == len(engine.store) == 1
    store.delete()
    assert len(engine.store) == 0
