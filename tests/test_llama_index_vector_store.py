from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.schema import (
    Document,
    ImageDocument,
    ImageNode,
    IndexNode,
    MetadataMode,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index_kvpacket import KVPacketVectorStore
from llama_index_samples import embed, node, nodes

from kvpacket_rag import (
    DocumentError,
    GenerationSettings,
    KVPacketEngine,
    KVPacketError,
    StoreError,
    StoreFullError,
)


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    return KVPacketVectorStore(engine)


def ask(store: KVPacketVectorStore, text: str, k: int = 2, mode: str = "default", **query: Any) -> list[str]:
    asked = VectorStoreQuery(embed(text), similarity_top_k=k, mode=VectorStoreQueryMode(mode), **query)
    return list(store.query(asked).ids or [])


def only(**filters: Any) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value) for key, value in filters.items()])


def known(engine: KVPacketEngine) -> list[str]:
    return sorted(chunk.text for chunk in engine.store.known(engine.signature))


@pytest.fixture
def encoded(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packets that were computed."""
    names: list[str] = []
    encode = engine.encoder.encode
    monkeypatch.setattr(engine.encoder, "encode", lambda todo, *_: names.extend(n for n, _ in todo) or encode(todo))
    return names


def test_added_nodes_have_packets_and_are_found_by_cosine(store: KVPacketVectorStore, engine: KVPacketEngine):
    assert store.add(nodes()) == ["n0", "n1", "n2", "n3"]
    found = store.query(VectorStoreQuery(embed(CHUNKS[1]), similarity_top_k=9))
    assert found.ids[0] == "n1" and found.similarities[0] == pytest.approx(1)
    assert found.similarities == sorted(found.similarities, reverse=True) and len(found.nodes) == 4
    assert known(engine) == sorted(CHUNKS)


WHOLE = {
    TextNode: {"text": " a b c d e \n"}, IndexNode: {"text": " a b c d e \n", "index_id": "far"},
    ImageNode: {"text": " a b c d e \n", "image": "aGk="}, Node: {"text_resource": {"text": " a b c d e \n"}},
    Document: {"text": " a b c d e \n"}, ImageDocument: {"text": " a b c d e \n", "image": "aGk="},
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_a_node_comes_back_whole(store: KVPacketVectorStore, kind: type):
    other = RelatedNodeInfo(node_id="before", metadata={"deep": [1]})
    relations = {
        NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc"), NodeRelationship.PREVIOUS: other,
        NodeRelationship.CHILD: [other],
    }  # fmt: skip
    whole = kind(
        id_="n", embedding=[1.0, 2.0], metadata={"a": {"b": [1, None]}, "ü": "ö"}, relationships=relations,
        excluded_llm_metadata_keys=["a"], **WHOLE[kind],
    )  # fmt: skip
    store.add([whole])
    (back,) = store.get_nodes(["n"])
    assert type(back) is kind and back.model_dump() == {**whole.model_dump(), "embedding": None}


def test_a_document_that_was_not_cut_is_deleted_by_its_own_id(store: KVPacketVectorStore, engine: KVPacketEngine):
    store.add([Document(id_="whole", text=CHUNKS[0], embedding=embed(CHUNKS[0])), *nodes(CHUNKS[1:2])])
    store.delete("whole")
    assert known(engine) == [CHUNKS[1]] and ask(store, CHUNKS[0], 9) == ["n0"]


def test_edges_and_scripts_of_a_text_do_not_keep_its_packet_from_being_used(
    store: KVPacketVectorStore, engine: KVPacketEngine
):
    texts = [
        f"\n \u00a0{CHUNKS[0]} \u3000\n",
        f"«{CHUNKS[1]}» 東京都 👩\u200d👩\u200d👧",
        f"{{x}}\t{CHUNKS[2]}\r\n\r\n{{{{ y }}}}",
    ]
    store.add(nodes(texts))
    prompt = "\n\n".join(node.get_content(MetadataMode.LLM).strip() for node in store.get_nodes())
    usage = engine.generate(f"{prompt}\n\nWho?", GenerationSettings(max_new_tokens=1)).usage
    assert usage.chunks_reused == 3 and not usage.misses


def test_packets_are_made_of_the_text_that_prompts_will_hold(store: KVPacketVectorStore, engine: KVPacketEngine):
    windows = KVPacketVectorStore(engine, packet_text_key="window")
    windows.add([node("a", "A short one.", window=CHUNKS[0]), node("b", CHUNKS[1]), node("c", CHUNKS[2], window=" ")])
    assert known(engine) == sorted(CHUNKS[:3]) and windows.get_nodes(["a"])[0].text == "A short one."
    windows.add([node("a", "A short one.", window=CHUNKS[3])])
    assert known(engine) == sorted(CHUNKS[1:])
    windows.delete_nodes(["a"])
    assert known(engine) == sorted(CHUNKS[1:3])


def test_one_text_under_two_nodes_is_one_packet_that_lives_as_long_as_either(
    store: KVPacketVectorStore, engine: KVPacketEngine
):
    store.add([node("a", CHUNKS[0]), node("b", f"\n{CHUNKS[0]} ")])
    assert len(engine.store) == 1
    store.delete_nodes(["a"])
    assert len(engine.store) == 1 and store.get_nodes(["a"]) == []
    store.delete_nodes(["b"])
    assert len(engine.store) == 0 == len(store.client)


def test_deleting_a_document_deletes_its_nodes_and_packets_at_once(store: KVPacketVectorStore, engine: KVPacketEngine):
    store.add([*nodes(CHUNKS[:2], "one"), node("m", CHUNKS[2], "two")])
    store.delete("one")
    assert known(engine) == [CHUNKS[2]] and ask(store, CHUNKS[0], 9) == ["m"]
    store.delete("nobody")
    store.clear()
    assert known(engine) == [] == ask(store, CHUNKS[0], 9)


def test_new_metadata_alone_encodes_nothing_and_new_text_replaces_the_packet(
    store: KVPacketVectorStore, engine: KVPacketEngine, encoded: list[str]
):
    store.add([node("a", CHUNKS[0], page=1)])
    store.add([node("a", CHUNKS[0], page=2)])
    assert len(encoded) == 1 and store.get_nodes(["a"])[0].metadata == {"page": 2}
    store.add([node("a", CHUNKS[1], page=2)])
    assert len(encoded) == 2 and known(engine) == [CHUNKS[1]] and len(store.client) == 1


def test_a_document_deleted_and_added_anew_encodes_only_what_changed(
    store: KVPacketVectorStore, engine: KVPacketEngine, encoded: list[str]
):
    store.add(nodes(CHUNKS[:3]))
    store.delete("doc")
    assert len(engine.store) == 0
    store.add([node("x", CHUNKS[0], "doc"), node("y", CHUNKS[3], "doc")])
    assert len(encoded) == 4 and known(engine) == sorted([CHUNKS[0], CHUNKS[3]])
    store.delete("doc")
    store.add([node("z", CHUNKS[2], "doc")])
    assert len(encoded) == 5  # what was not wanted again at once is forgotten


def test_nodes_without_text_are_left_out_and_named(store: KVPacketVectorStore, caplog: pytest.LogCaptureFixture):
    picture = ImageNode(id_="p", image="aGk=", embedding=embed("picture"))
    assert store.add([node("blank", " \n", "empty.txt"), picture, node("a", CHUNKS[0])]) == ["blank", "p", "a"]
    assert "node blank of document 'empty.txt' holds no text" in caplog.text
    assert [n.node_id for n in store.get_nodes()] == ["a"]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (TextNode(id_="b", text="x"), DocumentError, "'b' has no embedding"),
        (TextNode(id_="b", text="x", embedding=[1.0, 2.0]), StoreError, "2 dimensions, the index has 64"),
        (TextNode(id_="b", text="word " * 3000, embedding=embed("x")), DocumentError, "cut it into smaller chunks"),
        (TextNode(id_="b", text=CHUNKS[2], embedding=[0.0] * 64), StoreError, "b"),
    ],
)
def test_a_bad_node_is_named_and_nothing_of_its_batch_is_stored(
    store: KVPacketVectorStore, engine: KVPacketEngine, bad: TextNode, error: type, message: str
):
    store.add([node("a", CHUNKS[0])])
    with pytest.raises(error, match=message):
        store.add([node("a", CHUNKS[0]), node("c", CHUNKS[1]), bad])
    assert known(engine) == [CHUNKS[0]] and ask(store, CHUNKS[0], 9) == ["a"]


def test_a_full_store_leaves_no_node_without_its_row(
    store: KVPacketVectorStore, engine: KVPacketEngine, monkeypatch: Any
):
    def full(*_: Any) -> None:
        raise StoreFullError("no room")

    store.add([node("a", CHUNKS[0])])
    monkeypatch.setattr(engine.store, "put", full)
    with pytest.raises(StoreFullError):
        store.add([node("b", CHUNKS[1])])
    assert known(engine) == [CHUNKS[0]] and len(store.client) == 1


OPERATORS = [
    ("n", FilterOperator.EQ, 1, "b"), ("n", FilterOperator.NE, 1, "acd"), ("n", FilterOperator.GT, 1, "c"),
    ("n", FilterOperator.GTE, 1, "bc"), ("n", FilterOperator.LT, 1, "a"), ("n", FilterOperator.LTE, 1, "ab"),
    ("n", FilterOperator.IN, [0, 2], "ac"), ("n", FilterOperator.NIN, [0, 2], "bd"),
    ("tags", FilterOperator.CONTAINS, "x", "ab"), ("tags", FilterOperator.ANY, ["x", "z"], "abc"),
    ("tags", FilterOperator.ALL, ["x", "y"], "b"), ("name", FilterOperator.TEXT_MATCH, "Al", "a"),
    ("name", FilterOperator.TEXT_MATCH_INSENSITIVE, "al", "ac"), ("n", FilterOperator.IS_EMPTY, None, "d"),
    ("doc_id", FilterOperator.EQ, "two", "cd"),
]  # fmt: skip


@pytest.fixture
def tagged(store: KVPacketVectorStore) -> KVPacketVectorStore:
    store.add([
        node("a", CHUNKS[0], "one", n=0, tags=["x"], name="Alba"), node("b", CHUNKS[1], "one", n=1, tags=["x", "y"]),
        node("c", CHUNKS[2], "two", n=2, tags=["z"], name="alto"), node("d", CHUNKS[3], "two"),
    ])  # fmt: skip
    return store


@pytest.mark.parametrize(("key", "operator", "value", "expected"), OPERATORS)
def test_every_filter_operator_holds(
    tagged: KVPacketVectorStore, key: str, operator: FilterOperator, value: Any, expected: str
):
    filters = MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])
    assert sorted(ask(tagged, "x", 9, filters=filters)) == [*expected]
    assert sorted(n.node_id for n in tagged.get_nodes(filters=filters)) == [*expected]


@pytest.mark.parametrize(("condition", "expected"), [("and", ""), ("or", "ac"), ("not", "bd")])
def test_filters_are_joined_and_nested(tagged: KVPacketVectorStore, condition: str, expected: str):
    filters = MetadataFilters(filters=[only(n=0), only(n=2)], condition=FilterCondition(condition))
    assert sorted(ask(tagged, "x", 9, filters=filters)) == [*expected]
    assert sorted(ask(tagged, "x", 9, filters=MetadataFilters(filters=[]))) == [*"abcd"]


def test_ids_restrict_a_query_and_empty_lists_do_not(tagged: KVPacketVectorStore):
    assert sorted(ask(tagged, "x", 9, node_ids=["a", "d"], doc_ids=["two"])) == ["d"]
    assert sorted(ask(tagged, "x", 9, node_ids=[], doc_ids=[])) == [*"abcd"]
    assert ask(tagged, CHUNKS[2], 1, doc_ids=["one"]) != ["c"] == ask(tagged, CHUNKS[2], 1)


def test_nodes_are_deleted_by_ids_and_filters_together(tagged: KVPacketVectorStore):
    tagged.delete_nodes(["a", "b"], filters=only(n=1))
    tagged.delete_nodes(filters=only(n=2))
    tagged.delete_nodes([])
    assert sorted(n.node_id for n in tagged.get_nodes()) == ["a", "d"]
    with pytest.raises(StoreError, match="clear"):
        tagged.delete_nodes()


def test_mmr_prefers_a_node_that_differs(store: KVPacketVectorStore):
    store.add([node("a", "red red apple"), node("twin", "red red apple pie"), node("far", "red boat")])
    assert ask(store, "red apple") == ["a", "twin"]
    assert ask(store, "red apple", mode="mmr", mmr_threshold=0.3) == ["a", "far"]
    assert ask(store, "red apple", mode="mmr", mmr_threshold=1.0) == ["a", "twin"]


def test_what_cannot_be_searched_is_refused(store: KVPacketVectorStore):
    with pytest.raises(StoreError, match="use 'default' or 'mmr'"):
        ask(store, "x", mode="hybrid")
    with pytest.raises(StoreError, match="no embedding"):
        store.query(VectorStoreQuery(query_str="x"))
    assert ask(store, "x") == []


async def test_async_methods_do_the_same(store: KVPacketVectorStore):
    await asyncio.gather(*(store.async_add([each]) for each in nodes()))
    found = await store.aquery(VectorStoreQuery(embed(CHUNKS[2]), similarity_top_k=1))
    assert found.ids == ["n2"] and len(await store.aget_nodes()) == 4
    await store.adelete_nodes(["n0"])
    assert len(store.client) == 3
    await store.adelete("doc")
    assert len(store.client) == 0
    await store.aclear()


def test_a_store_is_copied_by_reference_and_not_pickled(store: KVPacketVectorStore):
    store.add(nodes())
    twin = copy.deepcopy(store)
    assert twin.client is store.client and twin.engine is store.engine
    assert store.to_dict() == {
        "stores_text": True, "is_embedding_query": True, "path": None, "kind": "flat",
        "packet_text_key": "", "class_name": "KVPacketVectorStore",
    }  # fmt: skip
    with pytest.raises(KVPacketError, match="open it in each process"):
        pickle.dumps(store)
