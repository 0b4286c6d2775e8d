"""PacketIndex: which chunks are near a question, and under which ids their packets lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpacket_rag import database
from kvpacket_rag.chunk import Chunk, Hit
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index_file import IndexFile
from kvpacket_rag.index_settings import IndexSettings
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.nearest import Kind, Vectors, unit_vectors
from kvpacket_rag.row_search import RowSearch
from kvpacket_rag.rows import ChunkRows, metadata_json, record

FILE_NAME = "index.sqlite"
_START_SECONDS = 1.0  # a new index is empty for less


class PacketIndex:
    """Chunks with their embeddings and packet ids, searched by cosine.

    What is stored is one SQLite file; FAISS holds the vectors in memory and is brought up to date
    from the file before each search. So a chunk that was deleted, here or by another process, is
    never found, and a change that was cut short was never made. Threads may share an index. A chunk whose row or vector
    is damaged is passed over, counted in :attr:`lost` and told of in a warning; the others are found as ever.

        index = PacketIndex.open("library")
        index.add(chunks, vectors, packet_ids)
        hits = index.search(question_vector, k=4)
    """

    def __init__(self, rows: ChunkRows, dim: int | None, kind: Kind) -> None:
        """Use :meth:`open`."""
        self._rows = rows
        self._settings = IndexSettings(rows.file)
        self._search = RowSearch(rows, dim, kind)

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
            load: read settings and vectors at once, so that damage to them shows now; else when they are first used.

        Raises:
            StoreFormatError: the folder's index file is none, or one of another format version.
            StoreError: the path is a file, cannot be written, or holds vectors of other dimensions; or what the index
                says of how it was built is damaged.
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
                    index._settings.require()
                    index._search.refresh()
        except BaseException:
            index.close()
            raise
        return index

    @property
    def dim(self) -> int | None:
        """Dimensions of the vectors; None while the index is empty and none were asked for."""
        return self._search.dim or self._rows.dim()

    @property
    def kind(self) -> Kind:
        """How this process searches: ``"flat"`` or ``"hnsw"``."""
        return self._search.kind

    @property
    def folder(self) -> Path | None:
        """Where it lies; None in memory."""
        return self._rows.file.path.parent.resolve() if self._rows.file.path else None

    @property
    def lost(self) -> int:
        """Chunks that searching passed over, as they are damaged; ``kvpacket check DIR --repair`` tells which."""
        return self._search.lost

    def __len__(self) -> int:
        return self._rows.count()

    def close(self) -> None:
        """Release the file; every later call raises StoreError."""
        self._rows.file.close()
        self._search.clear()

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
        return self._search.search(vector, k, where)

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

    def chunk_ids(self, document_id: str) -> list[str]:
        """The chunks of a document, in order of insertion."""
        return self._rows.chunk_ids(document_id)

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
        """What SQLite finds wrong with the file's structure and its own indexes, and damaged settings."""
        return self._rows.file.faults() + [f"setting {key!r} is damaged" for key in self.damaged_settings()]

    def damaged_settings(self) -> list[str]:
        """Keys of what the index says of itself that are not what was written."""
        return self._settings.damaged()

    def mend(self, mark: str) -> None:
        """Make SQLite's indexes anew from the tables; of rows that claim one key, damaged ones go.

        Args:
            mark: metadata key that says a document need not be looked at again. Where anything is damaged, no chunk has
                it any more from this step on: a lost row need not have told its document.
        """
        self._rows.mend(mark)

    def compact(self) -> bool:
        """Write the file anew, without the gaps that deletions left; False where that cannot be done now."""
        return self._rows.file.compact()

    def get_setting(self, key: str) -> str | None:
        """A text kept with the index, such as the embedder's name; None if never set."""
        return self._settings.get(key)

    def set_setting(self, key: str, value: str, *, erases: bool = False) -> None:
        """Keep a text with the index; ``erases``: what it said before shall be in no file any more."""
        self._settings.set(key, value, erases=erases)


def _index_file(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise StoreError(f"{folder} cannot hold an index: {what}; pass a folder that can be written") from error
    _refuse_emptied(folder / FILE_NAME)
    return folder / FILE_NAME


def _refuse_emptied(path: Path) -> None:
    """An index that was cut to nothing would count as a new one, and its packets as nobody's."""
    give_up = time.monotonic() + _START_SECONDS  # another process may be making it
    while path.is_file() and database.stamp(path) == (None, None):
        if time.monotonic() > give_up and any(path.parent.glob("packets/*/*.safetensors")):
            raise StoreError(
                f"{str(path)!r} is empty, though packet files lie beside it: the index was lost, or its making was "
                "interrupted. Put the file back; or remove it and ingest the documents again"
            )
        if not any(path.parent.glob("packets/*/*.safetensors")):
            return
        time.sleep(0.05)


def _unknown(chunk_id: str) -> StoreError:
    return StoreError(f"the index has no chunk {chunk_id!r}; it was never added, or is deleted")
