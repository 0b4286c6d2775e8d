"""LlamaIndex's nodes as chunks of the index and back, and metadata filters on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import FilterCondition, MetadataFilters, VectorStoreQuery
from llama_index.core.vector_stores.utils import build_metadata_filter_fn, metadata_dict_to_node, node_to_metadata_dict

from kvpacket_rag import Chunk


def to_chunk(node: BaseNode) -> Chunk:
    """A node as it is stored: its own text, which prompts hold word for word, and all the rest as metadata."""
    metadata = node_to_metadata_dict(node, remove_text=isinstance(node, TextNode))
    return Chunk(node.node_id, node.get_content(MetadataMode.NONE), node.ref_doc_id or "", metadata)


def to_node(chunk: Chunk) -> BaseNode:
    """The node that was stored, without its embedding; a plain text node for a chunk that was no node."""
    if "_node_content" not in chunk.metadata:
        source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.document_id)} if chunk.document_id else {}
        return TextNode(id_=chunk.chunk_id, text=chunk.text, metadata=dict(chunk.metadata), relationships=source)
    node = metadata_dict_to_node(dict(chunk.metadata))
    if isinstance(node, TextNode):
        node.text = chunk.text
    return node


def matches(chunk: Chunk, filters: MetadataFilters | None) -> bool:
    """Whether a chunk passes the filters; groups of filters may be nested."""
    documents = dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), chunk.document_id)
    return _passes({**documents, **chunk.metadata}, filters)


def _passes(metadata: Mapping[str, Any], filters: MetadataFilters | None) -> bool:
    if filters is None or not filters.filters:
        return True
    results = [
        _passes(metadata, each)
        if isinstance(each, MetadataFilters)
        else build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[each]))("")
        for each in filters.filters
    ]
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return any(results) if filters.condition == FilterCondition.OR else all(results)


def query_filter(query: VectorStoreQuery) -> Callable[[Chunk], bool] | None:
    """Which chunks a query allows; None for all. A retriever sends an empty list where it means no restriction."""
    nodes, documents, filters = set(query.node_ids or ()), set(query.doc_ids or ()), query.filters
    if not nodes and not documents and filters is None:
        return None

    def allowed(chunk: Chunk) -> bool:
        fits = (not nodes or chunk.chunk_id in nodes) and (not documents or chunk.document_id in documents)
        return fits and matches(chunk, filters)

    return allowed
