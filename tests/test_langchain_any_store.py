"""LangChain over vector stores of others: what they find has packets, and prompts reuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvpacket import ChatKVPacket, KVPacketRetriever, KVPacketTransformer, format_docs
from langchain_samples import QUESTION, Reused, WordEmbeddings, documents
from vector_server_samples import milvus_file, own_name, postgres_url

from kvpacket_rag import KVPacketEngine, KVPacketError

pytestmark = [  # of the databases themselves
    pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR is not set"),
    pytest.mark.filterwarnings("ignore:.*ORM-style PyMilvus API"),
]


def qdrant() -> VectorStore:
    """Qdrant's own engine, in this process."""
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, VectorParams

    client = QdrantClient(":memory:")
    client.create_collection("chunks", VectorParams(size=64, distance=Distance.COSINE))
    return QdrantVectorStore(client, "chunks", WordEmbeddings())


def pgvector() -> VectorStore:
    """A collection of a real PostgreSQL."""
    from langchain_postgres import PGVector
    from sqlalchemy import NullPool, create_engine

    engine = create_engine(postgres_url("psycopg"), poolclass=NullPool)  # which leaves no connection open
    return PGVector(WordEmbeddings(), connection=engine, collection_name=own_name())


def milvus() -> VectorStore:
    """Milvus in this process, over a file of its own."""
    from langchain_milvus import Milvus
    from pymilvus import connections

    place = {"uri": milvus_file()}
    store = Milvus(WordEmbeddings(), connection_args=place, collection_name=own_name())
    connections.connect(store.alias, **place)  # langchain-milvus 0.3.3 looks for it, pymilvus 2.6.17 does not make it
    return store


def named() -> list[Document]:
    """Documents under ids that every store takes, Qdrant too, and that no other collection has, for PGVector's sake."""
    return [document.model_copy(update={"id": str(uuid4())}) for document in documents()]


SERVERS = [pytest.param(make, marks=pytest.mark.scale) for make in (qdrant, pgvector, milvus)]
STORES = pytest.mark.parametrize("make", [lambda: InMemoryVectorStore(WordEmbeddings()), *SERVERS])


@STORES
def test_what_is_retrieved_has_its_packet_and_the_chain_reads_no_chunk(
    engine: KVPacketEngine, make: Callable[[], VectorStore]
):
    store = make()
    store.add_documents(given := named(), ids=[str(document.id) for document in given])
    retriever = KVPacketRetriever(vectorstore=store, engine=engine, k=3)
    prompt = ChatPromptTemplate.from_template("Documents:\n\n{context}\n\nAnswer in one sentence: {question}")
    chat, reused = ChatKVPacket(engine=engine, max_tokens=2), Reused()
    context: Any = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    (context | prompt | chat | StrOutputParser()).invoke(QUESTION, config={"callbacks": [reused]})
    assert reused.chunks == [3] and reused.misses == [[]]
    found = retriever.invoke(QUESTION)
    assert CHUNKS[1] == found[0].page_content and len(engine.store) == 3


@STORES
def test_the_packet_id_travels_in_the_metadata_of_what_was_ingested_with_packets(
    engine: KVPacketEngine, make: Callable[[], VectorStore], monkeypatch: pytest.MonkeyPatch
):
    store, given = make(), named()
    made = KVPacketTransformer(engine).transform_documents(given)
    store.add_documents(list(made), ids=[str(document.id) for document in made])
    assert len(engine.store) == 4 and [document.metadata for document in given] == [{"row": n} for n in range(4)]
    monkeypatch.setattr(engine.backbone, "encode", lambda *_: pytest.fail("encoded again"))
    for found in store.similarity_search(QUESTION, k=3):
        assert found.metadata["kvpacket_id"] == engine.encoder.identify(found.page_content)[0]
    assert len(KVPacketRetriever(vectorstore=store, engine=engine, k=4).invoke(QUESTION)) == 4


def test_a_document_that_comes_again_or_is_dropped_lets_go_of_its_packet(engine: KVPacketEngine):
    step = KVPacketTransformer(engine)
    step.transform_documents([*documents(), Document(" \n", id="blank")])
    changed = Document("The lease was ended by the harbour office in the autumn of 2024, to our surprise.", id="d1")
    (again,) = step.transform_documents([changed])
    names = {packet.packet_id for packet in engine.store.known(engine.signature)}
    assert len(names) == 4 and again.metadata["kvpacket_id"] in names
    twin = step.transform_documents([Document(CHUNKS[0], id="twin")])[0].metadata["kvpacket_id"]
    assert step.drop(["d0", "nobody"]) == [] and step.drop(["twin"]) == [twin]


def test_documents_without_id_and_of_collections_of_equal_ids_are_kept_apart(engine: KVPacketEngine):
    one, other = KVPacketTransformer(engine, owner="one"), KVPacketTransformer(engine, owner="other")
    one.transform_documents(documents()[:2])
    other.transform_documents(documents()[1:3])
    (loose,) = one.transform_documents([Document(CHUNKS[3])])
    assert len(one.drop(["d0", "d1"])) == 1 and len(engine.store) == 3
    assert one.drop([loose.metadata["kvpacket_id"]]) == [loose.metadata["kvpacket_id"]]


@pytest.mark.parametrize("text", ["", "word " * 3000], ids=["blank", "too long"])
def test_a_document_that_can_have_no_packet_any_more_does_not_name_one(engine: KVPacketEngine, text: str):
    step = KVPacketTransformer(engine)
    (made,) = step.transform_documents(documents()[:1])
    changed = made.model_copy(update={"page_content": text})
    (after,) = step.transform_documents([changed])
    assert after.metadata == {"row": 0} and "kvpacket_id" in changed.metadata and len(engine.store) == 0


def test_what_is_longer_than_the_window_is_told_and_left_as_it_is(
    engine: KVPacketEngine, caplog: pytest.LogCaptureFixture
):
    long = Document("word " * 3000, id="long")
    assert KVPacketTransformer(engine).transform_documents([long]) == [long]
    assert "document long gets no packet" in caplog.text
    with pytest.raises(KVPacketError, match=r"engine=chat\.engine"):
        KVPacketTransformer("tiny")  # type: ignore[arg-type]
