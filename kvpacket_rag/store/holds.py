"""Which packets running requests hold, so that eviction leaves them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from threading import RLock


class Holds:
    """Counts, per packet, the requests of this process that hold it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = RLock()

    @contextmanager
    def hold(self, packet_ids: Iterable[str]) -> Iterator[None]:
        """Hold packets until the block ends, however it ends."""
        held = tuple(packet_ids)
        with self._lock:
            self._counts.update(held)
        try:
            yield
        finally:
            with self._lock:
                self._counts.subtract(held)
                for packet_id in held:
                    if self._counts[packet_id] <= 0:
                        del self._counts[packet_id]

    @contextmanager
    def frozen(self) -> Iterator[Set[str]]:
        """The held packets; no request can hold another one until the block ends.

        Eviction chooses and deletes inside the block: a hold is either seen by it or begins after it.
        """
        with self._lock:
            yield self._counts.keys()
