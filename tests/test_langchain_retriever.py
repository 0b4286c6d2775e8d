"""The retriever: over any vector store, with its options in the constructor or in a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvpacket import ChatKVPacket, KVPacketRetriever, KVPacketVectorStore
from langchain_samples import QUESTION, WordEmbeddings, documents

from kvpacket_rag import DeviceError, KVPacketEngine, KVPacketError, StoreError


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)


def ids(found: list[Document]) -> list[str | None]:
    return [document.id for document in found]


async def test_it_finds_what_the_vector_store_finds(store: KVPacketVectorStore):
    retriever = KVPacketRetriever(vectorstore=store, k=3)
    expected = store.similarity_search(QUESTION, k=3)
    assert retriever.invoke(QUESTION) == await retriever.ainvoke(QUESTION) == expected
    assert retriever.batch([QUESTION, "Refunds?"]) == [expected, store.similarity_search("Refunds?", k=3)]


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"filter": {"row": 2}},
        {"search_type": "mmr", "k": 2, "fetch_k": 3, "lambda_mult": 0.0},
        {"search_type": "similarity_score_threshold", "score_threshold": 0.8},
        {"search_kwargs": {"k": 1}},
        {"search_kwargs": {"k": 2, "filter": {"row": 2}}},
        {"search_type": "mmr", "search_kwargs": {"k": 2, "fetch_k": 3, "lambda_mult": 0.0}},
        {"search_type": "similarity_score_threshold", "search_kwargs": {"score_threshold": 0.8, "k": 3}},
    ],
)
async def test_an_option_means_the_same_in_constructor_and_call(store: KVPacketVectorStore, options: dict[str, Any]):
    plain = KVPacketRetriever(vectorstore=store)
    found = KVPacketRetriever(vectorstore=store, **options).invoke(QUESTION)
    assert plain.invoke(QUESTION, **options) == await plain.ainvoke(QUESTION, **options) == found
    assert ids(found) != ids(plain.invoke(QUESTION))
    arguments = {name: value for name, value in options.items() if not name.startswith("search")}
    arguments |= options.get("search_kwargs", {})
    assert found == store.search(QUESTION, options.get("search_type", "similarity"), **arguments)
    assert found == store.as_retriever(
        search_type=options.get("search_type", "similarity"), search_kwargs=arguments
    ).invoke(QUESTION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3}, "there is no top_k here; it takes k, filter, fetch_k, .* and search_kwargs"),
        ({"search_kwargs": ["k"]}, "search_kwargs is a list, expected a dict"),
        ({"k": 0}, "greater than or equal to 1"),
        ({"search_type": "nearest"}, "search_type"),
        ({"search_type": "similarity_score_threshold"}, "needs a score_threshold"),
        ({"lambda_mult": 2}, "lambda_mult"),
    ],
)
def test_an_option_without_a_meaning_is_refused(store: KVPacketVectorStore, options: dict[str, Any], message: str):
    with pytest.raises(KVPacketError, match=message):
        KVPacketRetriever(vectorstore=store, **options)
    with pytest.raises(KVPacketError, match=message):
        KVPacketRetriever(vectorstore=store).invoke(QUESTION, **options)


def test_a_retriever_or_a_model_in_place_of_its_part_is_told(store: KVPacketVectorStore):
    with pytest.raises(StoreError, match=r"is a VectorStoreRetriever, .* pass retriever\.vectorstore"):
        KVPacketRetriever(vectorstore=store.as_retriever())
    with pytest.raises(StoreError, match="vectorstore is a str, expected a LangChain vector store"):
        KVPacketRetriever(vectorstore="chroma")
    with pytest.raises(StoreError, match=r"engine is a ChatKVPacket; pass its engine"):
        KVPacketRetriever(vectorstore=store, engine=ChatKVPacket(engine=store.engine))
    with pytest.raises(StoreError, match="k is given twice"):
        KVPacketRetriever(vectorstore=store, k=3, search_kwargs={"k": 2})


def test_what_only_the_vector_store_knows_reaches_it(store: KVPacketVectorStore, monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []
    search = store.similarity_search
    monkeypatch.setattr(store, "similarity_search", lambda q, k, **more: asked.append(more) or search(q, k))
    retriever = KVPacketRetriever(vectorstore=store, search_kwargs={"namespace": "a", "k": 2})
    assert len(retriever.invoke(QUESTION)) == 2 and len(retriever.invoke(QUESTION, search_kwargs={"k": 1})) == 1
    assert asked == [{"namespace": "a"}] * 2
    with pytest.raises(StoreError, match="unknown argument namespace"):
        KVPacketRetriever(vectorstore=store, search_kwargs={"namespace": "a"}, search_type="mmr").invoke(QUESTION)


async def test_what_another_vector_store_finds_gets_its_packets(engine: KVPacketEngine):
    other = InMemoryVectorStore.from_documents([*documents(), Document(" \n", id="blank")], WordEmbeddings())
    retriever = KVPacketRetriever(vectorstore=other, engine=engine, k=2)
    chat = ChatKVPacket(engine=engine, max_tokens=1)
    for found in (retriever.invoke(QUESTION), await retriever.ainvoke("Refunds are paid within nine days")):
        message = chat.invoke("\n\n".join(document.page_content for document in found))
        assert message.response_metadata["chunks_reused"] == 2
    assert len(retriever.invoke(QUESTION, k=9)) == 5 and len(engine.store) == 4


def test_a_chunk_that_has_its_packet_is_not_encoded_again(store: KVPacketVectorStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store.engine.backbone, "encode", lambda *_: pytest.fail("encoded again"))
    assert len(KVPacketRetriever(vectorstore=store, k=4).invoke(QUESTION)) == 4


def test_a_packet_that_went_is_made_again(store: KVPacketVectorStore):
    for name in store.engine.encode(CHUNKS):
        store.engine.store.delete(name)
    KVPacketRetriever(vectorstore=store, k=4).invoke(QUESTION)
    assert len(store.engine.store) == 4


def test_a_vector_store_without_engine_needs_one_named(engine: KVPacketEngine):
    embeddings: Embeddings = WordEmbeddings()
    with pytest.raises(StoreError, match=r"InMemoryVectorStore makes no packets.*engine=chat\.engine"):
        KVPacketRetriever(vectorstore=InMemoryVectorStore(embeddings))
    with pytest.raises(KVPacketError, match="engine: input should be an instance of KVPacketEngine, not 'tiny'"):
        KVPacketRetriever(vectorstore=InMemoryVectorStore(embeddings), engine="tiny")


def test_traces_name_it(store: KVPacketVectorStore):
    assert KVPacketRetriever(vectorstore=store)._get_ls_params() == {"ls_retriever_name": "kvpacket"}
    assert "weights" not in repr(KVPacketRetriever(vectorstore=store)) and len(repr(store)) < 200


def test_what_can_have_no_packet_is_retrieved_all_the_same(engine: KVPacketEngine, caplog: pytest.LogCaptureFixture):
    long = Document("word " * 3000, id="long")
    other = InMemoryVectorStore.from_documents([*documents(), long], WordEmbeddings())
    assert "long" in ids(KVPacketRetriever(vectorstore=other, engine=engine, k=9).invoke(QUESTION))
    assert len(engine.store) == 4 and "is read in full" in caplog.text


def test_what_finds_no_memory_to_be_encoded_is_retrieved_all_the_same(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    other = InMemoryVectorStore.from_documents(documents(), WordEmbeddings())
    with monkeypatch.context() as patch:
        patch.setattr(engine.backbone, "encode", full)
        assert len(KVPacketRetriever(vectorstore=other, engine=engine, k=4).invoke(QUESTION)) == 4
        assert len(engine.store) == 0 and "is read in full: the memory of cpu has no room" in caplog.text
        with pytest.raises(DeviceError, match="cut documents into smaller chunks"):
            KVPacketVectorStore(WordEmbeddings(), engine).add_texts(CHUNKS[:1])
