"""Rows that others take the place of: in a stored index whose docstore is gone, and of nodes that lost their text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter
from llama_index.core.schema import NodeRelationship, TextNode
from llama_index_kvpacket import KVPacketVectorStore
from llama_index_kvpacket.packets import NodePackets
from llama_index_samples import WordEmbedding, documents, no_stray_loop, node  # noqa: F401

from kvpacket_rag import Backbone, DiskStore, KVPacketEngine, StoreFullError, rows

CHANGED = "The lease was ended by the harbour office in the autumn of 2024, to the surprise of the whole crew."
Open = Callable[[], KVPacketVectorStore]


@pytest.fixture
def reopen(backbone: Backbone, tmp_path: Path) -> Iterator[Open]:
    """Opens the folder as a new process would."""
    engine = KVPacketEngine(backbone, DiskStore(tmp_path), min_match_tokens=4)
    yield lambda: KVPacketVectorStore(engine, tmp_path)
    engine.close()


def index_over(store: KVPacketVectorStore, **options: Any) -> VectorStoreIndex:
    return VectorStoreIndex.from_vector_store(store, embed_model=WordEmbedding(), **options)


def build(store: KVPacketVectorStore, given: list[Document], **options: Any) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(given, context, embed_model=WordEmbedding(), **options)


def texts(store: KVPacketVectorStore) -> list[str]:
    return sorted(node.get_content() for node in store.get_nodes())


def known(store: KVPacketVectorStore) -> list[str]:
    return sorted(chunk.text for chunk in store.engine.store.known(store.engine.signature))


def test_a_refresh_replaces_what_changed_doubles_nothing_and_encodes_only_the_new(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
):
    build(reopen(), documents())
    store, encoded = reopen(), []
    encode = store.engine.encoder.encode
    monkeypatch.setattr(store.engine.encoder, "encode", lambda todo, *_: encoded.extend(todo) or encode(todo))
    index = index_over(store)
    assert index.refresh_ref_docs([documents()[0], Document(text=CHANGED, id_="d1"), *documents()[2:]]) == [True] * 4
    assert texts(store) == known(store) == sorted([CHUNKS[0], CHANGED, *CHUNKS[2:]]) and len(encoded) == 1
    assert index.as_retriever(similarity_top_k=1).retrieve(CHANGED)[0].node.get_content() == CHANGED


def test_a_document_that_lost_its_text_loses_its_rows(reopen: Open):
    build(reopen(), documents())
    store, empty = reopen(), Document(text=" ", id_="d1")
    with CallbackManager().as_trace("refresh_ref_docs"):
        store.add([TextNode(text=" ", relationships={NodeRelationship.SOURCE: empty.as_related_node_info()})])
    assert texts(store) == known(store) == sorted([CHUNKS[0], *CHUNKS[2:]])


def test_a_node_that_comes_again_without_text_is_gone(engine: KVPacketEngine):
    store = KVPacketVectorStore(engine)
    store.add([node("a", CHUNKS[0]), node("b", CHUNKS[1])])
    store.add([node("a", " \n"), node("c", CHUNKS[2])])
    assert texts(store) == known(store) == sorted(CHUNKS[1:3])
    store.add([node("b", "")])
    assert texts(store) == known(store) == [CHUNKS[2]]


@pytest.mark.parametrize("batch", [1, 2, 2048])
def test_a_long_document_that_comes_in_many_batches_replaces_each_row_once(reopen: Open, batch: int):
    splitter = SentenceSplitter(chunk_size=30, chunk_overlap=0)
    long = [Document(text=" ".join(CHUNKS), id_="long")]
    build(reopen(), long, transformations=[splitter])
    before = texts(reopen())
    assert len(before) > 3
    for given in (long, [Document(text=" ".join([CHANGED, *CHUNKS]), id_="long")]):
        store = reopen()
        index_over(store, transformations=[splitter], insert_batch_size=batch).refresh_ref_docs(given)
        expected = sorted(node.get_content() for node in splitter.get_nodes_from_documents(given))
        assert texts(store) == expected and known(store) == sorted(set(expected))


def test_further_nodes_of_a_document_stand_beside_its_old_ones(reopen: Open):
    build(reopen(), documents()[:1])
    store = reopen()
    for source in (documents()[0].as_related_node_info(), documents()[0].as_related_node_info()):
        source.hash = source.hash if len(store.client) == 1 else None  # one tells the version, one does not
        index_over(store).insert_nodes(
            [TextNode(text=CHUNKS[len(store.client)], relationships={NodeRelationship.SOURCE: source})]
        )
    assert texts(store) == sorted(CHUNKS[:3])


@pytest.mark.parametrize("way", ["refresh_ref_docs", "arefresh_ref_docs"])
async def test_a_refresh_by_an_index_of_its_own_each_time_leaves_one_version_in_a_store_kept_open(
    reopen: Open, way: str
):
    store = reopen()
    splitter = SentenceSplitter(chunk_size=30, chunk_overlap=0)
    options: dict[str, Any] = {"transformations": [splitter], "insert_batch_size": 2}
    for long in (" ".join(CHUNKS), " ".join(CHUNKS), " ".join([CHANGED, *CHUNKS])):
        given = [Document(text=long, id_="long"), *documents()[:2]]
        done = getattr(index_over(store, **options), way)(given)
        assert (await done if way.startswith("a") else done) == [True] * 3
        expected = sorted(node.get_content() for node in splitter.get_nodes_from_documents(given))
        assert texts(store) == expected and known(store) == sorted(set(expected))


@pytest.mark.parametrize("is_kept_open", [False, True])
def test_a_refresh_that_cuts_at_other_places_replaces_what_was_cut_before(reopen: Open, is_kept_open: bool):
    long = Document(text=" ".join(CHUNKS), id_="long")
    build(store := reopen(), [long], transformations=[SentenceSplitter(chunk_size=60, chunk_overlap=0)])
    source = {NodeRelationship.SOURCE: long.as_related_node_info()}
    index_over(store).insert_nodes([TextNode(text="A summary of it.", relationships=source)])  # no piece of its text
    finer = SentenceSplitter(chunk_size=30, chunk_overlap=0)
    store = store if is_kept_open else reopen()
    index_over(store, transformations=[finer], insert_batch_size=2).refresh_ref_docs([long])
    expected = [node.get_content() for node in finer.get_nodes_from_documents([long])]
    assert texts(store) == sorted([*expected, "A summary of it."]) and len(expected) > 3


def test_documents_of_one_id_may_be_inserted_one_after_another(reopen: Open):
    pages = [Document(text=text, id_="file") for text in CHUNKS[:3]]
    index = index_over(store := reopen())
    for page in pages:
        index.insert(page)
    assert texts(store) == sorted(CHUNKS[:3])
    index.refresh_ref_docs(pages)  # LlamaIndex itself keeps the last one alone
    assert texts(store) == known(store) == CHUNKS[2:3]


def test_what_is_inserted_after_reopening_stands_beside_the_rest_and_never_twice(reopen: Open):
    pages = [Document(text=text, id_="file") for text in CHUNKS[:3]]
    for count in (1, 2, 3, 3):
        index = index_over(store := reopen())
        for page in pages[:count]:
            index.insert(page)
        assert texts(store) == known(store) == sorted(CHUNKS[:count])
    build(store := reopen(), [Document(text=CHUNKS[3], id_="file")])
    assert texts(store) == sorted(CHUNKS[:4])


def test_an_update_through_an_index_that_does_not_know_the_document_replaces_it(reopen: Open):
    build(store := reopen(), documents()[:2])
    index_over(store).update_ref_doc(Document(text=CHANGED, id_="d1"))
    assert texts(store) == known(store) == sorted([CHUNKS[0], CHANGED])


def test_two_who_refresh_one_folder_at_once_leave_one_version(reopen: Open, monkeypatch: pytest.MonkeyPatch):
    build(reopen(), documents()[:1])
    first, second = reopen(), reopen()  # as two processes would
    put, begun, ended = NodePackets.put, threading.Event(), threading.Event()

    def late(packets: NodePackets, *args: Any) -> None:
        if packets is first._packets:
            begun.set()
            ended.wait(0.5)  # in vain, for the other has to wait
        put(packets, *args)

    monkeypatch.setattr(NodePackets, "put", late)
    change = Document(text=CHANGED, id_="d0"), Document(text=CHUNKS[2], id_="d0")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(index_over(first).refresh_ref_docs, [change[0]])
        assert begun.wait(60)
        index_over(second).refresh_ref_docs([change[1]])
        ended.set()
        running.result()
    assert texts(first) == texts(second) == known(first) == [CHUNKS[2]]


def test_a_refresh_that_is_cut_short_leaves_the_old_version_alone(reopen: Open, monkeypatch: pytest.MonkeyPatch):
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    build(reopen(), documents()[:1])
    store = reopen()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rows.ChunkRows, "_delete", killed)
        index_over(store).refresh_ref_docs([Document(text=CHANGED, id_="d0")])
    assert texts(store) == known(store) == CHUNKS[:1]


def test_what_is_added_since_the_opening_is_left_to_llama_index(reopen: Open):
    index = build(store := reopen(), documents()[:1])
    index.insert(Document(text=CHANGED, id_="d0"))  # it knows the document, and keeps both
    assert texts(store) == sorted([CHUNKS[0], CHANGED])
    index.update_ref_doc(Document(text=CHUNKS[2], id_="d0"))
    assert texts(store) == [CHUNKS[2]]


def test_two_documents_of_one_id_in_one_build_are_both_kept(reopen: Open):
    both = [Document(text=text, id_="same") for text in CHUNKS[:2]]
    for _ in range(2):
        build(store := reopen(), both)
        assert texts(store) == sorted(CHUNKS[:2])


def test_a_hierarchy_of_equal_texts_comes_back_as_it_was(reopen: Open):
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[500, 100])
    for _ in range(2):
        build(store := reopen(), documents()[:1], transformations=[parser])
        assert texts(store) == [CHUNKS[0]] * 2


def test_what_could_not_be_stored_replaces_nothing_and_may_be_tried_again(
    reopen: Open, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise StoreFullError("no room")

    build(reopen(), documents()[:2])
    store, changed = reopen(), Document(text=CHANGED, id_="d1")
    with monkeypatch.context() as patch, pytest.raises(StoreFullError):
        patch.setattr(store.engine.store, "put", full)
        index_over(store).refresh_ref_docs([changed])
    assert texts(store) == sorted(CHUNKS[:2])
    index_over(store).refresh_ref_docs([changed])
    assert texts(store) == known(store) == sorted([CHUNKS[0], CHANGED])


def test_with_its_docstore_in_the_folder_an_index_knows_what_changed(reopen: Open, tmp_path: Path):
    build(reopen(), documents()).storage_context.persist(str(tmp_path))
    context = StorageContext.from_defaults(vector_store=(store := reopen()), persist_dir=str(tmp_path))
    index = load_index_from_storage(context, embed_model=WordEmbedding())
    changed = [documents()[0], Document(text=CHANGED, id_="d1"), *documents()[2:]]
    assert index.refresh_ref_docs(changed) == [False, True, False, False]
    assert texts(store) == known(store) == sorted([CHUNKS[0], CHANGED, *CHUNKS[2:]])
