"""Any vector store: a transform makes packets beside it, a post-processor those that are missing."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index_kvpacket import KVPacketLLM
from llama_index_kvpacket.beside import drop_packets
from llama_index_kvpacket.documents import delete_document
from llama_index_kvpacket.postprocessor import KVPacketPostprocessor
from llama_index_kvpacket.transform import PACKET_ID_KEY, KVPacketTransform
from llama_index_samples import DIM, QUESTION, WordEmbedding, documents, node, nodes
from vector_server_samples import milvus_file, own_name, postgres_url

from kvpacket_rag import Backbone, GenerationSettings, KVPacketEngine, KVPacketError, StoreFullError

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")  # in Qdrant's own engine

CHANGED = "The lease was ended by the harbour office in the autumn of 2024, to the surprise of the whole crew."


def qdrant() -> Any:
    """Qdrant's own engine, in this process."""
    module = pytest.importorskip("llama_index.vector_stores.qdrant")
    from qdrant_client import QdrantClient

    return module.QdrantVectorStore(client=QdrantClient(":memory:"), collection_name="chunks")


def pgvector() -> Any:
    """A table of a real PostgreSQL."""
    from llama_index.vector_stores.postgres import PGVectorStore

    urls = postgres_url("psycopg2"), postgres_url("asyncpg")
    return PGVectorStore(*urls, table_name=own_name(), schema_name="public", embed_dim=DIM, use_jsonb=True)


def milvus() -> Any:
    """Milvus in this process, over a file of its own."""
    from llama_index.vector_stores.milvus import MilvusVectorStore

    return MilvusVectorStore(uri=milvus_file(), collection_name=own_name(), dim=DIM, use_async_client=False)


SERVERS = [pytest.param(make, marks=pytest.mark.scale) for make in (pgvector, milvus)]
STORES = pytest.mark.parametrize("make", [SimpleVectorStore, qdrant, *SERVERS])


@pytest.fixture(autouse=True)
def _no_event_loop_but_the_tests_own() -> None:
    asyncio.set_event_loop(None)  # else LlamaIndex opens one for the whole thread and never closes it


@pytest.fixture
def encoded(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packets that were computed."""
    names: list[str] = []
    encode = engine.encoder.encode
    monkeypatch.setattr(engine.encoder, "encode", lambda todo, *_: names.extend(n for n, _ in todo) or encode(todo))
    return names


def known(engine: KVPacketEngine) -> list[str]:
    return sorted(chunk.text for chunk in engine.store.known(engine.signature))


def steps(engine: KVPacketEngine, **options: Any) -> list[Any]:
    return [SentenceSplitter(), WordEmbedding(), KVPacketTransform(engine, **options)]


def build(engine: KVPacketEngine, store: Any) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    transformations = [SentenceSplitter(), KVPacketTransform(engine)]
    return VectorStoreIndex.from_documents(
        documents(), context, embed_model=WordEmbedding(), transformations=transformations
    )


def scored(given: list[Any]) -> list[NodeWithScore]:
    return [NodeWithScore(node=each, score=1.0) for each in given]


@STORES
def test_a_query_over_any_store_reads_no_chunk(engine: KVPacketEngine, encoded: list[str], make: Callable[[], Any]):
    index = build(engine, make())
    assert len(encoded) == 4 and known(engine) == sorted(CHUNKS)
    llm, last = KVPacketLLM(engine=engine, max_new_tokens=2), KVPacketPostprocessor(engine)
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=3, node_postprocessors=[last])
    response = query_engine.query(QUESTION)
    assert llm.last_usage["chunks_reused"] == 3 and llm.last_usage["misses"] == []
    assert (len(encoded), last.packets_encoded) == (4, 0)
    first = response.source_nodes[0].node
    assert first.metadata[PACKET_ID_KEY] == engine.encoder.identify(first.text)[0]
    assert PACKET_ID_KEY not in response.source_nodes[0].node.get_content(MetadataMode.LLM)


@STORES
def test_what_was_ingested_without_packets_gets_them_when_it_is_retrieved(
    engine: KVPacketEngine, encoded: list[str], make: Callable[[], Any]
):
    context = StorageContext.from_defaults(vector_store=make())
    index = VectorStoreIndex.from_documents(documents(), context, embed_model=WordEmbedding())
    last = KVPacketPostprocessor(engine)
    found = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
    assert last.postprocess_nodes(found) == found and last.packets_encoded == len(encoded) == 2
    assert known(engine) == sorted(hit.node.get_content() for hit in found)
    last.postprocess_nodes(found)
    assert last.packets_encoded == len(encoded) == 2


@STORES
def test_a_warm_ingestion_cache_costs_packets_and_the_post_processor_makes_them(
    engine: KVPacketEngine, backbone: Backbone, make: Callable[[], Any]
):
    cache = IngestionCache()
    IngestionPipeline(transformations=steps(engine), cache=cache).run(documents=documents())
    other, store = KVPacketEngine(backbone, min_match_tokens=4), make()
    IngestionPipeline(transformations=steps(other), cache=cache, vector_store=store).run(documents=documents())
    assert known(other) == []
    index = VectorStoreIndex.from_vector_store(store, embed_model=WordEmbedding()) if store.stores_text else None
    found = index.as_retriever(similarity_top_k=9).retrieve(QUESTION) if index else scored(nodes())
    last = KVPacketPostprocessor(other)
    last.postprocess_nodes(found)
    assert known(other) == sorted(CHUNKS) and last.packets_encoded == 4


def test_another_model_or_adapter_is_another_entry_of_the_ingestion_cache(
    engine: KVPacketEngine, soft_engine: KVPacketEngine
):
    cache = IngestionCache()
    for each in (engine, soft_engine):
        IngestionPipeline(transformations=steps(each), cache=cache).run(documents=documents())
    assert known(engine) == known(soft_engine) == sorted(CHUNKS)


@STORES
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_changed_document_loses_its_old_packets(
    engine: KVPacketEngine, make: Callable[[], Any], is_async: bool
):
    docstore = SimpleDocumentStore()
    run = IngestionPipeline(
        transformations=steps(engine),
        vector_store=make(),
        docstore=docstore,
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    for given in (documents(), [Document(text=CHANGED, id_="d1")]):
        # Qdrant's own engine has no asynchronous form that shares its memory.
        if is_async and make is SimpleVectorStore:
            await run.arun(documents=given)
        else:
            run.run(documents=given)
    assert known(engine) == sorted([CHUNKS[0], CHANGED, *CHUNKS[2:]])


@STORES
def test_packets_of_deleted_documents_are_dropped_and_shared_ones_stay(engine: KVPacketEngine, make: Callable[[], Any]):
    index = build(engine, make())
    index.insert(Document(text=CHUNKS[1], id_="twin"))
    delete_document(index, "d0")
    delete_document(index, "d1")
    assert len(drop_packets(engine, ["d0", "d1", "nobody"])) == 1
    assert known(engine) == sorted(CHUNKS[1:])
    assert sorted(h.node.get_content() for h in index.as_retriever(similarity_top_k=9).retrieve("x")) == known(engine)
    assert index.refresh_ref_docs(documents()[:1]) == [True] and known(engine) == sorted(CHUNKS)


def test_an_update_and_a_refresh_drop_by_themselves(engine: KVPacketEngine):
    index = build(engine, SimpleVectorStore())
    index.update_ref_doc(Document(text=CHANGED, id_="d1"))
    index.refresh_ref_docs([Document(text=CHUNKS[1], id_="d2")])
    assert known(engine) == sorted([CHUNKS[0], CHANGED, CHUNKS[1], CHUNKS[3]])


def test_collections_of_equal_ids_are_kept_apart_by_their_owner(engine: KVPacketEngine):
    KVPacketTransform(engine, owner="one")(nodes(CHUNKS[:2]))
    KVPacketTransform(engine, owner="other")(nodes(CHUNKS[1:3]))
    assert known(engine) == sorted(CHUNKS[:3])
    drop_packets(engine, ["doc"], owner="one")
    assert known(engine) == sorted(CHUNKS[1:3])


def test_the_transform_leaves_given_nodes_as_they_are(engine: KVPacketEngine):
    given = [*nodes(CHUNKS[:1]), node("blank", " \n")]
    before = [each.model_dump() for each in given]
    first, blank = KVPacketTransform(engine)(given)
    assert [each.model_dump() for each in given] == before and blank is given[1]
    assert first.metadata[PACKET_ID_KEY] == engine.encoder.identify(CHUNKS[0])[0]
    assert first.get_content(MetadataMode.EMBED) == given[0].get_content(MetadataMode.EMBED)


@pytest.mark.parametrize("text", [" \n", "word " * 3000], ids=["blank", "too long"])
def test_a_node_that_can_have_no_packet_any_more_does_not_name_one(engine: KVPacketEngine, text: str):
    (made,) = KVPacketTransform(engine)([node("a", CHUNKS[0], "doc", page=1)])
    changed = made.model_copy(update={"text": text})
    (after,) = KVPacketTransform(engine)([changed])
    assert after.metadata == {"page": 1} and PACKET_ID_KEY in changed.metadata and known(engine) == []


@pytest.mark.parametrize("step", [KVPacketTransform, KVPacketPostprocessor])
def test_what_is_longer_than_the_window_is_told_and_left_out(
    engine: KVPacketEngine, step: Any, caplog: pytest.LogCaptureFixture
):
    given = [node("long", "word " * 3000), node("a", CHUNKS[0])]
    if step is KVPacketTransform:
        step(engine)(given)
    else:
        step(engine).postprocess_nodes(scored(given))
    assert known(engine) == CHUNKS[:1] and "node long gets no packet" in caplog.text


def test_a_full_store_costs_packets_and_no_answer(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any, **__: Any) -> None:
        raise StoreFullError("no room")

    engine.encode(CHUNKS[:1])
    monkeypatch.setattr(engine.store, "put", full)
    last = KVPacketPostprocessor(engine)
    assert len(last.postprocess_nodes(scored(nodes(CHUNKS[:2])))) == 2
    assert last.packets_encoded == 0
    assert "1 retrieved nodes have no packet and are read in full: no room" in caplog.text


def test_memory_that_runs_out_costs_packets_and_no_answer(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    encode = engine.backbone.encode
    texts = [f"{CHUNKS[2]} {CHUNKS[2]}", CHUNKS[3]]

    def narrow(rows: Any, *rest: Any) -> Any:
        if len(rows) > 1 or rows[0].shape[0] < engine.count_tokens(texts[0]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(rows, *rest)

    monkeypatch.setattr(engine.backbone, "encode", narrow)
    last = KVPacketPostprocessor(engine)
    assert len(last.postprocess_nodes(scored(nodes(texts)))) == 2
    assert last.packets_encoded == len(engine.store) == 1
    assert "1 retrieved nodes have no packet and are read in full: the memory of cpu has no room" in caplog.text
    answer = engine.generate("\n\n".join([*texts, "Who?"]), GenerationSettings(2))
    assert answer.usage.chunks_reused == 1


@pytest.mark.parametrize("replaces", [False, True])
def test_packets_are_made_of_windows_before_and_behind_their_replacement(engine: KVPacketEngine, replaces: bool):
    given = KVPacketTransform(engine, packet_text_key="window")([node("a", "A short one.", window=CHUNKS[0])])
    assert known(engine) == CHUNKS[:1]
    hits: list[NodeWithScore] = scored(list(given))
    if replaces:
        hits = MetadataReplacementPostProcessor(target_metadata_key="window").postprocess_nodes(hits)
    last = KVPacketPostprocessor(engine, packet_text_key="" if replaces else "window")
    last.postprocess_nodes(hits)
    assert known(engine) == CHUNKS[:1] and last.packets_encoded == 0


@pytest.mark.parametrize("make", [KVPacketTransform, KVPacketPostprocessor])
def test_what_holds_a_model_is_not_pickled(engine: KVPacketEngine, make: Any):
    with pytest.raises(KVPacketError, match="cannot be pickled"):
        pickle.dumps(make(engine))


async def test_a_pipelines_event_loop_goes_on_while_packets_are_made(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    blocked: list[bool] = []
    encode = engine.encode
    monkeypatch.setattr(engine, "encode", lambda *given: blocked.append(_in_a_loop()) or encode(*given))
    await KVPacketTransform(engine).acall(nodes())
    await KVPacketPostprocessor(engine).apostprocess_nodes(scored([node("new", CHANGED)]))
    assert blocked and not any(blocked)


def _in_a_loop() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def test_no_two_collections_share_the_name_of_a_document(engine: KVPacketEngine):
    KVPacketTransform(engine, owner="kb")([node("a", CHUNKS[0], "docs/readme.md")])
    KVPacketTransform(engine, owner="kb/docs")([node("b", CHUNKS[1], "readme.md")])
    assert len(engine.store) == 2
    assert len(drop_packets(engine, ["readme.md"], owner="kb/docs")) == 1
