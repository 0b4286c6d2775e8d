"""LlamaIndex's nodes as chunks of the index and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from llama_index.core.vector_stores.utils import node_to_metadata_dict

from kvpacket_rag import Chunk, DocumentError, StoreError
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
    """A node as it is stored: its own text, which prompts hold word for word, and all the rest as metadata.

    Raises:
        StoreError: naming metadata that would come back as something else, such as a date as a text.
    """
    for key, value in node.metadata.items():
        if not _is_kept(value):
            raise StoreError(
                f"node {node.node_id!r}: metadata {key!r} holds {value!r:.60}, which JSON would change or lose; use "
                "str, finite numbers, bool, None, and lists or dicts of these with str keys; of a date, its isoformat()"
            )
    metadata = node_to_metadata_dict(node, remove_text=isinstance(node, TextNode))
    return Chunk(node.node_id, node.get_content(MetadataMode.NONE), document_of(node), metadata)


def _is_kept(value: Any) -> bool:
    """Whether JSON gives a value back; a tuple as a list."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_kept, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_kept(item) for key, item in value.items())
    return value is None or isinstance(value, str | int)


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
