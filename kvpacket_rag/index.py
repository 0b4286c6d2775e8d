"""PacketIndex: which chunks are near a question, and under which ids their packets lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvpacket_rag.chunk import Chunk, Hit
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index_file import IndexFile
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.nearest import Ids, Kind, NearestVectors, Vectors, unit_vectors
from kvpacket_rag.rows import ChunkRows, metadata_json, record, wrong_dim

FILE_NAME = "index.sqlite"
_SPARE = 16  # candidates asked for beyond k, so that a tie at the border seldom costs a second search
_LOAD = 8192  # vectors read at a time


class PacketIndex:
    """Chunks with their embeddings and packet ids, searched by cosine.

    What is stored is one SQLite file; FAISS holds the vectors in memory and is brought up to date
    from the file before each search. So a chunk that was deleted, here or by another process, is
    never found, and a change that was cut short was never made. Threads may share an index.

        index = PacketIndex.open("library")
        index.add(chunks, vectors, packet_ids)
        hits = index.search(question_vector, k=4)
    """

    def __init__(self, rows: ChunkRows, dim: int | None, kind: Kind) -> None:
        """Use :meth:`open`."""
        self._rows = rows
        self._dim = dim
        self._kind: Kind = kind
        self._nearest: NearestVectors | None = None
        self._version: tuple[int, int, int] | None = None  # of the rows that FAISS holds

    @classmethod
    def open(
        cls,
        path: Path | str | None,
        *,
        dim: int | None = None,
        kind: Kind = "flat",
        namespace: str = "",
        load: bool = True,
    ) -> PacketIndex:
        """Open the index in a folder, or start one there.

        Args:
            path: a folder on a local disk, created if absent; None keeps the index in memory.
            dim: dimensions of the vectors; None takes those of the stored or first added ones.
            kind: how this process searches, no property of the folder: ``"flat"`` is exact; ``"hnsw"``
                too up to ``nearest.GRAPH_FROM`` chunks, and beyond it searches faster, misses a hit now
                and then, and builds its graph anew at every opening (about 0.5 ms a chunk).
            namespace: whose chunks these are; each is an index of its own below ``path``, see
                :func:`~kvpacket_rag.namespace.namespace_folder`.
            load: read the vectors at once, so that damage to them shows now; else when they are first searched.

        Raises:
            StoreFormatError: the folder's index file is none, or one of another format version.
            StoreError: the path is a file, cannot be written, or holds vectors of other dimensions.
        """
        if kind not in ("flat", "hnsw"):
            raise StoreError(f"index kind {kind!r} is unknown; use 'flat' (exact) or 'hnsw' (approximate)")
        if dim is not None and dim < 1:
            raise StoreError(f"an index of {dim} dimensions is asked for; pass the embedder's dim, or None")
        file = _index_file(namespace_folder(path, namespace).expanduser()) if path is not None else None
        index = cls(ChunkRows(IndexFile(file)), dim, kind)
        try:
            with index._rows.file.reading():
                if load:
                    index._refresh()
        except BaseException:
            index.close()
            raise
        return index

    @property
    def dim(self) -> int | None:
        """Dimensions of the vectors; None while the index is empty and none were asked for."""
        return self._dim or self._rows.dim()

    @property
    def kind(self) -> Kind:
        """How this process searches: ``"flat"`` or ``"hnsw"``."""
        return self._kind

    @property
    def folder(self) -> Path | None:
        """Where it lies; None in memory."""
        return self._rows.file.path.parent.resolve() if self._rows.file.path else None

    def __len__(self) -> int:
        return self._rows.count()

    def close(self) -> None:
        """Release the file; every later call raises StoreError."""
        self._rows.file.close()
        self._nearest = None

    def add(
        self, chunks: Sequence[Chunk], vectors: npt.ArrayLike, packet_ids: Sequence[str], gone: Iterable[str] = ()
    ) -> None:
        """Insert chunks, or replace those whose ids are known (they keep their place), all or none.

        Args:
            chunks: of one id twice, the last counts. Metadata comes back as JSON gives it (tuples as lists).
            vectors: (n, dim), any length but zero; only their directions are kept.
            packet_ids: n ids under which the store holds the chunks' packets.
            gone: ids of chunks that these take the place of, deleted in the same step; unknown ones are no error.

        Raises:
            StoreError: lengths differ, a vector has no direction or other dimensions, text or metadata
                cannot be stored, or the file cannot be written. The index is as it was before.
        """
        if len(chunks) != len(packet_ids):
            raise StoreError(f"{len(chunks)} chunks came with {len(packet_ids)} packet ids; give one for each")
        if not chunks:
            self.delete(gone)
            return
        units = unit_vectors(vectors, self.dim, [f"chunk {chunk.chunk_id!r}" for chunk in chunks])
        last = {chunk.chunk_id: place for place, chunk in enumerate(chunks)}
        records = [record(chunks[place], packet_ids[place]) for place in last.values()]
        self._rows.put(records, units[list(last.values())], [name for name in gone if name not in last])

    def search(self, vector: npt.ArrayLike, k: int, where: Callable[[Chunk], bool] | None = None) -> list[Hit]:
        """The chunks nearest to a question, best first; equal scores in order of insertion.

        Args:
            vector: (dim,), any length but zero.
            k: how many; fewer come back only if fewer there are.
            where: which chunks count. All are asked if need be, so k matching ones are found if they
                exist. It must not change the index.

        Raises:
            StoreError: k is below 1, or the vector has no direction or other dimensions.
        """
        if k < 1:
            raise StoreError(f"k is {k}; ask for at least one hit")
        with self._rows.file.reading():  # one snapshot: what another process deletes meanwhile is seen next time
            nearest = self._refresh()
            query = unit_vectors(cast(npt.ArrayLike, [vector]), self.dim, ["the question"])[0]
            if nearest is None or not len(nearest):
                return []
            ids = self._candidates(nearest, query, k, where)
            # FAISS adds in float32 in an order of its own; equal vectors must get equal scores.
            scores = (nearest.take(ids).astype(np.float64) * query).sum(axis=1).clip(-1, 1)
            best = np.lexsort((self._rows.places(ids), -scores))[:k]
            found = [(*self._rows.by_vector_id(int(ids[i])), float(scores[i])) for i in best]
        return [Hit(chunk, score, packet_id) for chunk, packet_id, score in found]

    def _candidates(
        self, nearest: NearestVectors, query: Vectors, k: int, where: Callable[[Chunk], bool] | None
    ) -> Ids:
        """Ids of matching vectors, the k best and all that rounding may have put behind them among them."""
        matches: dict[int, bool] = {}
        margin = nearest.dim * np.finfo(np.float32).eps  # twice the most that a float32 sum can be off
        count = min(len(nearest), k + _SPARE)
        while True:
            ids, scores = nearest.search(query, count)
            for name in ids.tolist():
                if name not in matches:
                    matches[name] = where is None or bool(where(self._rows.by_vector_id(name)[0]))
            kept = np.array([matches[name] for name in ids.tolist()], bool)
            passing = scores[kept]
            if count == len(nearest) or (len(passing) >= k and scores[-1] < passing[k - 1] - margin):
                matching: Ids = ids[kept]
                return matching
            count = min(len(nearest), 4 * count)

    def _refresh(self) -> NearestVectors | None:
        """The vectors in memory, as the current snapshot has them; None while there never were any."""
        version = self._rows.file.version()
        if version == self._version:
            return self._nearest
        dim = self._rows.dim()
        if dim is not None and self._dim not in (None, dim):
            raise wrong_dim(self._rows.file.name, dim, self._dim)
        nearest = self._nearest
        self._nearest = self._version = None  # a failure below leaves nothing half done
        if dim is not None and (nearest is None or nearest.dim != dim):
            nearest = NearestVectors(dim, self._kind)
        if nearest is not None:
            present = self._rows.vector_ids()
            gone = np.setdiff1d(nearest.ids, present, assume_unique=True)
            if len(gone):
                nearest.remove(gone)
            new = np.setdiff1d(present, nearest.ids, assume_unique=True)
            for start in range(0, len(new), _LOAD):
                ids = new[start : start + _LOAD]
                nearest.add(ids, self._rows.vectors(ids, nearest.dim))
        self._nearest, self._version = nearest, version
        return nearest

    def get(self, chunk_ids: Iterable[str]) -> list[Chunk]:
        """The chunks of these ids, in the order asked; unknown ids are left out."""
        with self._rows.file.reading():
            found = [self._rows.by_chunk_id(name) for name in chunk_ids]
        return [chunk for chunk in found if chunk is not None]

    def vectors(self, chunk_ids: Sequence[str]) -> Vectors:
        """(n, dim) float32 of length 1, one row for each id.

        Raises:
            StoreError: an id is unknown.
        """
        with self._rows.file.reading():
            found = {name: self._rows.vector(name) for name in chunk_ids}
            dim = self.dim or 0
        units = [row for row in found.values() if row is not None]
        if len(units) < len(found):
            raise _unknown(next(name for name, row in found.items() if row is None))
        place = {name: i for i, name in enumerate(found)}
        return np.stack(units)[[place[name] for name in chunk_ids]] if units else np.empty((0, dim), np.float32)

    def delete(self, chunk_ids: Iterable[str]) -> list[str]:
        """Delete chunks, at once and for every process; the ids that were there. Their packets are the store's."""
        return self._rows.delete(list(chunk_ids))

    def chunk_ids(self, document_id: str, *, scan: bool = False) -> list[str]:
        """The chunks of a document, in order of insertion.

        Args:
            document_id: of the document.
            scan: read the whole table, so that a damaged index of SQLite's hides none; slower with the number of rows.
        """
        return self._rows.chunk_ids(document_id, scan=scan)

    def documents(self) -> list[str]:
        """The ids of the documents that have chunks, in order of insertion."""
        return self._rows.documents()

    def rows(self) -> Iterator[tuple[Chunk, str]]:
        """Every chunk and its packet id, in order of insertion. The index may change meanwhile."""
        place, page = self._rows.after(0)
        while page:
            yield from page
            place, page = self._rows.after(place)

    def set_metadata(self, chunk_id: str, metadata: Mapping[str, Any]) -> None:
        """Replace a chunk's metadata; text, vector and packet stay.

        Raises:
            StoreError: the id is unknown, or the metadata cannot be written as JSON.
        """
        if not self._rows.update("metadata", {chunk_id: metadata_json(chunk_id, metadata)}):
            raise _unknown(chunk_id)

    def set_packet_ids(self, packet_ids: Mapping[str, str]) -> None:
        """Give chunks (by chunk id) new packets, all or none. Ids deleted meanwhile are left out."""
        self._rows.update("packet_id", packet_ids)

    def damaged(self) -> dict[str, str]:
        """Chunk and document ids of damaged rows, as far as they can still be told; every row is read."""
        return self._rows.damaged()

    def drop_damaged(self) -> None:
        """Delete the rows and vectors that :meth:`damaged` tells of."""
        self._rows.drop_damaged()

    def faults(self) -> list[str]:
        """What SQLite finds wrong with the file's structure."""
        return self._rows.file.faults()

    def compact(self) -> bool:
        """Write the file anew, without the gaps that deletions left; False where that cannot be done now."""
        return self._rows.file.compact()

    def get_setting(self, key: str) -> str | None:
        """A text kept with the index, such as the embedder's name; None if never set."""
        return self._rows.setting(key)

    def set_setting(self, key: str, value: str) -> None:
        """Keep a text with the index."""
        self._rows.set_setting(key, value)


def _index_file(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise StoreError(f"{folder} cannot hold an index: {what}; pass a folder that can be written") from error
    return folder / FILE_NAME


def _unknown(chunk_id: str) -> StoreError:
    return StoreError(f"the index has no chunk {chunk_id!r}; it was never added, or is deleted")
