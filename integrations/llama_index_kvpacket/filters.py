"""Which chunks of the index a query of LlamaIndex allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from kvpacket_rag import Chunk, StoreError

_OF_LISTS = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL)
_OF_ORDER = (FilterOperator.GT, FilterOperator.GTE, FilterOperator.LT, FilterOperator.LTE)
_OF_TEXTS = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)
_KINDS: dict[FilterOperator, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_OF_LISTS, ((list,), "a list of values")),
    **dict.fromkeys(_OF_ORDER, ((int, float, str), "a number or a text")),
    **dict.fromkeys(_OF_TEXTS, ((str,), "a text")),
}


def require_query(query: VectorStoreQuery) -> list[float]:
    """The embedding of a query that can be answered.

    Raises:
        StoreError: another mode than ``default`` and ``mmr``, no embedding, or fewer than one node.
    """
    if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
        raise StoreError(f"query mode {query.mode.value!r} is not offered; use 'default' or 'mmr'")
    if query.query_embedding is None:
        raise StoreError("the query has no embedding; query through a retriever, or set query_embedding")
    if query.similarity_top_k < 1:
        raise StoreError(f"similarity_top_k is {query.similarity_top_k}; ask for at least one node")
    return query.query_embedding


def query_filter(query: VectorStoreQuery) -> Callable[[Chunk], bool] | None:
    """Which chunks a query allows; None for all. A retriever sends an empty list where it means no restriction.

    Raises:
        StoreError: as :func:`metadata_filter`.
    """
    nodes, documents = set(query.node_ids or ()), set(query.doc_ids or ())
    if not nodes and not documents and query.filters is None:
        return None
    matches = metadata_filter(query.filters)

    def allowed(chunk: Chunk) -> bool:
        fits = (not nodes or chunk.chunk_id in nodes) and (not documents or chunk.document_id in documents)
        return fits and matches(chunk)

    return allowed


def metadata_filter(filters: MetadataFilters | None) -> Callable[[Chunk], bool]:
    """Whether a chunk passes the filters; groups of filters may be nested.

    Metadata that cannot be compared with a filter's value, such as a text with a number, does not match, as in Qdrant:
    one odd node is no reason to answer nothing.

    Raises:
        StoreError: a filter's own value does not go with its operator.
    """
    _require_values(filters)

    def matches(chunk: Chunk) -> bool:
        documents = dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), chunk.document_id)
        return _passes({**documents, **chunk.metadata}, filters)

    return matches


def _require_values(filters: MetadataFilters | None) -> None:
    for each in filters.filters if filters else ():
        if isinstance(each, MetadataFilters):
            _require_values(each)
            continue
        kinds, expected = _KINDS.get(each.operator, ((object,), ""))
        if not isinstance(each.value, kinds):
            found = f"the filter on {each.key!r} by {each.operator.value!r} has the value {each.value!r}"
            raise StoreError(f"{found}, expected {expected}")


def _passes(metadata: Mapping[str, Any], filters: MetadataFilters | None) -> bool:
    if filters is None or not filters.filters:
        return True
    results = [
        _passes(metadata, each) if isinstance(each, MetadataFilters) else _fits(metadata, each)
        for each in filters.filters
    ]
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return any(results) if filters.condition == FilterCondition.OR else all(results)


def _fits(metadata: Mapping[str, Any], wanted: MetadataFilter) -> bool:
    try:
        return build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[wanted]))("")
    except TypeError:  # of two values that cannot be compared
        return False
