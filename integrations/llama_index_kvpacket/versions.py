"""Which rows of a stored index the nodes of a document take the place of.

LlamaIndex knows what it has of a document by its docstore, and an index made by ``VectorStoreIndex.from_vector_store``
begins with an empty one: it takes every document for new and adds its nodes, under new ids, beside the old ones. But
each node tells, in its relation to its source, the hash of the document that it was cut from; and LlamaIndex tells, in
the trace of what it is doing, when it refreshes documents, each of which then comes whole.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from llama_index.core.callbacks.base import global_stack_trace_ids
from llama_index.core.schema import BaseNode, Document, MetadataMode, TextNode

from kvpacket_rag import PacketIndex
from llama_index_kvpacket.nodes import document_of, to_node

_REFRESHES = frozenset({"refresh_ref_docs", "arefresh_ref_docs"})


class StoredVersions:
    """Tells old rows of a document from those that belong beside its new nodes.

    Rows that were there before a document first came to this object go if they are of another version of it, or are
    the very pieces that come again. So a document may be added in many batches, and further nodes of it at any time.
    What was added here goes for the same reasons when the document is refreshed; else it stays LlamaIndex's to
    delete, for several documents of one id may be added one after another. When a document is refreshed, rows from
    before that were cut from it go also if it is cut at other places now. Nodes that do not tell their document's hash
    take no other's place. Not safe for threads.

    Args:
        index: of rows.
    """

    def __init__(self, index: PacketIndex) -> None:
        self._index = index
        self._before: dict[str, dict[str, _Piece]] = {}  # by document and row

    def replaced_by(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Ids of the rows that are to go when these nodes come."""
        coming: dict[str, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        for node in nodes:
            if piece := _piece_of(node):
                coming[document_of(node)][piece.version].add(piece.digest)
        is_refresh = not _REFRESHES.isdisjoint(global_stack_trace_ids.get())
        gone = []
        for document, versions in coming.items():
            before = self._rows_before(document)
            for name, row in (self._rows(document) if is_refresh else before).items():
                comes_again = row.digest in versions.get(row.version, ())
                is_cut_anew = is_refresh and row.has_place and name in before
                if row.version not in versions or comes_again or is_cut_anew:
                    gone.append(name)
        ids = {node.node_id for node in nodes}
        return [name for name in gone if name not in ids]

    def forget(self, nodes: Sequence[BaseNode], gone: Sequence[str]) -> None:
        """Now that the nodes are stored and those rows are gone, neither is one from before."""
        ids = [*gone, *(node.node_id for node in nodes)]
        for rows in [self._before.get(document, {}) for document in {document_of(node) for node in nodes}]:
            for name in rows.keys() & ids:
                del rows[name]

    def _rows_before(self, document: str) -> dict[str, _Piece]:
        if document not in self._before:
            self._before[document] = self._rows(document)
        return self._before[document]

    def _rows(self, document: str) -> dict[str, _Piece]:
        rows = map(to_node, self._index.get(self._index.chunk_ids(document)))
        return {row.node_id: piece for row in rows if (piece := _piece_of(row))}


@dataclass(frozen=True, slots=True)
class _Piece:
    """What makes a node the same piece of the same version of a document, whatever its id.

    Attributes:
        version: hash of the document.
        digest: of the node's text and its place in the document.
        has_place: whether that place is known, as it is of what a node parser cut.
    """

    version: str
    digest: bytes
    has_place: bool


def _piece_of(node: BaseNode) -> _Piece | None:
    """None for a node that does not tell its document's hash.

    Metadata counts only where a place is not known: a model may write them, and other ones each time. The kinds of
    relations tell a node from its parent of the same text.
    """
    source = node.source_node
    version = source.hash if source is not None else node.hash if isinstance(node, Document) else None
    if not version:
        return None
    place = (node.start_char_idx, node.end_char_idx) if isinstance(node, TextNode) else (None, None)
    rest = node.metadata if None in place else place
    kinds = sorted(kind.name for kind in node.relationships)
    piece = json.dumps([node.get_content(MetadataMode.NONE), kinds, rest], sort_keys=True, default=str)
    return _Piece(version, hashlib.sha256(piece.encode("utf-8", "surrogatepass")).digest(), None not in place)
