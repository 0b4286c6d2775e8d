"""Arguments of another kind than expected are refused by name, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_kvpacket import ChatKVPacket, KVPacketLLM, KVPacketVectorStore, format_docs
from langchain_samples import QUESTION, WordEmbeddings, documents

from kvpacket_rag import KVPacketEngine, PromptError, StoreError


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda store: store.add_texts(CHUNKS[0]), "texts is a str, expected a list"),
        (lambda store: store.add_texts(5), "texts is a int, expected a list"),
        (lambda store: store.add_texts([b"bytes"]), "one of the texts is a bytes, expected a text"),
        (lambda store: store.add_texts(CHUNKS[:1], ids="d"), "ids is a str, expected a list"),
        (lambda store: store.add_texts(CHUNKS[:1], ids=[7]), "the id of a text is a int, expected a text"),
        (lambda store: store.add_texts(CHUNKS[:1], {"row": 1}), "metadatas is a dict, expected a list"),
        (lambda store: store.add_texts(CHUNKS[:1], ["row"]), "metadata of a text is a str, expected a dict"),
        (lambda store: store.delete("d1"), "ids is a str, expected a list"),
        (lambda store: store.get_by_ids("d1"), "ids is a str, expected a list"),
        (lambda store: store.similarity_search(None), "the question is a NoneType, expected a text"),
        (lambda store: store.similarity_search(QUESTION, k="4"), "k is '4', expected a whole number"),
        (lambda store: store.max_marginal_relevance_search(QUESTION, fetch_k=0.5), r"fetch_k is 0\.5, expected"),
        (lambda store: KVPacketVectorStore("words", store.engine), "embedding is a str, expected LangChain embeddings"),
        (
            lambda store: KVPacketVectorStore(WordEmbeddings(), ChatKVPacket(engine=store.engine)),
            r"engine is a ChatKVPacket; pass its engine, as in engine=chat\.engine",
        ),
        (lambda store: KVPacketVectorStore(WordEmbeddings(), "tiny"), "engine is a str; pass a KVPacketEngine"),
        (lambda store: KVPacketVectorStore.from_texts([], WordEmbeddings(), devise="cpu"), "has no option devise"),
        (lambda store: KVPacketVectorStore.open("unused", WordEmbeddings(), devise="cpu"), "has no option devise"),
    ],
)
def test_a_store_says_what_it_was_given(store: KVPacketVectorStore, ask: Any, message: str):
    with pytest.raises(StoreError, match=message):
        ask(store)
    assert len(store) == len(store.engine.store) == 4


@pytest.mark.parametrize("make", [ChatKVPacket, KVPacketLLM])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": 5}, "stop is a int; pass a list of texts"),
        ({"stop": [5]}, "expected a tuple of strings"),
        ({"kv_hint": 5}, "kv_hint is a int; pass a list of packet ids or of Documents"),
        ({"kv_hint": Document("a")}, "kv_hint is a Document; pass a list"),
        ({"kv_hint": [5]}, "kv_hint holds a int; pass packet ids or Documents"),
        ({"max_tokens": "many"}, "must be numbers"),
        ({"max_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"temperature": "hot"}, "must be numbers"),
        ({"chat_template_kwargs": ["thinking"]}, "chat_template_kwargs is a list, expected a dict"),
        ({"pipeline_kwargs": ["thinking"]}, "pipeline_kwargs is a list, expected a dict"),
    ],
)
def test_a_call_says_what_it_was_given(engine: KVPacketEngine, make: Any, arguments: dict[str, Any], message: str):
    with pytest.raises(PromptError, match=message):
        make(engine=engine).invoke("Hi", **arguments)


def test_what_is_no_document_and_no_tool_is_refused(engine: KVPacketEngine):
    with pytest.raises(PromptError, match="format_docs was given a str, expected Documents"):
        format_docs(["text"])  # type: ignore[list-item]
    with pytest.raises(PromptError, match="tools is a str; pass a list"):
        ChatKVPacket(engine=engine).bind_tools("search")  # type: ignore[arg-type]


def test_a_hint_that_is_too_long_for_a_packet_does_no_harm(store: KVPacketVectorStore):
    chat = ChatKVPacket(engine=store.engine, max_tokens=1)
    message = chat.invoke(CHUNKS[0] + " So?", kv_hint=[Document("word " * 3000), *documents()[:1]])
    assert message.response_metadata["chunks_reused"] == 1
