"""The approximate search finds what the exact one finds, and nothing that was removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from index_samples import DIM, chunks_of, cosines, fill, ids_of, vectors_of

from kvpacket_rag import nearest
from kvpacket_rag.chunk import Chunk
from kvpacket_rag.index import PacketIndex


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PacketIndex]:
    """An index that searches along a graph however few its vectors are."""
    monkeypatch.setattr(nearest, "GRAPH_FROM", 1)
    opened = PacketIndex.open(tmp_path / "graph", kind="hnsw")
    yield opened
    opened.close()


def test_the_graph_finds_what_the_scan_finds(graph: PacketIndex) -> None:
    vectors = fill(graph, 600)
    assert graph.kind == "hnsw"
    for query in vectors_of(20, seed=5):
        assert ids_of(graph.search(query, 5)) == [f"c{i}" for i in np.argsort(-cosines(vectors, query))[:5]]


def test_the_graph_never_returns_what_was_deleted(graph: PacketIndex) -> None:
    vectors, alive = fill(graph, 400), set(range(400))
    for start in range(0, 360, 40):  # crosses the point where the graph is built anew
        gone = range(start, start + 40)
        graph.delete([f"c{i}" for i in gone])
        alive -= set(gone)
        for count in (1, 5, 400):
            found = {int(name[1:]) for name in ids_of(graph.search(vectors[start], count))}
            assert found <= alive
            assert len(found) == min(count, len(alive))


def test_where_is_complete_on_the_graph(graph: PacketIndex) -> None:
    vectors = fill(graph, 600)
    query = vectors_of(1, seed=6)[0]
    graph.delete(["c103"])
    rare = [i for i in np.argsort(-cosines(vectors, query)) if i % 100 == 3 and i != 103]
    hits = graph.search(query, 9, where=lambda chunk: chunk.metadata["page"] % 100 == 3)
    assert ids_of(hits) == [f"c{i}" for i in rare]


def test_the_graph_takes_updates_and_can_be_emptied(graph: PacketIndex) -> None:
    vectors = fill(graph, 300)
    graph.add(chunks_of(300)[:200], -vectors[:200], ["new"] * 200)
    assert [graph.search(-vectors[i], 1)[0].chunk.chunk_id for i in range(0, 200, 20)] == [
        f"c{i}" for i in range(0, 200, 20)
    ]
    graph.delete([f"c{i}" for i in range(300)])
    assert graph.search(vectors[0], 3) == []
    graph.add([Chunk("a", "")], vectors[:1], ["p"])
    assert ids_of(graph.search(vectors[0], 3)) == ["a"]


def test_the_graph_does_not_keep_many_removed_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "GRAPH_FROM", 1)
    found = nearest.NearestVectors(DIM, "hnsw")
    found.add(np.arange(100), vectors_of(100).astype(np.float32))
    for start in range(0, 90, 5):
        found.remove(np.arange(start, start + 5))
        assert found._index.ntotal <= 1.25 * len(found)
