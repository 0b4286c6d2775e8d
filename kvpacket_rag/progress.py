"""What an ingest tells while it runs, and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far an ingest is.

    Attributes:
        tokens_done: of packets that were made, or turned up meanwhile.
        tokens_total: of all packets that were missing when the ingest began; equal chunks share one.
        tokens_encoded: of ``tokens_done``, those that were made here.
        seconds: since encoding began.
    """

    tokens_done: int
    tokens_total: int
    tokens_encoded: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Rate of encoding; 0 while nothing was encoded."""
        return self.tokens_encoded / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while there is no rate."""
        rate = self.tokens_per_second
        return (self.tokens_total - self.tokens_done) / rate if rate else None


@dataclass(slots=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        added, updated, unchanged: documents. One counts as updated also if its metadata alone changed, or if
            the store had lost its packets.
        skipped: documents left out, with the reason.
        chunks: of the added and updated documents.
        packets_encoded: packets that were not in the store before.
        tokens_encoded: tokens of those.
        seconds: spent on encoding and embedding.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    chunks: int = 0
    packets_encoded: int = 0
    tokens_encoded: int = 0
    seconds: float = 0.0


OnProgress = Callable[[IngestProgress], None]
