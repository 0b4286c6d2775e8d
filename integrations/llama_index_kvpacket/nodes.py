"""LlamaIndex's nodes as chunks of the index and back, and metadata filters on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.schema import (
    BaseNode,
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
from llama_index.core.vector_stores.types import FilterCondition, MetadataFilters, VectorStoreQuery
from llama_index.core.vector_stores.utils import build_metadata_filter_fn, node_to_metadata_dict

from kvpacket_rag import Chunk, DocumentError
from kvpacket_rag.ingest import MARK

# LlamaIndex's own function for this reads documents as text nodes.
_KINDS: dict[str, type[BaseNode]] = {
    kind.class_name(): kind for kind in (Document, ImageDocument, ImageNode, IndexNode, Node, TextNode)
}


def require_nodes(nodes: Sequence[BaseNode]) -> Sequence[BaseNode]:
    """Refuse what is no node, such as a retriever's hits.

    Raises:
        DocumentError: naming its type.
    """
    if wrong := [node for node in nodes if not isinstance(node, BaseNode)]:
        raise DocumentError(f"nodes holds a {type(wrong[0]).__name__}; pass a list of nodes, such as TextNode")
    return nodes


def to_chunk(node: BaseNode) -> Chunk:
    """A node as it is stored: its own text, which prompts hold word for word, and all the rest as metadata."""
    metadata = node_to_metadata_dict(node, remove_text=isinstance(node, TextNode))
    return Chunk(node.node_id, node.get_content(MetadataMode.NONE), document_of(node), metadata)


def to_node(chunk: Chunk) -> BaseNode:
    """The node that was stored, without its embedding; a plain text node for a chunk that was no node."""
    if "_node_content" not in chunk.metadata:
        return _plain_node(chunk)
    kind = _KINDS.get(chunk.metadata.get("_node_type", ""), TextNode)
    node = kind.from_json(chunk.metadata["_node_content"])
    if isinstance(node, TextNode):
        node.text = chunk.text
    return node


def _plain_node(chunk: Chunk) -> TextNode:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.document_id)} if chunk.document_id else {}
    return TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata=dict(chunk.metadata),
        relationships=source,
        excluded_embed_metadata_keys=[MARK],
        excluded_llm_metadata_keys=[MARK],
    )


def document_of(node: BaseNode) -> str:
    """The id by which LlamaIndex deletes a node with its document; a document that was not cut is its own."""
    return node.ref_doc_id or (node.node_id if isinstance(node, Document) else "")


def packet_text(text: str, metadata: Mapping[str, Any], key: str | None) -> str:
    """The text that prompts hold of a node, so that its packet must be made of: that under a metadata key, if there."""
    other = metadata.get(key) if key else None
    return other if isinstance(other, str) and other.strip() else text


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
