"""Which generated or given texts are for training and which for testing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from kvpacket_rag.datasets.sample import Split


def in_split(text: str, split: Split) -> bool:
    """Whether a text belongs to a split: by its SHA-256, one in five is "dev"."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % 5 == 0) == (split == "dev")


def draw(rng: random.Random, make: Callable[[random.Random], str], split: Split) -> str:
    """What ``make`` gives, drawn until it belongs to the split."""
    while not in_split(found := make(rng), split):
        pass
    return found
