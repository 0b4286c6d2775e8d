"""Vectors in memory, searched by inner product through FAISS. Knows nothing of chunks or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import faiss
import numpy as np
import numpy.typing as npt

from kvpacket_rag.errors import StoreError

Kind = Literal["flat", "hnsw"]
Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_faiss: Any = faiss  # for the names that its type stubs lack

GRAPH_FROM = 50_000  # vectors; fewer are scanned in milliseconds, and building a graph takes half a minute
_LINKS = 32  # of a vector in the graph
_MIN_BREADTH = 128  # vectors the graph search keeps in view; more finds more


class NearestVectors:
    """Unit vectors under ids, each id used once.

    ``flat`` compares with every vector. ``hnsw`` follows a graph once there are ``GRAPH_FROM``
    vectors: far fewer comparisons, and now and then a near vector is missed. A graph cannot lose a
    vector, so removed ones are barred from the results until they are a fifth and it is built anew.
    """

    def __init__(self, dim: int, kind: Kind) -> None:
        self.dim = dim
        self._kind = kind
        self._graph = False
        self._index = self._empty()
        self.ids: Ids = np.empty(0, np.int64)  # ascending
        self._removed: Ids = np.empty(0, np.int64)  # still in the graph

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add (n, dim) vectors under ids that were never used before."""
        ids_after = np.union1d(self.ids, ids)
        if self._kind == "hnsw" and not self._graph and len(ids_after) >= GRAPH_FROM:
            self._rebuild(graph=True)
        self._index.add_with_ids(np.ascontiguousarray(vectors), ids)
        self.ids = ids_after

    def remove(self, ids: Ids) -> None:
        """Remove vectors. They are never found again."""
        self.ids = np.setdiff1d(self.ids, ids, assume_unique=True)
        if not self._graph:
            self._index.remove_ids(faiss.IDSelectorBatch(ids))
            return
        self._removed = np.union1d(self._removed, ids)
        if 4 * len(self._removed) > len(self.ids):
            self._rebuild(graph=len(self.ids) >= GRAPH_FROM)

    def take(self, ids: Ids) -> Vectors:
        """(n, dim): the vectors of these ids."""
        taken: Vectors = self._index.reconstruct_batch(ids)
        return taken

    def search(self, vector: Vectors, count: int) -> tuple[Ids, Vectors]:
        """The ``count`` nearest to a (dim,) vector: their ids and inner products, best first."""
        query = vector.reshape(1, self.dim)
        with _one_thread():
            if self._graph and 8 * count < len(self.ids):
                scores, ids = self._follow(query, count)
                if ids[0, -1] >= 0:
                    return ids[0], scores[0]
            if self._graph:
                return self._scan(query, count)
            scores, ids = self._index.search(query, count)
            return ids[0], scores[0]

    def _follow(self, query: Vectors, count: int) -> tuple[Any, Any]:
        """Search along the graph; what it does not reach is -1."""
        barred = faiss.IDSelectorBatch(self._removed)
        allowed = faiss.IDSelectorNot(barred)
        breadth = max(_MIN_BREADTH, 2 * count)
        parameters = _faiss.SearchParametersHNSW(sel=allowed, efSearch=breadth)
        scores, ids = self._index.search(query, count, params=parameters)
        return scores, ids

    def _scan(self, query: Vectors, count: int) -> tuple[Ids, Vectors]:
        """Exact search of the graph's vectors: what is asked of most of them, or the graph did not reach."""
        inside = _faiss.downcast_index(_faiss.downcast_index(self._index.index).storage)
        scores, slots = inside.search(query, min(count + len(self._removed), inside.ntotal))
        ids = faiss.vector_to_array(self._index.id_map)[slots[0]]
        alive = ~np.isin(ids, self._removed)
        return ids[alive][:count], scores[0][alive][:count]

    def _rebuild(self, graph: bool) -> None:
        vectors = self.take(self.ids)
        self._graph, self._removed = graph, np.empty(0, np.int64)
        self._index = self._empty()
        self._index.add_with_ids(vectors, self.ids)

    def _empty(self) -> Any:
        links = faiss.IndexHNSWFlat(self.dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
        return faiss.IndexIDMap2(links if self._graph else faiss.IndexFlatIP(self.dim))


@contextmanager
def _one_thread() -> Iterator[None]:
    """FAISS on the caller's thread alone: one question is short, and waking the others can cost 100 times as much."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # of this thread only, as OpenMP has it
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def unit_vectors(vectors: npt.ArrayLike, dim: int | None, names: Sequence[str]) -> Vectors:
    """(n, dim) float32 vectors of length 1, in the directions of the given ones.

    Args:
        vectors: (n, dim), finite and not zero.
        dim: expected dimensions; None takes any.
        names: n names for errors.

    Raises:
        StoreError: naming the vector that has another shape, no direction, or a value that is no number.
    """
    try:
        raw = np.asarray(vectors, np.float64)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"vectors must be an array of numbers of shape (n, dim); they cannot be read: {error}"
        ) from error
    if raw.ndim != 2 or len(raw) != len(names) or raw.shape[1] == 0 or dim not in (None, raw.shape[1]):
        raise StoreError(
            f"vectors have shape {raw.shape}, expected ({len(names)}, {dim or 'any'}); "
            "embed each text once, with the embedder that built the index"
        )
    largest = np.abs(raw).max(axis=1, keepdims=True)  # divided out first, so that no square overflows or vanishes
    for what, wrong in (("NaN or infinity", ~np.isfinite(largest)), ("only zeros", largest == 0)):
        if wrong.any():
            raise StoreError(
                f"the vector of {names[int(wrong.argmax())]} holds {what}, so it has no direction; "
                "check the embedder and its input"
            )
    scaled = raw / largest
    units: Vectors = (scaled / np.linalg.norm(scaled, axis=1, keepdims=True)).astype(np.float32)
    return units
