from __future__ import annotations

import copy
import datetime
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_kvpacket import KVPacketEmbeddings, KVPacketVectorStore
from langchain_kvpacket.embeddings import LangChainEmbedder
from langchain_samples import QUESTION, WordEmbeddings, documents

from kvpacket_rag import (
    Chunk,
    DocumentError,
    KVPacketEngine,
    KVPacketError,
    KVPacketRAG,
    PacketIndex,
    PacketMismatchError,
    StoreError,
)
from kvpacket_rag import Document as KVDocument
from kvpacket_rag.store.remote_cache import RemoteCache


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)


@pytest.fixture
def model_folder(backbone: Any, tmp_path: Path) -> str:
    """The tiny model as a folder that an engine can be loaded from."""
    backbone.model.save_pretrained(tmp_path / "model")
    backbone.tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def texts_of(found: list[Document]) -> list[str]:
    return [document.page_content for document in found]


class Directions(Embeddings):
    """Texts are their own vectors."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [float(number) for number in text.split()]


def test_adding_makes_packets_and_searching_finds_the_nearest_text(store: KVPacketVectorStore):
    assert len(store) == len(store.engine.store) == 4
    best, other = store.similarity_search(QUESTION, k=2)
    assert (best.id, best.page_content, best.metadata) == ("d1", CHUNKS[1], {"row": 1}) and other.id != "d1"


def test_scores_are_cosines_and_relevance_lies_between_0_and_1(engine: KVPacketEngine):
    directions = {"3 4 0": 0.6, "0 2 0": 0.0, "-2 0 0": -1.0, "5 0 0": 1.0}
    store = KVPacketVectorStore.from_texts(list(directions), Directions(), engine=engine)
    found = {d.page_content: score for d, score in store.similarity_search_with_score("1 0 0", k=9)}
    relevant = store.similarity_search_with_relevance_scores("1 0 0", k=9)
    assert found == pytest.approx(directions, abs=1e-6)
    assert {d.page_content: s for d, s in relevant} == pytest.approx({t: (1 + c) / 2 for t, c in directions.items()})
    close = store.similarity_search_with_relevance_scores("1 0 0", k=9, score_threshold=0.7)
    assert [d.page_content for d, _ in close] == ["5 0 0", "3 4 0"]


def test_a_vector_finds_what_its_text_finds(store: KVPacketVectorStore):
    vector = store.embeddings.embed_query(QUESTION)
    assert store.similarity_search_by_vector(vector, k=3) == store.similarity_search(QUESTION, k=3)


def test_marginal_relevance_prefers_what_differs(engine: KVPacketEngine):
    texts = ["1.0 0.1 0", "1.0 0.11 0", "1.0 0.12 0", "1.0 0 0.9"]
    store = KVPacketVectorStore.from_texts(texts, Directions(), engine=engine)
    assert texts_of(store.max_marginal_relevance_search("1 0 0", k=2, lambda_mult=1)) == texts[:2]
    assert texts_of(store.max_marginal_relevance_search("1 0 0", k=2, lambda_mult=0.3)) == [texts[0], texts[3]]
    assert texts_of(store.max_marginal_relevance_search("1 0 0", k=2, fetch_k=3, lambda_mult=0)) == [texts[0], texts[2]]
    mmr = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.3})
    assert texts_of(mmr.invoke("1 0 0")) == [texts[0], texts[3]]


@pytest.mark.parametrize("wanted", [{"row": 2}, lambda document: document.metadata["row"] == 2])
def test_a_filter_finds_a_match_however_far_it_is(store: KVPacketVectorStore, wanted: Any):
    far = store.similarity_search(QUESTION, k=1, filter=wanted)
    assert texts_of(far) == [CHUNKS[2]] == texts_of(store.max_marginal_relevance_search(QUESTION, filter=wanted))
    assert store.as_retriever(search_kwargs={"filter": {"row": 2, "missing": None}}).invoke(QUESTION) == []


@pytest.mark.parametrize("wanted", [{"row": {"$gt": 1}}, {"$and": []}, "row"])
def test_a_filter_that_would_be_misread_is_refused(store: KVPacketVectorStore, wanted: Any):
    with pytest.raises(StoreError, match="the filter"):
        store.similarity_search(QUESTION, filter=wanted)
    with pytest.raises(StoreError, match="unknown argument filters"):
        store.similarity_search(QUESTION, filters=wanted)


def test_deleting_removes_text_and_packet_and_forgives_unknown_ids(store: KVPacketVectorStore):
    assert store.delete(["d1", "nobody"]) and store.get_by_ids(["d1"]) == []
    assert CHUNKS[1] not in texts_of(store.similarity_search(QUESTION, k=9))
    assert len(store) == len(store.engine.store) == 3
    assert store.delete([]) and len(store) == 3
    assert store.delete() and len(store) == len(store.engine.store) == 0
    assert store.similarity_search(QUESTION) == []


def test_a_packet_lives_as_long_as_one_of_its_texts(store: KVPacketVectorStore):
    store.add_texts([f"\n{CHUNKS[0]}  "], ids=["again"])
    assert len(store) == 5 and len(store.engine.store) == 4
    store.delete(["d0"])
    assert len(store.engine.store) == 4 and texts_of(store.get_by_ids(["again"])) == [f"\n{CHUNKS[0]}  "]
    store.delete(["again"])
    assert len(store.engine.store) == 3


def test_adding_under_a_known_id_replaces_text_and_packet(store: KVPacketVectorStore):
    new = "The lease of the harbour office was signed by Bo Lind, who took it over for two years and a month."
    for _ in range(2):
        assert store.add_documents([Document(id="d1", page_content=new, metadata={"row": 9})]) == ["d1"]
        assert len(store) == len(store.engine.store) == 4
    assert store.get_by_ids(["d1"]) == [Document(id="d1", page_content=new, metadata={"row": 9})]
    known = [chunk.text for chunk in store.engine.store.known(store.engine.signature)]
    assert new in known and CHUNKS[1] not in known


def test_new_metadata_alone_encodes_and_embeds_nothing(store: KVPacketVectorStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store.engine.backbone, "encode", lambda _: pytest.fail("encoded again"))
    embeddings = store.embeddings
    assert isinstance(embeddings, WordEmbeddings)
    embeddings.embedded.clear()
    store.add_texts(CHUNKS[:2], [{"row": 7}, {"row": 1}], ids=["d0", "d1"])
    assert store.get_by_ids(["d0"])[0].metadata == {"row": 7} and embeddings.embedded == []
    assert store.similarity_search(QUESTION, k=1)[0].id == "d1"


@pytest.mark.parametrize(
    ("texts", "metadatas", "error"),
    [
        ([CHUNKS[0], "New text that is fine."], [{}, {"when": datetime.date(2021, 3, 1)}], StoreError),
        (["New text that is fine.", " \n"], None, DocumentError),
        (["New text that is fine."], [{}, {}], StoreError),
    ],
)
def test_what_cannot_be_added_whole_leaves_nothing_behind(
    store: KVPacketVectorStore, texts: list[str], metadatas: list[dict[str, Any]] | None, error: type[KVPacketError]
):
    before = store.similarity_search(QUESTION, k=9)
    with pytest.raises(error):
        store.add_texts(texts, metadatas, ids=["d1", "new"][: len(texts)])
    assert store.similarity_search(QUESTION, k=9) == before
    assert len(store.engine.store) == 4


def test_indexes_over_one_engine_may_have_equal_ids(store: KVPacketVectorStore):
    other = KVPacketVectorStore.from_texts(CHUNKS[:2], WordEmbeddings(), ids=["d2", "d3"], engine=store.engine)
    other.add_texts([CHUNKS[2]], ids=["d3"])
    other.delete()
    assert len(store.engine.store) == len(store) == 4
    store.delete(["d0"])
    assert len(store.engine.store) == 3


def test_a_folder_ingested_from_files_opens_as_it_is(model_folder: str, tmp_path: Path):
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    embedder = LangChainEmbedder(WordEmbeddings())
    rag = KVPacketRAG.open(tmp_path / "library", model_folder, embedder=embedder, **options)
    rag.add([KVDocument(f"{i}.txt", text, {}) for i, text in enumerate(CHUNKS)])
    rag.close()
    store = KVPacketVectorStore.open(tmp_path / "library", WordEmbeddings(), **options)
    best = store.similarity_search(QUESTION, k=1)[0]
    assert best.page_content == CHUNKS[1] and best.id
    store.delete([best.id])
    assert len(store) == len(store.engine.store) == 3
    store.close()


def test_ids_are_made_up_where_none_are_given_and_the_last_of_equal_ids_counts(store: KVPacketVectorStore):
    first, second = store.add_texts(["One more text.", "And another text."], ids=[None, "named"])
    assert second == "named" and texts_of(store.get_by_ids([first])) == ["One more text."]
    assert store.add_texts(["Was here first.", "Came here last."], ids=["twice", "twice"]) == ["twice", "twice"]
    assert texts_of(store.get_by_ids(["twice"])) == ["Came here last."]
    assert "Was here first." not in [c.text for c in store.engine.store.known(store.engine.signature)]


def test_a_copy_is_over_the_same_rows_and_a_pickle_says_what_to_do(engine: KVPacketEngine):
    store = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)
    retriever = store.as_retriever(search_kwargs={"k": 1}).model_copy(deep=True)
    for twin in (copy.copy(store), copy.deepcopy(store), retriever.vectorstore):
        assert twin is not store and twin.index is store.index and twin.engine is engine
    store.delete(["d1"])
    assert retriever.invoke(QUESTION)[0].id != "d1"
    with pytest.raises(KVPacketError, match=r"open index over a loaded model and cannot be pickled; open it in each"):
        pickle.dumps(store)


def test_callers_may_change_what_they_get(store: KVPacketVectorStore):
    store.add_texts(["A text of its own."], [{"tags": ["a"]}], ids=["x"])
    store.get_by_ids(["x"])[0].metadata["tags"].append("b")
    assert store.get_by_ids(["x"])[0].metadata == {"tags": ["a"]}


async def test_asynchronous_calls_do_the_same(store: KVPacketVectorStore):
    assert await store.asimilarity_search(QUESTION, k=2) == store.similarity_search(QUESTION, k=2)
    assert await store.aadd_texts(["One more text."], ids=["x"]) == ["x"] and await store.adelete(["x"])
    assert await store.aget_by_ids(["x"]) == []


def test_an_empty_store_is_fine(engine: KVPacketEngine):
    store = KVPacketVectorStore.from_texts([], WordEmbeddings(), engine=engine)
    assert store.similarity_search(QUESTION) == store.max_marginal_relevance_search(QUESTION) == []
    assert store.add_documents([]) == []


def test_nothing_is_saved_into_the_cache_of_an_object_store(store: KVPacketVectorStore, tmp_path: Path):
    with closing(RemoteCache(tmp_path / "cache")) as cache:
        cache.tie("s3://bucket/packets")
    with pytest.raises(StoreError, match="lie in the object store at s3://bucket/packets"):
        store.save(tmp_path / "cache")


def test_a_saved_folder_opens_with_everything_and_encodes_nothing(
    backbone: Any, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = KVPacketEngine.load(model_folder, device="cpu", dtype="float32")
    first = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)
    first.save(tmp_path / "library")
    with pytest.raises(StoreError, match="holds 4 texts already"):
        first.save(tmp_path / "library")
    monkeypatch.setattr(type(backbone), "encode", lambda *_: pytest.fail("encoded again"))
    store = KVPacketVectorStore.open(tmp_path / "library", WordEmbeddings(), device="cpu")
    assert store.similarity_search_with_score(QUESTION) == first.similarity_search_with_score(QUESTION)
    assert store.add_documents(documents()) == ["d0", "d1", "d2", "d3"] and len(store.engine.store) == 4
    store.close()


def test_an_index_of_another_model_or_embeddings_is_refused(
    store: KVPacketVectorStore, soft_engine: KVPacketEngine, tmp_path: Path
):
    index = PacketIndex.open(tmp_path)
    KVPacketVectorStore(store.embeddings, store.engine, index).add_documents(documents())
    with pytest.raises(PacketMismatchError, match="adapter"):
        KVPacketVectorStore(store.embeddings, soft_engine, index)
    with pytest.raises(StoreError, match=r"built with the embedder 'WordEmbeddings', not 'Determ"):
        KVPacketVectorStore(DeterministicFakeEmbedding(size=8), store.engine, index)
    index.close()


def test_an_engine_and_a_folder_exclude_each_other(engine: KVPacketEngine, tmp_path: Path):
    with pytest.raises(StoreError, match="an engine was given together with a folder"):
        KVPacketVectorStore.from_texts(CHUNKS, WordEmbeddings(), engine=engine, folder=tmp_path)


@pytest.mark.parametrize("place", ["s3://bucket/texts", "file:///texts", Path("s3://bucket/texts")])
def test_a_url_in_place_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"is a URL and no path on a disk.*store='s3://bucket/packets'"):
        KVPacketVectorStore.open(place, WordEmbeddings())
    with pytest.raises(StoreError, match="is a URL and no path on a disk"):
        KVPacketVectorStore.from_texts(CHUNKS, WordEmbeddings(), store=Path("s3://bucket/texts"))
    assert not list(tmp_path.iterdir())


def test_the_projects_embedder_serves_as_embeddings(engine: KVPacketEngine):
    class Halves:
        name, dim = "halves", 2

        def embed_documents(self, texts: list[str]) -> Any:
            return np.array([[0.5, len(text)] for text in texts], np.float32)

        def embed_query(self, text: str) -> Any:
            return np.array([0.5, 1.0], np.float32)

    embeddings = KVPacketEmbeddings(embedder=Halves())  # type: ignore[arg-type]
    assert embeddings.embed_documents(["ab"]) == [[0.5, 2.0]] and embeddings.embed_query("?") == [0.5, 1.0]
    store = KVPacketVectorStore.from_texts(CHUNKS, embeddings, engine=engine)
    assert store.index.get_setting("embedder") == "halves"


def test_of_a_row_that_llama_index_wrote_users_see_their_own_metadata_alone(store: KVPacketVectorStore):
    theirs = {"_node_content": "{}", "_node_type": "TextNode", "document_id": "a", "doc_id": "a", "ref_doc_id": "a"}
    chunk = Chunk("n1", "A node's text that is about the ferry.", "a", {**theirs, "page": 3})
    store.index.add([chunk], [WordEmbeddings().embed_query(chunk.text)], store.engine.encode([chunk.text]))
    assert store.get_by_ids(["n1"])[0].metadata == {"page": 3}
    assert texts_of(store.similarity_search("ferry", filter={"page": 3})) == [chunk.text]
    store.add_texts(["A text of one's own."], [{"doc_id": "mine"}], ids=["own"])
    assert store.get_by_ids(["own"])[0].metadata == {"doc_id": "mine"}
