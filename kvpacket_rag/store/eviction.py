"""Which packets make room under a byte cap."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Set
from typing import Literal, NamedTuple

from kvpacket_rag.errors import StoreError

Eviction = Literal["lru", "cost"]

_WINDOW = 16  # least recently used packets among which the cheapest to make again goes first
_ATTENTION_TOKENS = 4096  # length at which attention takes about as long as all else in a forward


class Candidate(NamedTuple):
    """A packet that may go.

    Attributes:
        packet_id: of the packet.
        num_tokens: of its text.
        size_bytes: that its going would free.
    """

    packet_id: str
    num_tokens: int
    size_bytes: int

    @property
    def cost_per_byte(self) -> float:
        """Time to encode it again, by byte it frees, in a unit of no matter.

        Estimated from its length, for the store sees no encoder at work: a forward takes time in proportion
        to the tokens, and attention to their square.
        """
        return self.num_tokens * (1 + self.num_tokens / _ATTENTION_TOKENS) / max(self.size_bytes, 1)


def choose(
    candidates: Iterable[Candidate], size_bytes: int, held: Set[str], eviction: Eviction
) -> list[Candidate] | None:
    """Packets that together free ``size_bytes``.

    Args:
        candidates: least recently used first.
        size_bytes: to free.
        held: what running requests hold; it stays.
        eviction: ``"lru"`` takes them in order; ``"cost"`` takes, among the few used least recently, the one
            that is encoded again fastest for the bytes it frees, so that the order of use still counts.

    Returns:
        None when all that is not held would not be enough.
    """
    free = (candidate for candidate in candidates if candidate.packet_id not in held)
    chosen: list[Candidate] = []
    for candidate in free if eviction == "lru" else _cheapest_first(free):
        if size_bytes <= 0:
            return chosen
        chosen.append(candidate)
        size_bytes -= candidate.size_bytes
    return chosen if size_bytes <= 0 else None


def require_eviction(eviction: str) -> None:
    """Refuse an order of eviction that does not exist.

    Raises:
        StoreError: it is none.
    """
    if eviction not in ("lru", "cost"):
        raise StoreError(f"eviction is {eviction!r}; expected 'lru' or 'cost'")


def _cheapest_first(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    window: list[tuple[float, int, Candidate]] = []
    for place, candidate in enumerate(candidates):
        heapq.heappush(window, (candidate.cost_per_byte, place, candidate))
        if len(window) == _WINDOW:
            yield heapq.heappop(window)[2]
    while window:
        yield heapq.heappop(window)[2]
