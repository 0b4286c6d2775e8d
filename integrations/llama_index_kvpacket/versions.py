"""Which rows of a stored index the nodes of a document take the place of.

LlamaIndex knows what it has of a document by its docstore, and an index made by ``VectorStoreIndex.from_vector_store``
begins with an empty one: it takes every document for new and adds its nodes, under new ids, beside the old ones. But
each node tells, in its relation to its source, the hash of the document that it was cut from.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence

from llama_index.core.schema import BaseNode, Document, MetadataMode, TextNode

from kvpacket_rag import PacketIndex
from llama_index_kvpacket.nodes import document_of, to_node


class StoredVersions:
    """Tells old rows of a document from those that belong beside its new nodes.

    Rows that were there before a document first came to this object go if they are of another version of it, or are
    the very pieces that come again. So a document may be added in many batches, and further nodes of it at any time;
    what was added here stays LlamaIndex's to delete. Nodes that do not tell their document's hash take no other's
    place. Not safe for threads.

    Args:
        index: of rows.
    """

    def __init__(self, index: PacketIndex) -> None:
        self._index = index
        self._before: dict[str, dict[str, tuple[str, bytes]]] = {}  # document: row: its version and piece

    def replaced_by(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Ids of the rows that are to go when these nodes come."""
        coming: dict[str, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        for node in nodes:
            if version := _version_of(node):
                coming[document_of(node)][version].add(_piece_of(node))
        gone = [
            name
            for document, versions in coming.items()
            for name, (version, piece) in self._rows_before(document).items()
            if version not in versions or piece in versions[version]
        ]
        ids = {node.node_id for node in nodes}
        return [name for name in gone if name not in ids]

    def forget(self, nodes: Sequence[BaseNode], gone: Sequence[str]) -> None:
        """Now that the nodes are stored and those rows are gone, neither is one from before."""
        ids = [*gone, *(node.node_id for node in nodes)]
        for rows in [self._before.get(document, {}) for document in {document_of(node) for node in nodes}]:
            for name in rows.keys() & ids:
                del rows[name]

    def _rows_before(self, document: str) -> dict[str, tuple[str, bytes]]:
        if document not in self._before:
            rows = map(to_node, self._index.get(self._index.chunk_ids(document)))
            self._before[document] = {
                row.node_id: (version, _piece_of(row)) for row in rows if (version := _version_of(row))
            }
        return self._before[document]


def _version_of(node: BaseNode) -> str | None:
    """Hash of the document that a node was cut from; None if it does not tell."""
    source = node.source_node
    if source is None and isinstance(node, Document):
        return node.hash
    return source.hash if source is not None else None


def _piece_of(node: BaseNode) -> bytes:
    """What makes a node the same piece of the same version, whatever its id: its text and its place in the document.

    Metadata counts only where a place is not known: a model may write them, and other ones each time. The kinds of
    relations tell a node from its parent of the same text.
    """
    place = (node.start_char_idx, node.end_char_idx) if isinstance(node, TextNode) else (None, None)
    rest = node.metadata if None in place else place
    kinds = sorted(kind.name for kind in node.relationships)
    piece = json.dumps([node.get_content(MetadataMode.NONE), kinds, rest], sort_keys=True, default=str)
    return hashlib.sha256(piece.encode("utf-8", "surrogatepass")).digest()
