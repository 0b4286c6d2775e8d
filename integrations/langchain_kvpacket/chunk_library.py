"""Rows and packets kept in step: what a vector store does besides converting types and searching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpacket_rag import (
    Chunk,
    Embedder,
    KVPacketEngine,
    PacketIndex,
    PacketStore,
    StoreError,
)
from kvpacket_rag.opening import join
from kvpacket_rag.origin import Origin
from kvpacket_rag.owners import owner_names
from kvpacket_rag.ownership import Ownership
from kvpacket_rag.store import open_store
from langchain_kvpacket.retrieved import RETRIEVED

_PAGE = 64  # chunks copied at a time


class ChunkLibrary:
    """Chunks with vectors in an index and packets in the engine's store.

    Several indexes may share one engine, see :mod:`kvpacket_rag.owners`.

    Args:
        engine: makes and keeps the packets.
        index: of rows and vectors.
        embedder: the one the index was built with.

    Raises:
        PacketMismatchError: the index's packets are of another model, adapter or dtype.
        PacketNotFoundError: the engine's store knows none of them.
        StoreError: its vectors are of other embeddings.
    """

    def __init__(self, engine: KVPacketEngine, index: PacketIndex, embedder: Embedder) -> None:
        self.engine = engine
        self.index = index
        self.embedder = embedder
        self._ownership = Ownership(index, engine.store, self._packet_of, index.folder)
        join(engine, index, embedder, lock=self._ownership.turn())

    def put(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks, or replace those whose ids are known; all or none.

        A text that has a packet is not encoded again, and one that keeps its id is not embedded again.

        Args:
            chunks: each id once.

        Raises:
            DocumentError: a text is empty or too long.
            StoreError: metadata cannot be stored, or the files cannot be written.
        """
        if not chunks:
            return
        ids = [chunk.chunk_id for chunk in chunks]
        with self._ownership.turn():
            old = {chunk.chunk_id: chunk for chunk in self.index.get(ids)}
            vectors = self._embed(chunks, old)
            with self._ownership.changing(ids) as owners:
                packets = self.engine.encode([chunk.text for chunk in chunks], owners)
                self.index.add(chunks, vectors, packets)
            RETRIEVED.forget(old[c.chunk_id].text for c in chunks if _is_other(old.get(c.chunk_id, c), c))

    def delete(self, ids: Iterable[str] | None) -> None:
        """Delete chunks, and packets that no other chunk needs; None deletes all, unknown ids are no error."""
        with self._ownership.turn():
            names = [chunk.chunk_id for chunk, _ in self.index.rows()] if ids is None else list(ids)
            with self._ownership.changing(names):
                RETRIEVED.forget(chunk.text for chunk in self.index.get(names))
                self.index.delete(names)

    def copy_to(self, folder: str | Path) -> None:
        """Copy rows, vectors and packets into a folder.

        Raises:
            StoreError: the folder holds an index with chunks already, or cannot be written.
        """
        index, packets = PacketIndex.open(folder), open_store(folder)
        try:
            if len(index):
                raise StoreError(f"the index in {folder} holds {len(index)} texts already; save into an empty folder")
            Origin(index, index.folder).write(self.engine, self.embedder.name, store=packets)
            rows = [chunk for chunk, _ in self.index.rows()]
            for start in range(0, len(rows), _PAGE):
                self._copy(rows[start : start + _PAGE], index, packets)
        finally:
            packets.close()
            index.close()

    def _copy(self, chunks: Sequence[Chunk], index: PacketIndex, packets: PacketStore) -> None:
        ids = [chunk.chunk_id for chunk in chunks]
        own = self._ownership.owners(ids)
        found = self.engine.encode([chunk.text for chunk in chunks], own)  # only what was evicted
        owners = owner_names(index, packets, ids)
        for chunk, packet, owner in zip(chunks, found, owners, strict=True):
            packets.put(self.engine.store.get(packet, self.engine.signature), chunk.text.strip(), owner)
        index.add(chunks, self.index.vectors(ids), found)

    def _embed(self, chunks: Sequence[Chunk], old: Mapping[str, Chunk]) -> npt.NDArray[np.float32]:
        """(n, dim); a text that is stored under its id keeps its vector."""
        kept = [c.chunk_id for c in chunks if c.chunk_id in old and old[c.chunk_id].text == c.text]
        vectors = dict(zip(kept, self.index.vectors(kept), strict=True))
        if new := [chunk for chunk in chunks if chunk.chunk_id not in vectors]:
            embedded = self.embedder.embed_documents([chunk.text for chunk in new])
            vectors |= dict(zip([chunk.chunk_id for chunk in new], embedded, strict=True))
        return np.array([vectors[chunk.chunk_id] for chunk in chunks], np.float32)

    def _packet_of(self, chunk: Chunk) -> str:
        return self.engine.encoder.identify(chunk.text)[0]


def _is_other(old: Chunk, new: Chunk) -> bool:
    """Whether a chunk's packet is of another text now."""
    return old.text.strip() != new.text.strip()
