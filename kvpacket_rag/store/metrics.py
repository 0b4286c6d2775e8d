"""What a store counts while it works: hits, misses by reason, loads, bytes and evictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, Protocol

MissReason = Literal["unknown", "evicted", "quarantined", "missing", "damaged", "mismatch", "unreadable"]


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The counts of one store object, or of one of its tiers, since it was opened; other processes have their own.

    Attributes:
        hits: packets that were asked for and given.
        misses: packets that were asked for and not given, by reason: ``unknown`` to the store, ``evicted``,
            ``quarantined`` before, its file ``missing``, found ``damaged`` now, a signature ``mismatch``,
            or ``unreadable`` because the system would not let it be read.
        loads: packets read from a file, or copied into this tier.
        bytes_loaded: of those.
        verifications: loads that recomputed the checksum; a file is verified once until it changes.
        puts: packets written.
        bytes_put: of those.
        evictions: packets that made room under the byte cap.
        bytes_evicted: of those.
        damaged_rows: rows whose text was not believed.
    """

    hits: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=dict)
    loads: int = 0
    bytes_loaded: int = 0
    verifications: int = 0
    puts: int = 0
    bytes_put: int = 0
    evictions: int = 0
    bytes_evicted: int = 0
    damaged_rows: int = 0


class StoreMetrics:
    """Counters that threads may share."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._lock = Lock()

    def count(self, **amounts: int) -> None:
        """Add to counters, by the names :class:`StoreCounts` has."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def miss(self, reason: MissReason) -> None:
        """Count a packet that was asked for and not given."""
        with self._lock:
            self._misses[reason] += 1

    def snapshot(self) -> StoreCounts:
        """All counts at this moment."""
        with self._lock:
            return StoreCounts(misses=dict(self._misses), **self._counts)


class Tier(Protocol):
    """Packets in one kind of memory: ``disk``, ``memory``, or copies in ``host`` memory and on the ``device``.

    Attributes:
        metrics: what was counted of it.
    """

    metrics: StoreMetrics

    def __len__(self) -> int:
        """Number of packets in it now."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes they take."""
        ...
