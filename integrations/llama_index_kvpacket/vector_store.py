"""KVPacketVectorStore: LlamaIndex's vector store interface on an index of packets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE, NAMESPACE_SEP
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_DIR,
    DEFAULT_PERSIST_FNAME,
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from kvpacket_rag import Chunk, DocumentError, Hit, KVPacketEngine, KVPacketError, PacketIndex, StoreError
from kvpacket_rag.namespace import local_path
from kvpacket_rag.store import DiskStore, RemoteStore
from llama_index_kvpacket.filters import metadata_filter, query_filter, require_query
from llama_index_kvpacket.nodes import require_nodes, to_chunk, to_node
from llama_index_kvpacket.packets import LOADING, NodePackets, load_engine
from llama_index_kvpacket.parameters import require_engine, require_known, require_names
from llama_index_kvpacket.persistence import copy_to, open_index, read_pointer, require_local, write_pointer
from llama_index_kvpacket.versions import StoredVersions

logger = logging.getLogger(__name__)


class KVPacketVectorStore(BasePydanticVectorStore):
    """Nodes with their embeddings, each node's text encoded into a packet when it is added.

    Deleting a node deletes its packet when no other node has the same text, in this store or in another one over
    the same engine. Nodes without text are left out. All methods may be called from many threads, and processes that
    share a folder take turns to change it.

    Args:
        engine: encodes, and keeps the packets in its store; loaded by name if left out.
        path: folder of the index, which :class:`~kvpacket_rag.PacketIndex` describes; None for memory. An
            engine that is loaded here keeps its packets there too, or at the URL that the index was built with.
        kind: ``"flat"`` searches exactly, ``"hnsw"`` approximately once there are many nodes.
        packet_text_key: metadata key of the text that prompts will hold in place of the node's own, such as
            ``"window"`` for a ``SentenceWindowNodeParser`` with a ``MetadataReplacementPostProcessor``: packets are
            made of it. None for what a stored index was built with, ``""`` for the node's own text.
        reencode: encode the chunks of a stored index anew if this engine has no packets of them.
        progress: called with tokens done and tokens in all while nodes are encoded.
        loading: of an engine to be loaded: ``model_name``, ``adapter``, ``device_map``, ``dtype``, ``model_kwargs``,
            ``tokenizer_kwargs``, ``min_match_tokens``, ``quantize``, ``compress``; and as of ``KVPacketRAG.open``
            ``remote`` and ``cache_bytes``.

    Raises:
        PacketMismatchError: the index was built with another model, adapter or dtype.
        PacketNotFoundError: the engine's store holds no packet of the index.
        StoreError: the index cannot be opened, or its packets are made of another text.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    stores_text: bool = True
    is_embedding_query: bool = True
    path: str | None = Field(default=None, description="Folder of the index; None for memory.")
    kind: str = Field(default="flat", description="How the index is searched.")
    packet_text_key: str = Field(default="", description="Metadata key of the text of packets; empty for the node's.")

    _index: PacketIndex = PrivateAttr()
    _packets: NodePackets = PrivateAttr()
    _versions: StoredVersions = PrivateAttr()

    def __init__(
        self,
        engine: KVPacketEngine | None = None,
        path: str | Path | None = None,
        *,
        kind: str = "flat",
        packet_text_key: str | None = None,
        reencode: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **loading: Any,
    ) -> None:
        if engine is not None:
            require_engine(type(self).__name__, engine)
        require_known(type(self).__name__, loading, () if engine else LOADING)
        fields: dict[str, Any] = {"path": str(path) if path is not None else None, "kind": kind}
        super().__init__(**fields)
        folder = local_path(path).expanduser().absolute() if path is not None else None  # the process may move on
        self._index = open_index(folder, kind)
        try:
            engine = engine or load_engine(self._index, folder, loading)
            self._packets = NodePackets(engine, self._index, folder, packet_text_key, progress)
            self._packets.open(reencode)
            self.packet_text_key = self._packets.text_key
            self._versions = StoredVersions(self._index)
        except BaseException:
            self._index.close()
            raise

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketVectorStore"

    @property
    def client(self) -> PacketIndex:
        """The index."""
        return self._index

    @property
    def engine(self) -> KVPacketEngine:
        """The engine, to share with a ``KVPacketLLM``."""
        return self._packets.engine

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode and store nodes; those whose ids are known are replaced, and a text that is known is not encoded.

        In ``refresh_ref_docs`` and ``update_ref_doc`` a document's nodes take the place of what was cut from it before,
        also where an index without its docstore takes it for new. Else they are added, as in any vector store, but a
        piece of the same document that this object found stored does not stand twice.

        Returns the ids of the nodes.

        Raises:
            DocumentError: a node has no embedding, or more text than the model's window. None was stored.
            StoreError: embeddings of other dimensions, metadata that JSON would change, or no room. None was stored.
        """
        chunks = {node.node_id: to_chunk(node) for node in require_nodes(nodes)}
        blank = [name for name, chunk in chunks.items() if not self._packets.text_of(chunk).strip()]
        for name in blank:
            logger.warning("node %s of document %r holds no text and is left out", name, chunks.pop(name).document_id)
        vectors = {node.node_id: self._vector(node) for node in nodes if node.node_id in chunks}
        with self._packets.ownership.turn():
            gone = self._versions.replaced_by(nodes)
            is_new_index = not len(self._index)
            self._packets.put(list(chunks.values()), [vectors[name] for name in chunks], [*gone, *blank])
            self._versions.forget(nodes, gone)
            if is_new_index:
                self._packets.note_embedder(node for node in nodes if node.node_id in chunks)
        if gone:
            logger.info("%d stored nodes were replaced by those of the same documents that came now", len(gone))
        return [node.node_id for node in nodes]

    def _vector(self, node: BaseNode) -> list[float]:
        if node.embedding is None:
            raise DocumentError(
                f"node {node.node_id!r} has no embedding; add nodes through a VectorStoreIndex, or set node.embedding"
            )
        if self._index.dim not in (None, len(node.embedding)):
            raise StoreError(
                f"node {node.node_id!r} has an embedding of {len(node.embedding)} dimensions, the index has "
                f"{self._index.dim}; use the embedding model that built it, or build a new index in another folder"
            )
        return node.embedding

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and the packets that no other node needs; an unknown one is no error.

        After ``index.delete_ref_doc`` LlamaIndex still knows the document's hash, and ``refresh_ref_docs`` takes it
        for unchanged; :func:`~llama_index_kvpacket.delete_document` makes it forget that too.
        """
        if ref_doc_id:  # nodes of no document are kept under the empty name
            self._packets.delete(self._index.chunk_ids(ref_doc_id))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete the nodes of these ids that pass the filters, and the packets that no other node needs.

        Raises:
            StoreError: neither ids nor filters are given.
        """
        if node_ids is None and filters is None:
            raise StoreError("delete_nodes got neither node_ids nor filters; call clear() to delete every node")
        self._packets.delete([chunk.chunk_id for chunk in self._select(node_ids, filters)])

    def clear(self) -> None:
        """Delete every node and its packet."""
        self._packets.delete([chunk.chunk_id for chunk, _ in self._index.rows()])
        self._packets.leftovers.clear()

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes of these ids that pass the filters, in the order asked; of all nodes if no ids are given."""
        return [to_node(chunk) for chunk in self._select(node_ids, filters)]

    def _select(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> Iterable[Chunk]:
        named = self._index.get(require_names("node_ids", node_ids)) if node_ids is not None else None
        chunks = (chunk for chunk, _ in self._index.rows()) if named is None else named
        return list(filter(metadata_filter(filters), chunks))

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to an embedding, with cosine similarities; empty ``node_ids`` restrict nothing.

        Args:
            query: of mode ``default``, or ``mmr`` for nodes that differ from each other.
            kwargs: for ``mmr``: ``mmr_threshold`` from 0 (most different) to 1 (nearest), 0.5 by default, and
                ``mmr_prefetch_factor``, how many times as many nodes to choose from, 4 by default.

        Raises:
            StoreError: another mode, no embedding, fewer than one node, or a filter's value that fits no operator.
        """
        vector = require_query(query)
        is_mmr = query.mode == VectorStoreQueryMode.MMR
        width = int(query.similarity_top_k * max(1, kwargs.get("mmr_prefetch_factor", 4))) if is_mmr else 0
        hits = self._index.search(vector, max(width, query.similarity_top_k), query_filter(query))
        scores = [hit.score for hit in hits]
        if is_mmr:
            scores, hits = self._diverse(query, hits, kwargs.get("mmr_threshold", query.mmr_threshold))
        nodes = [to_node(hit.chunk) for hit in hits]
        return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])

    def _diverse(
        self, query: VectorStoreQuery, hits: Sequence[Hit], threshold: float | None
    ) -> tuple[list[float], list[Hit]]:
        vectors = self._index.vectors([hit.chunk.chunk_id for hit in hits])
        scores, places = get_top_k_mmr_embeddings(
            query.query_embedding or [], vectors.tolist(), None, query.similarity_top_k, mmr_threshold=threshold
        )
        return [float(score) for score in scores], [hits[place] for place in places]

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Make what :meth:`from_persist_path` opens. A store in a folder is there already, and is only pointed to.

        Raises:
            StoreError: ``fs`` is no local file system, or the folder cannot be written.
        """
        require_local(fs)
        pointer = local_path(persist_path)
        folder = self._packets.folder or pointer.with_suffix(".kvpacket")
        if not self._packets.folder or not isinstance(self.engine.store, DiskStore | RemoteStore):
            copy_to(folder, self._packets)
        write_pointer(pointer, folder)

    @classmethod
    def from_persist_path(
        cls, persist_path: str, fs: Any = None, *, engine: KVPacketEngine | None = None, **options: Any
    ) -> KVPacketVectorStore:
        """Open what :meth:`persist` made; options are those of the constructor."""
        require_local(fs)
        return cls(engine, read_pointer(local_path(persist_path)), **options)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str = DEFAULT_PERSIST_DIR,
        namespace: str = DEFAULT_VECTOR_STORE,
        fs: Any = None,
        *,
        engine: KVPacketEngine | None = None,
        **options: Any,
    ) -> KVPacketVectorStore:
        """Open the vector store of a folder that ``StorageContext.persist`` made, to hand to ``StorageContext``."""
        path = Path(persist_dir) / f"{namespace}{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}"
        return cls.from_persist_path(str(path), fs, engine=engine, **options)

    def close(self) -> None:
        """Close the index; the engine stays open."""
        self._index.close()
        self._packets.leftovers.clear()

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """:meth:`add` in a worker thread."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """:meth:`delete` in a worker thread."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """:meth:`delete_nodes` in a worker thread."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        """:meth:`clear` in a worker thread."""
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """:meth:`get_nodes` in a worker thread."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """:meth:`query` in a worker thread."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVPacketVectorStore:
        return self.model_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        raise KVPacketError(f"a {type(self).__name__} is an open index and cannot be pickled; open it in each process")
