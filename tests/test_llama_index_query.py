"""The integration in use: indexes, query engines, chat engines, pipelines and storage folders of LlamaIndex."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNKS
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index_kvpacket import KVPacketEmbedding, KVPacketLLM, KVPacketVectorStore
from llama_index_kvpacket.messages import to_message
from llama_index_samples import QUESTION, WordEmbedding, documents, embed, no_stray_loop  # noqa: F401

from kvpacket_rag import Backbone, DiskStore, GenerationSettings, KVPacketEngine, KVPacketError, StoreError
from kvpacket_rag.store import MemoryStore

SHORT = GenerationSettings(max_new_tokens=8)


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=8)


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore(engine)


def build(store: KVPacketVectorStore, given: list[Document] | None = None) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    given = documents() if given is None else given
    return VectorStoreIndex.from_documents(given, storage_context=context, embed_model=WordEmbedding())


def known(engine: KVPacketEngine) -> list[str]:
    return sorted(chunk.text for chunk in engine.store.known(engine.signature))


def watch(llm: KVPacketLLM) -> LlamaDebugHandler:
    """Keeps the events of calls from here on; a query engine sets its own callbacks when it is made."""
    seen = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([seen])
    return seen


async def ask(llm: KVPacketLLM, engine: Any, method: str, streaming: bool) -> tuple[str, Any]:
    response = await engine.aquery(QUESTION) if method == "aquery" else engine.query(QUESTION)
    if not streaming:
        return str(response), response
    if method == "aquery":
        return "".join([piece async for piece in response.async_response_gen()]), response
    return "".join(response.response_gen), response


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("method", ["query", "aquery"])
async def test_a_query_engine_answers_from_packets_as_the_engine_does(
    llm: KVPacketLLM, store: KVPacketVectorStore, method: str, streaming: bool
):
    build(store)
    index = VectorStoreIndex.from_vector_store(store, embed_model=WordEmbedding())
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=streaming)
    seen = watch(llm)
    answer, response = await ask(llm, query_engine, method, streaming)
    ((start, end),) = seen.get_event_pairs(CBEventType.LLM)
    expected = llm.engine.generate([to_message(m) for m in start.payload[EventPayload.MESSAGES]], SHORT)
    assert answer == expected.text and end.payload[EventPayload.RESPONSE].raw["usage"]["chunks_reused"] == 3
    assert response.source_nodes[0].text == CHUNKS[1] and len(response.source_nodes) == 3
    assert response.source_nodes[0].score == pytest.approx(cosine(QUESTION, f"page: 1\n\n{CHUNKS[1]}"))


def cosine(one: str, other: str) -> float:
    a, b = np.array(embed(one)), np.array(embed(other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate"])
def test_every_response_mode_reuses_every_chunk(llm: KVPacketLLM, store: KVPacketVectorStore, mode: str):
    query_engine = build(store).as_query_engine(llm=llm, similarity_top_k=4, response_mode=mode)
    seen = watch(llm)
    query_engine.query(QUESTION)
    calls = [end.payload[EventPayload.RESPONSE].raw["usage"] for _, end in seen.get_event_pairs(CBEventType.LLM)]
    assert sum(usage["chunks_reused"] for usage in calls) == 4
    assert [usage["misses"] for usage in calls] == [[]] * len(calls)


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_chat_engines_reuse_the_chunks_in_every_turn(llm: KVPacketLLM, store: KVPacketVectorStore, mode: str):
    chat = build(store).as_chat_engine(
        chat_mode=mode, llm=llm, similarity_top_k=2, memory=ChatMemoryBuffer.from_defaults(llm=llm)
    )
    for question in (QUESTION, "For how long?"):
        assert isinstance(chat.chat(question).response, str)
        assert llm.last_usage is not None and llm.last_usage["chunks_reused"] == 2
    chat.reset()
    assert "".join(chat.stream_chat(QUESTION).response_gen) and llm.last_usage["chunks_reused"] == 2


def test_after_a_document_is_deleted_no_prompt_and_no_packet_holds_it(llm: KVPacketLLM, store: KVPacketVectorStore):
    index = build(store)
    index.delete_ref_doc("d1", delete_from_docstore=True)
    assert known(llm.engine) == sorted({*CHUNKS} - {CHUNKS[1]})
    response = index.as_query_engine(llm=llm, similarity_top_k=9).query(QUESTION)
    assert CHUNKS[1] not in [node.text for node in response.source_nodes] and len(response.source_nodes) == 3
    assert llm.last_usage is not None and llm.last_usage["chunks_reused"] == 3


def test_an_update_changes_the_packets_of_what_changed(
    llm: KVPacketLLM, store: KVPacketVectorStore, monkeypatch: pytest.MonkeyPatch
):
    index, encoded = build(store), []
    encode = llm.engine.encoder.encode
    monkeypatch.setattr(llm.engine.encoder, "encode", lambda todo, *_: encoded.extend(todo) or encode(todo))
    for page in (7, 8):
        index.update_ref_doc(Document(text=CHUNKS[1], id_="d1", metadata={"page": page}))
    assert encoded == [] and known(llm.engine) == sorted(CHUNKS)
    changed = CHUNKS[1].replace("seven", "nine")
    index.update_ref_doc(Document(text=changed, id_="d1"))
    assert len(encoded) == 1 and known(llm.engine) == sorted([*CHUNKS[:1], changed, *CHUNKS[2:]])
    assert index.as_retriever(similarity_top_k=1).retrieve(QUESTION)[0].text == changed


def test_a_refresh_adds_changes_and_leaves_documents(llm: KVPacketLLM, store: KVPacketVectorStore):
    index = build(store, documents()[:3])
    changed = Document(text="The lease was ended by the harbour office in the autumn of 2024.", id_="d1")
    assert index.refresh_ref_docs([documents()[0], changed, documents()[3]]) == [False, True, True]
    assert known(llm.engine) == sorted([CHUNKS[0], changed.text, CHUNKS[2], CHUNKS[3]]) and len(store.client) == 4


def test_a_deleted_document_whose_hash_is_forgotten_comes_back_with_a_refresh(
    llm: KVPacketLLM, store: KVPacketVectorStore
):
    index = build(store)
    index.delete_ref_doc("d1", delete_from_docstore=True)
    index.docstore.delete_document("d1", raise_error=False)
    assert index.refresh_ref_docs(documents()) == [False, True, False, False]
    assert known(llm.engine) == sorted(CHUNKS)


@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
def test_an_ingestion_pipeline_keeps_rows_and_packets_together(
    llm: KVPacketLLM, store: KVPacketVectorStore, strategy: DocstoreStrategy
):
    steps = [SentenceSplitter(), WordEmbedding()]
    pipeline = IngestionPipeline(
        transformations=steps, docstore=SimpleDocumentStore(), vector_store=store, docstore_strategy=strategy
    )
    pipeline.run(documents=documents()[:3])
    pipeline.run(documents=documents()[1:])
    kept = CHUNKS[1:] if strategy == DocstoreStrategy.UPSERTS_AND_DELETE else CHUNKS
    assert known(llm.engine) == sorted(kept) == sorted(node.text for node in store.get_nodes())


def test_an_index_in_memory_is_persisted_and_comes_back_with_its_packets(
    llm: KVPacketLLM, store: KVPacketVectorStore, backbone: Backbone, tmp_path: Path
):
    index = build(store)
    expected = index.as_query_engine(llm=llm).query(QUESTION).response
    index.delete_ref_doc("d3")
    for _ in range(2):
        index.storage_context.persist(str(tmp_path / "saved"))
    (tmp_path / "saved").rename(tmp_path / "moved")
    engine = KVPacketEngine(backbone, DiskStore(tmp_path / "moved/default__vector_store.kvpacket"), min_match_tokens=4)
    again = KVPacketVectorStore.from_persist_dir(str(tmp_path / "moved"), engine=engine)
    context = StorageContext.from_defaults(persist_dir=str(tmp_path / "moved"), vector_store=again)
    loaded = load_index_from_storage(context, embed_model=WordEmbedding())
    reader = KVPacketLLM(engine=engine, max_new_tokens=8)
    assert loaded.as_query_engine(llm=reader).query(QUESTION).response == expected
    assert (
        reader.last_usage is not None
        and reader.last_usage["chunks_reused"] == 2
        and known(engine) == sorted(CHUNKS[:3])
    )


def test_a_persisted_folder_opened_as_another_store_fails_loudly(store: KVPacketVectorStore, tmp_path: Path):
    build(store).storage_context.persist(str(tmp_path))
    with pytest.raises(json.JSONDecodeError):
        StorageContext.from_defaults(persist_dir=str(tmp_path))
    with pytest.raises(StoreError, match=r"image__vector_store.json begins '\{"):
        KVPacketVectorStore.from_persist_dir(str(tmp_path), namespace="image", engine=store.engine)
    with pytest.raises(StoreError, match="cannot be read as a persisted vector store"):
        KVPacketVectorStore.from_persist_dir(str(tmp_path / "none"), engine=store.engine)


def test_a_store_in_a_folder_is_pointed_to_and_its_packets_kept(
    engine: KVPacketEngine, backbone: Backbone, tmp_path: Path
):
    assert isinstance(engine.store, MemoryStore)
    build(KVPacketVectorStore(engine, tmp_path / "index")).storage_context.persist(str(tmp_path / "saved"))
    on_disk = KVPacketEngine(backbone, DiskStore(tmp_path / "index"))
    again = KVPacketVectorStore.from_persist_dir(str(tmp_path / "saved"), engine=on_disk)
    assert again.path == str(tmp_path / "index") and len(again.client) == len(on_disk.store) == 4


def test_a_remote_file_system_is_refused(store: KVPacketVectorStore, tmp_path: Path):
    from fsspec.implementations.memory import MemoryFileSystem

    with pytest.raises(StoreError, match="cannot be kept on MemoryFileSystem"):
        store.persist(str(tmp_path / "x.json"), MemoryFileSystem())


class _Words:
    name, dim = "words", 64

    def embed_documents(self, texts: Any) -> Any:
        return np.array([embed(text) for text in texts], np.float32)

    def embed_query(self, text: str) -> Any:
        return np.array(embed(text), np.float32)


async def test_an_embedder_serves_as_embedding_model():
    model = KVPacketEmbedding(embedder=_Words())
    assert model.model_name == "words" and model.get_query_embedding("a b") == pytest.approx(embed("a b"))
    assert model.get_text_embedding_batch(["a", "b c"])[1] == pytest.approx(embed("b c"))
    assert await model.aget_query_embedding("a b") == model.get_query_embedding("a b")
    assert await model.aget_text_embedding_batch(["a"]) == [model.get_text_embedding("a")]
    assert copy.deepcopy(model)._embedder is model._embedder
    with pytest.raises(KVPacketError, match="make it from model_name"):
        pickle.dumps(model)
    with pytest.raises(KVPacketError, match=r"'batch_size'"):
        KVPacketEmbedding(embedder=_Words(), batch_size=3)
