"""Chunks and vectors for the tests of the index, and the same cosines by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpacket_rag.chunk import Chunk, Hit
from kvpacket_rag.index import PacketIndex

DIM = 16


def vectors_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, DIM))


def chunks_of(count: int) -> list[Chunk]:
    return [Chunk(f"c{i}", f"text {i}", f"d{i // 10}", {"page": i}) for i in range(count)]


def fill(index: PacketIndex, count: int, seed: int = 0) -> Any:
    vectors = vectors_of(count, seed)
    index.add(chunks_of(count), vectors, [f"p{i}" for i in range(count)])
    return vectors


def cosines(vectors: Any, query: Any) -> Any:
    return vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)


def ids_of(hits: list[Hit]) -> list[str]:
    return [hit.chunk.chunk_id for hit in hits]
