"""Packets beside any vector store: what can have one, and who owns it."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote
from weakref import WeakKeyDictionary

from llama_index.core.schema import BaseNode, MetadataMode

from kvpacket_rag import DocumentError, KVPacketEngine
from llama_index_kvpacket.nodes import document_of, packet_text
from llama_index_kvpacket.parameters import require_engine, require_names

logger = logging.getLogger(__name__)

DEFAULT_OWNER = "llama_index"


@dataclass(frozen=True, slots=True)
class Encodable:
    """A node whose text can be a packet.

    Attributes:
        node: with the text.
        text: that prompts hold of it.
        packet_id: what the packet is called, whether it is there or not.
        owner: who keeps it: the node's document in its collection.
    """

    node: BaseNode
    text: str
    packet_id: str
    owner: str


def encodable(engine: KVPacketEngine, nodes: Iterable[BaseNode], owner: str, text_key: str) -> list[Encodable]:
    """The nodes that can have a packet; those without text are left out, those longer than the window are told of."""
    found = []
    for node in nodes:
        text = packet_text(node.get_content(MetadataMode.NONE), node.metadata, text_key)
        if not text.strip():
            continue
        try:
            packet_id, _ = engine.encoder.identify(text)
        except DocumentError as error:
            logger.warning("node %s gets no packet: %s", node.node_id, str(error))
            continue
        found.append(Encodable(node, text, packet_id, owner_name(owner, document_of(node) or node.node_id)))
    return found


def owner_name(owner: str, document_id: str) -> str:
    """Under which name a document of a collection owns its packets; no two of either share one."""
    return f"{quote(owner, safe='')}/{document_id}"


@dataclass(slots=True)
class _Ingested:
    """What came of a document last.

    Attributes:
        version: its hash, as nodes tell it of their source; None if they do not.
        nodes: ids of those that came.
    """

    version: str | None = None
    nodes: set[str] = field(default_factory=set)


class _Documents:
    """Documents whose packets were made over one engine, by owner; one thread at a time asks and changes them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.came: dict[str, _Ingested] = {}

    def replaced_by(self, coming: Mapping[str, Sequence[BaseNode]]) -> list[str]:
        """Owners that come anew with these nodes; of the others, more nodes of what came before are among them.

        A pipeline may bring a document in batches, all of which tell one hash. Where none is told, a batch begins anew
        that brings a node again.
        """
        return [name for name, nodes in coming.items() if not self._go_on(self.came.get(name), nodes)]

    def note(self, coming: Mapping[str, Sequence[BaseNode]], replaced: Sequence[str]) -> None:
        """These nodes have their packets now."""
        for name in replaced:
            self.came[name] = _Ingested(_version_of(coming[name][-1]))
        for name, nodes in coming.items():
            self.came[name].nodes |= {node.node_id for node in nodes}

    @staticmethod
    def _go_on(last: _Ingested | None, nodes: Sequence[BaseNode]) -> bool:
        if last is None or any(document_of(node) in ("", node.node_id) for node in nodes):
            return False  # it is new, or comes in one piece
        versions = {_version_of(node) for node in nodes}
        if None in versions and not last.nodes.isdisjoint(node.node_id for node in nodes):
            return False
        return versions == {last.version}


_documents: WeakKeyDictionary[KVPacketEngine, _Documents] = WeakKeyDictionary()
_making = threading.Lock()


def _documents_of(engine: KVPacketEngine) -> _Documents:
    with _making:
        return _documents.setdefault(engine, _Documents())


def _version_of(node: BaseNode) -> str | None:
    return node.source_node.hash if node.source_node else None


def replace_packets(engine: KVPacketEngine, nodes: Sequence[BaseNode], owner: str, text_key: str) -> list[Encodable]:
    """Make the packets of documents' nodes, and drop those that other versions of the documents had."""
    found = encodable(engine, nodes, owner, text_key)
    coming: dict[str, list[BaseNode]] = defaultdict(list)
    for node in nodes:
        coming[owner_name(owner, document_of(node) or node.node_id)].append(node)
    documents = _documents_of(engine)
    with documents.lock:
        old = documents.replaced_by(coming)
        engine.writer.replace([each.text for each in found], [each.owner for each in found], old)
        documents.note(coming, old)
    return found


def drop_packets(engine: KVPacketEngine, document_ids: Iterable[str], owner: str = DEFAULT_OWNER) -> list[str]:
    """Drop the packets of documents that were deleted from a vector store, save those that other documents need.

    A :class:`KVPacketVectorStore` does this by itself. Beside any other store, call this after ``delete_ref_doc``; a
    document that is updated, by ``update_ref_doc``, ``refresh_ref_docs`` or an ingestion pipeline, loses its old
    packets when a ``KVPacketTransform`` makes the new ones.

    Args:
        engine: over the packet store.
        document_ids: the ``ref_doc_id`` of each; a node that has none is its own document.
        owner: as of the transform and the post-processor.

    Returns:
        The ids of the packets that went.

    Raises:
        KVPacketError: there is no engine, or ``document_ids`` is a single text.
    """
    require_engine("drop_packets", engine)
    owners = [owner_name(owner, name) for name in require_names("document_ids", document_ids)]
    documents = _documents_of(engine)
    with documents.lock:
        for name in owners:
            documents.came.pop(name, None)
        return engine.drop_owners(owners)
