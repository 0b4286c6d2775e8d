"""Indexes and ingestion pipelines over the vector store: rows and packets stay together whatever is changed how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index_kvpacket import KVPacketLLM, KVPacketVectorStore
from llama_index_kvpacket.documents import adelete_document, delete_document
from llama_index_samples import QUESTION, WordEmbedding, documents, nodes

from kvpacket_rag import Backbone, KVPacketEngine

CHANGED = "The lease was ended by the harbour office in the autumn of 2024, to the surprise of the whole crew."


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore(engine)


def build(store: Any, **options: Any) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(documents(), context, embed_model=WordEmbedding(), **options)


def known(store: KVPacketVectorStore) -> list[str]:
    return sorted(chunk.text for chunk in store.engine.store.known(store.engine.signature))


def texts(store: KVPacketVectorStore) -> list[str]:
    return sorted(node.get_content() for node in store.get_nodes())


def pipeline(store: KVPacketVectorStore, **options: Any) -> IngestionPipeline:
    return IngestionPipeline(transformations=[SentenceSplitter(), WordEmbedding()], vector_store=store, **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (DocstoreStrategy.UPSERTS, [CHUNKS[0], CHANGED, *CHUNKS[2:]]),
        (DocstoreStrategy.UPSERTS_AND_DELETE, [CHANGED, *CHUNKS[2:]]),
        (DocstoreStrategy.DUPLICATES_ONLY, [*CHUNKS, CHANGED]),  # LlamaIndex leaves the old chunks of a changed one
    ],
)
async def test_a_pipeline_with_a_document_store_changes_rows_and_packets_alike(
    store: KVPacketVectorStore, strategy: DocstoreStrategy, kept: list[str], is_async: bool
):
    run = pipeline(store, docstore=SimpleDocumentStore(), docstore_strategy=strategy)
    later = [Document(text=CHANGED, id_="d1"), *documents()[2:]]
    for given in (documents(), later, later):
        if is_async:
            await run.arun(documents=given)
        else:
            run.run(documents=given)
    assert known(store) == texts(store) == sorted(kept)


@pytest.mark.parametrize("strategy", [None, *DocstoreStrategy])
def test_a_warm_ingestion_cache_leaves_no_row_without_packet(
    store: KVPacketVectorStore, backbone: Backbone, tmp_path: Path, strategy: DocstoreStrategy | None
):
    options = {"docstore_strategy": strategy} if strategy else {}
    first = pipeline(store, **options)
    first.run(documents=documents())
    first.cache.persist(str(tmp_path / "cache"))
    new = KVPacketVectorStore(KVPacketEngine(backbone))
    docstore = {"docstore": SimpleDocumentStore()} if strategy else {}
    cache = IngestionCache.from_persist_path(str(tmp_path / "cache"))
    pipeline(new, cache=cache, **docstore, **options).run(documents=documents())
    assert known(new) == texts(new) == sorted(CHUNKS)


def test_documents_that_were_not_cut_are_changed_and_deleted_too(store: KVPacketVectorStore):
    run = pipeline(store, docstore=SimpleDocumentStore(), docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE)
    run.transformations = [WordEmbedding()]
    run.run(documents=documents()[:3])
    run.run(documents=[Document(text=CHANGED, id_="d1"), *documents()[2:]])
    assert known(store) == texts(store) == sorted([CHANGED, *CHUNKS[2:]])


def test_updating_a_document_twice_keeps_the_counts(store: KVPacketVectorStore):
    index = build(store)
    for text in (CHANGED, CHUNKS[1], CHANGED):
        index.update_ref_doc(Document(text=text, id_="d1"))
        assert len(store.client) == len(store.engine.store) == 4
    assert known(store) == texts(store) == sorted([CHUNKS[0], CHANGED, *CHUNKS[2:]])


async def test_an_index_changes_the_same_without_blocking(store: KVPacketVectorStore):
    index = build(store, use_async=False)
    await index.adelete_ref_doc("d0", delete_from_docstore=True)
    await index.aupdate_ref_doc(Document(text=CHANGED, id_="d1"))
    await index.ainsert(Document(text="A fifth one that nobody had expected, late in the day.", id_="d4"))
    refreshed = await index.arefresh_ref_docs([Document(text=CHANGED, id_="d1"), Document(text=CHUNKS[0], id_="d2")])
    assert refreshed == [False, True]
    fifth = "A fifth one that nobody had expected, late in the day."
    assert known(store) == texts(store) == sorted([CHUNKS[0], CHUNKS[3], CHANGED, fifth])


def test_nodes_are_inserted_and_deleted_through_an_index(store: KVPacketVectorStore):
    index = VectorStoreIndex.from_vector_store(store, embed_model=WordEmbedding())
    index.insert_nodes(nodes(CHUNKS[:3]))
    index.insert(documents()[3])
    index.delete_nodes(["n0", "n2"])
    assert known(store) == texts(store) == sorted([CHUNKS[1], CHUNKS[3]])
    assert index.as_retriever(similarity_top_k=1).retrieve(QUESTION)[0].node_id == "n1"


KINDS = [(True, {}), (True, {"store_nodes_override": True}), (False, {})]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("is_ours", "options"), KINDS)
async def test_a_deleted_document_is_gone_and_a_refresh_brings_it_back(
    store: KVPacketVectorStore, is_ours: bool, options: dict[str, Any], is_async: bool
):
    index = build(store if is_ours else SimpleVectorStore(), **options)
    if is_async:
        await adelete_document(index, "d1")
    else:
        delete_document(index, "d1")
    found = [hit.node.get_content() for hit in index.as_retriever(similarity_top_k=9).retrieve(QUESTION)]
    assert sorted(found) == sorted({*CHUNKS} - {CHUNKS[1]}) and not index.docstore.document_exists("d1")
    assert index.refresh_ref_docs(documents()) == [False, True, False, False]
    assert index.as_retriever(similarity_top_k=1).retrieve(QUESTION)[0].node.get_content() == CHUNKS[1]
    assert known(store) == (sorted(CHUNKS) if is_ours else [])


def test_deleting_twice_or_what_never_was_is_no_error(store: KVPacketVectorStore):
    index = build(store)
    for name in ("d1", "d1", "nobody"):
        delete_document(index, name)
    assert known(store) == texts(store) and len(store.client) == 3


def test_sentence_windows_reach_the_model_from_packets(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    store = KVPacketVectorStore(engine, packet_text_key="window")
    steps = [SentenceWindowNodeParser.from_defaults(window_size=1, sentence_splitter=lambda text: text.split("\n"))]
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex.from_documents(
        [Document(text="\n".join(CHUNKS))], context, embed_model=WordEmbedding(), transformations=steps
    )
    monkeypatch.setattr(engine.encoder, "encode", None)  # all of them have packets
    llm = KVPacketLLM(engine=engine, max_new_tokens=2)
    replacement = MetadataReplacementPostProcessor(target_metadata_key="window")
    index.as_query_engine(llm=llm, similarity_top_k=1, node_postprocessors=[replacement]).query(QUESTION)
    assert llm.last_usage["chunks_reused"] == 1 and llm.last_usage["misses"] == []
    assert llm.last_usage["packet_tokens"] == engine.count_tokens(" ".join(CHUNKS[:3]))
