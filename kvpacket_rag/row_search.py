"""Which rows of an index are near a question: FAISS, kept up to date with the file, over what is whole in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from kvpacket_rag.chunk import Chunk, Hit
from kvpacket_rag.errors import StoreError
from kvpacket_rag.nearest import Ids, Kind, NearestVectors, Vectors, unit_vectors
from kvpacket_rag.rows import ChunkRows, wrong_dim

logger = logging.getLogger(__name__)

_SPARE = 16  # candidates asked for beyond k, so that a tie at the border seldom costs a second search
_LOAD = 8192  # vectors read at a time


class RowSearch:
    """Searches the rows of one index.

    Args:
        rows: of the index.
        dim: dimensions that were asked for; None takes those of the rows.
        kind: of search.
    """

    def __init__(self, rows: ChunkRows, dim: int | None, kind: Kind) -> None:
        self._rows = rows
        self.dim = dim
        self.kind: Kind = kind
        self._nearest: NearestVectors | None = None
        self._version: tuple[int, int, int] | None = None  # of the rows that FAISS holds
        self._damaged: Ids = np.empty(0, np.int64)  # vectors that are damaged, or whose chunks are
        self._without_vector = 0  # chunks

    @property
    def lost(self) -> int:
        """How many chunks were passed over as damaged."""
        return len(self._damaged) + self._without_vector

    def clear(self) -> None:
        """Let go of the vectors."""
        self._nearest = self._version = None

    def search(self, vector: npt.ArrayLike, k: int, where: Callable[[Chunk], bool] | None) -> list[Hit]:
        """See :meth:`PacketIndex.search`."""
        if k < 1:
            raise StoreError(f"k is {k}; ask for at least one hit")
        with self._rows.file.reading():  # one snapshot: what another process deletes meanwhile is seen next time
            nearest = self.refresh()
            dim = nearest.dim if nearest else self.dim
            query = unit_vectors(cast(npt.ArrayLike, [vector]), dim, ["the question"])[0]
            while nearest is not None and len(nearest):
                ids = self._candidates(nearest, query, k, where)
                # FAISS adds in float32 in an order of its own; equal vectors must get equal scores.
                scores = (nearest.take(ids).astype(np.float64) * query).sum(axis=1).clip(-1, 1)
                best = np.lexsort((self._rows.places(ids), -scores))[:k]
                found = {i: self._rows.by_vector_id(int(ids[i])) for i in best}
                damaged = ids[[i for i in best if found[i] is None]]
                if not len(damaged):
                    return [Hit(row[0], float(scores[i]), row[1]) for i, row in found.items() if row]
                self._pass_over(nearest, damaged)
        return []

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
                    row = self._rows.by_vector_id(name) if where else None
                    matches[name] = where is None or row is None or bool(where(row[0]))  # a damaged one is told later
            kept = np.array([matches[name] for name in ids.tolist()], bool)
            passing = scores[kept]
            if count == len(nearest) or (len(passing) >= k and scores[-1] < passing[k - 1] - margin):
                matching: Ids = ids[kept]
                return matching
            count = min(len(nearest), 4 * count)

    def refresh(self) -> NearestVectors | None:
        """The vectors in memory, as the current snapshot has them; None while there never were any."""
        version = self._rows.file.version()
        if version == self._version:
            return self._nearest
        dim = self._rows.dim()
        if dim is not None and self.dim not in (None, dim):
            raise wrong_dim(self._rows.file.name, dim, self.dim)
        nearest = self._nearest
        self._nearest = self._version = None  # a failure below leaves nothing half done
        if dim is not None and (nearest is None or nearest.dim != dim):
            nearest = NearestVectors(dim, self.kind)
        present = self._rows.vector_ids()
        self._damaged = np.intersect1d(self._damaged, present)
        self._without_vector = max(self._rows.count() - len(present), 0)
        new = np.setdiff1d(present, self._damaged)
        if nearest is not None:
            gone = np.setdiff1d(nearest.ids, present, assume_unique=True)
            if len(gone):
                nearest.remove(gone)
            new = np.setdiff1d(new, nearest.ids)
            for start in range(0, len(new), _LOAD):
                nearest.add(*self._rows.vectors(new[start : start + _LOAD], nearest.dim))
            new = np.setdiff1d(new, nearest.ids)
        self._pass_over(nearest, new, told=not self._without_vector)
        self._nearest, self._version = nearest, version
        return nearest

    def _pass_over(self, nearest: NearestVectors | None, ids: Ids, told: bool = True) -> None:
        """Search without vectors that are damaged, or whose chunks are, and say so; ``told``: that is all there is."""
        if not len(ids) and told:
            return
        if nearest is not None:
            nearest.remove(np.intersect1d(ids, nearest.ids))
        self._damaged = np.union1d(self._damaged, ids)
        logger.warning(
            "index %s: %d chunks are damaged and passed over; 'kvpacket check DIR --repair' takes their documents out, "
            "to be ingested again",
            self._rows.file.name,
            self.lost,
        )
