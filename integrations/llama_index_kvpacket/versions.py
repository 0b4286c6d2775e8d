"""Which rows of a stored index the nodes of a document take the place of.

LlamaIndex knows what it has of a document by its docstore, and an index made by ``VectorStoreIndex.from_vector_store``
begins with an empty one: it takes every document for new and adds its nodes, under new ids, beside the old ones. But
each node tells, in its relation to its source, the hash of the document that it was cut from; and LlamaIndex tells, in
the trace of what it is doing, when it refreshes or updates documents, each of which then comes whole. The list of
that trace is one object for as long as one document is stored, in however many batches and threads.
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

_REFRESHES = frozenset({"refresh_ref_docs", "arefresh_ref_docs", "update_ref_doc", "aupdate_ref_doc"})


class StoredVersions:
    """Tells old rows of a document from those that belong beside its new nodes.

    When a document is refreshed, rows that were there when its first nodes came go if they are of another version of
    it, or of the same one and were cut from its text, at whatever places. Else nodes only add, for several documents of
    one id may be added one after another; but a row that was there when the document first came to this object goes if
    it is the very piece that comes again. Nodes that do not tell their document's hash take no other's place.

    Neither threads nor processes may change the index between :meth:`replaced_by` and :meth:`forget`.

    Args:
        index: of rows.
    """

    def __init__(self, index: PacketIndex) -> None:
        self._index = index
        self._before: dict[str, dict[str, _Piece]] = {}  # by document and row
        self._traces: dict[str, list[str]] = {}  # of a document, when those rows were looked up

    def replaced_by(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Ids of the rows that are to go when these nodes come."""
        coming: dict[str, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        for node in nodes:
            if piece := _piece_of(node):
                coming[document_of(node)][piece.version].add(piece.digest)
        trace: list[str] = global_stack_trace_ids.get()
        is_refresh = not _REFRESHES.isdisjoint(trace)
        gone = []
        for document, versions in coming.items():
            if document not in self._before or (is_refresh and self._traces[document] is not trace):
                self._before[document], self._traces[document] = self._rows(document), trace
            for name, row in self._before[document].items():
                comes_again = row.digest in versions.get(row.version, ())
                is_old = row.version not in versions or row.has_place
                if comes_again or (is_refresh and is_old):
                    gone.append(name)
        ids = {node.node_id for node in nodes}
        return [name for name in gone if name not in ids]

    def forget(self, nodes: Sequence[BaseNode], gone: Sequence[str]) -> None:
        """Now that the nodes are stored and those rows are gone, neither is one from before."""
        ids = [*gone, *(node.node_id for node in nodes)]
        for rows in [self._before.get(document, {}) for document in {document_of(node) for node in nodes}]:
            for name in rows.keys() & ids:
                del rows[name]

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
