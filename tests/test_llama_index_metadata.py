"""Metadata of nodes: what is kept comes back as it was, and filters say what is wrong with them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index_kvpacket import KVPacketVectorStore
from llama_index_samples import embed, no_stray_loop, node  # noqa: F401

from kvpacket_rag import KVPacketEngine, StoreError


@pytest.fixture
def store(engine: KVPacketEngine) -> KVPacketVectorStore:
    made = KVPacketVectorStore(engine)
    values: list[Any] = [3, "three", None, [3]]
    made.add([node(f"n{number}", text, "doc", n=values[number]) for number, text in enumerate(CHUNKS)])
    return made


def found(store: KVPacketVectorStore, operator: FilterOperator, value: Any) -> set[str]:
    filters = MetadataFilters(filters=[MetadataFilter(key="n", value=value, operator=operator)])
    query = VectorStoreQuery(query_embedding=embed("x"), similarity_top_k=9, filters=filters)
    names = set(store.query(query).ids or ())
    assert names == {each.node_id for each in store.get_nodes(filters=filters)}
    return names


@pytest.mark.parametrize(
    ("operator", "value", "expected"),
    [
        (FilterOperator.GT, 2, {"n0"}),
        (FilterOperator.LTE, "z", {"n1"}),
        (FilterOperator.CONTAINS, "three", {"n1"}),
        (FilterOperator.CONTAINS, 3, {"n3"}),
        (FilterOperator.ANY, [3], {"n3"}),
        (FilterOperator.TEXT_MATCH, "thr", {"n1"}),
    ],
)
def test_metadata_of_another_type_does_not_match(
    store: KVPacketVectorStore, operator: FilterOperator, value: Any, expected: set[str]
):
    assert found(store, operator, value) == expected


@pytest.mark.parametrize(
    ("operator", "value", "message"),
    [
        (FilterOperator.IN, 3, "filter on 'n' by 'in' has the value 3, expected a list of values"),
        (FilterOperator.NIN, "three", "by 'nin' has the value 'three', expected a list of values"),
        (FilterOperator.ANY, "three", "expected a list"),
        (FilterOperator.GT, [3], "by '>' has the value .*3.*, expected a number or a text"),
        (FilterOperator.TEXT_MATCH, 3, "by 'text_match' has the value 3, expected a text"),
    ],
)
def test_a_filter_whose_own_value_is_of_another_type_is_refused(
    store: KVPacketVectorStore, operator: FilterOperator, value: Any, message: str
):
    with pytest.raises(StoreError, match=message):
        found(store, operator, value)
    with pytest.raises(StoreError, match=message):
        filters = MetadataFilters(filters=[MetadataFilter(key="n", value=value, operator=operator)])
        store.delete_nodes(filters=MetadataFilters(filters=[filters]))
    assert len(store.get_nodes()) == 4


@pytest.mark.parametrize("k", [0, -1])
@pytest.mark.parametrize("mode", ["default", "mmr"])
def test_fewer_than_one_node_is_refused_by_the_number_that_was_given(store: KVPacketVectorStore, k: int, mode: Any):
    with pytest.raises(StoreError, match=f"similarity_top_k is {k}; ask for at least one"):
        store.query(VectorStoreQuery(query_embedding=embed("x"), similarity_top_k=k, mode=mode))


@pytest.mark.parametrize(
    "value",
    [float("inf"), float("nan"), {1, 2}, datetime.date(2021, 3, 1), b"bytes", [{"deep": {3}}], {1: "one"}],
    ids=repr,
)
def test_metadata_that_would_change_is_refused_by_name(store: KVPacketVectorStore, value: Any):
    with pytest.raises(StoreError, match=r"node 'new': metadata 'odd' holds .*which JSON would change or lose"):
        store.add([node("fine", CHUNKS[0]), node("new", CHUNKS[1], odd=value)])
    assert len(store.get_nodes()) == 4


def test_metadata_comes_back_as_it_was(store: KVPacketVectorStore):
    metadata: dict[str, Any] = {"a": 1.5, "b": True, "c": None, "d": [1, {"e": "f"}], "g": 2**70, "h": "é\0"}
    store.add([node("new", CHUNKS[1], **metadata)])
    assert store.get_nodes(["new"])[0].metadata == metadata
