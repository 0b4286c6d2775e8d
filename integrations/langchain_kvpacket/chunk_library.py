"""Rows and packets kept in step: what a vector store does besides converting types and searching."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvpacket_rag import (
    Chunk,
    DiskStore,
    Embedder,
    KVPacketEngine,
    PacketIndex,
    StoreError,
)
from kvpacket_rag.journal import change_lock
from kvpacket_rag.opening import join
from kvpacket_rag.origin import Origin
from kvpacket_rag.owners import owner_names
from langchain_kvpacket.retrieved import RETRIEVED

_PAGE = 64  # chunks copied at a time
# Of threads that change one index, over however many libraries.
_turns: WeakKeyDictionary[PacketIndex, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


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
        self._processes = change_lock(index.folder) if index.folder else None
        join(engine, index, embedder, lock=self._processes)
        with _making:
            self._threads = _turns.setdefault(index, threading.RLock())

    def put(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks, or replace those whose ids are known; all or none.

        A text that has a packet is not encoded again, and one that keeps its id is not embedded again.

        Args:
            chunks: each id once.

        Raises:
            DocumentError: a text is empty or too long.
            StoreError: metadata cannot be stored, or the files cannot be written.
        """
        with self._changing():
            self._put(chunks)

    def _put(self, chunks: Sequence[Chunk]) -> None:
        ids = [chunk.chunk_id for chunk in chunks]
        old = {chunk.chunk_id: chunk for chunk in self.index.get(ids)}
        vectors = self._embed(chunks, old)
        guards = self._guards(ids)
        try:
            packets = self.engine.encode([chunk.text for chunk in chunks], guards)
            self.index.add(chunks, vectors, packets)
            changed = [c.chunk_id for c in chunks if old.get(c.chunk_id, c).text.strip() != c.text.strip()]
            RETRIEVED.forget(old[name].text for name in changed)
            self.engine.drop_owners(self._owners(changed))
            for packet, owner in zip(packets, self._owners(ids), strict=True):
                self.engine.store.add_owner(packet, owner)
        finally:
            self.engine.drop_owners(guards)

    def delete(self, ids: Iterable[str] | None) -> None:
        """Delete chunks, and packets that no other chunk needs; None deletes all, unknown ids are no error."""
        with self._changing():
            names = [chunk.chunk_id for chunk, _ in self.index.rows()] if ids is None else list(ids)
            RETRIEVED.forget(chunk.text for chunk in self.index.get(names))
            # Rows first: a packet without a row is only waste, a row without a packet would be read in full.
            self.index.delete(names)
            # Owners of all names, for a process that was killed here or in put() may have left some without a row.
            self.engine.drop_owners([*self._owners(names), *self._guards(names)])

    def copy_to(self, folder: str | Path) -> None:
        """Copy rows, vectors and packets into a folder.

        Raises:
            StoreError: the folder holds an index with chunks already, or cannot be written.
        """
        index = PacketIndex.open(folder)
        packets = DiskStore(folder)
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

    def _copy(self, chunks: Sequence[Chunk], index: PacketIndex, packets: DiskStore) -> None:
        ids = [chunk.chunk_id for chunk in chunks]
        found = self.engine.encode([chunk.text for chunk in chunks], self._owners(ids))  # only what was evicted
        owners = owner_names(index, packets, ids)
        for chunk, packet, owner in zip(chunks, found, owners, strict=True):
            packets.put(self.engine.store.get(packet, self.engine.signature), chunk.text.strip(), owner)
        index.add(chunks, self.index.vectors(ids), found)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside the ``with`` block no other thread, nor process of the same folder, changes rows and owners."""
        with self._threads, self._processes or nullcontext():
            yield

    def _embed(self, chunks: Sequence[Chunk], old: Mapping[str, Chunk]) -> npt.NDArray[np.float32]:
        """(n, dim); a text that is stored under its id keeps its vector."""
        kept = [c.chunk_id for c in chunks if c.chunk_id in old and old[c.chunk_id].text == c.text]
        vectors = dict(zip(kept, self.index.vectors(kept), strict=True))
        if new := [chunk for chunk in chunks if chunk.chunk_id not in vectors]:
            embedded = self.embedder.embed_documents([chunk.text for chunk in new])
            vectors |= dict(zip([chunk.chunk_id for chunk in new], embedded, strict=True))
        return np.array([vectors[chunk.chunk_id] for chunk in chunks], np.float32)

    def _owners(self, ids: Iterable[str]) -> list[str]:
        """Under which names chunks own their packets."""
        return owner_names(self.index, self.engine.store, ids)

    def _guards(self, ids: Iterable[str]) -> list[str]:
        """Under which names they do so until their rows are written; a failure leaves no packets behind."""
        return [f"\n(being added)\n{name}" for name in self._owners(ids)]
