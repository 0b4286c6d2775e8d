"""The index against numpy, through every change, and against bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_samples import DIM, chunks_of, cosines, fill, ids_of, vectors_of

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PacketIndex]:
    opened = PacketIndex.open(tmp_path / "index")
    yield opened
    opened.close()


def test_hits_and_scores_equal_numpy(index: PacketIndex) -> None:
    vectors = fill(index, 300)
    for query in vectors_of(20, seed=1):
        expected = cosines(vectors, query)
        order = np.argsort(-expected)[:7]
        hits = index.search(query, 7)
        assert ids_of(hits) == [f"c{i}" for i in order]
        assert [hit.packet_id for hit in hits] == [f"p{i}" for i in order]
        np.testing.assert_allclose([hit.score for hit in hits], expected[order], atol=1e-7)  # float32 vectors


def test_a_hit_carries_the_whole_chunk(index: PacketIndex) -> None:
    chunk = Chunk("a", "two\nlines \x00 and ünïcode", "doc", {"list": [1, {"x": None}], "n": 1.5})
    index.add([chunk], vectors_of(1), ["p"])
    assert index.search(vectors_of(1)[0], 1)[0].chunk == chunk


def test_equal_scores_come_in_insertion_order_though_more_tie_than_are_asked_for(index: PacketIndex) -> None:
    one, other = vectors_of(2)
    for start in range(0, 100, 7):  # several batches, so that the rows do not lie in one block
        part = chunks_of(100)[start : start + 7]
        index.add(part, [one * (i + 1) for i in range(len(part))], ["p"] * len(part))
    index.add([Chunk("far", ""), chunks_of(1)[0]], [other, one], ["p", "p"])  # c0 keeps its place
    assert ids_of(index.search(one, 5)) == ["c0", "c1", "c2", "c3", "c4"]
    assert ids_of(index.search(one, 101)) == [f"c{i}" for i in range(100)] + ["far"]


def test_asking_for_more_than_there_is_gives_all(index: PacketIndex) -> None:
    fill(index, 5)
    assert len(index.search(vectors_of(1)[0], 1000)) == 5


def test_an_empty_index_has_no_hits(index: PacketIndex) -> None:
    assert index.search(np.ones(DIM), 3) == []
    assert (len(index), index.dim, index.documents(), list(index.rows())) == (0, None, [], [])
    index.add([], np.empty((0, DIM)), [])
    assert len(index) == 0


def test_where_finds_the_k_best_of_what_matches_however_rare(index: PacketIndex) -> None:
    vectors = fill(index, 500)
    query = vectors_of(1, seed=2)[0]
    rare = [i for i in np.argsort(-cosines(vectors, query)) if i % 100 == 3]
    hits = index.search(query, 3, where=lambda chunk: chunk.metadata["page"] % 100 == 3)
    assert ids_of(hits) == [f"c{i}" for i in rare[:3]]
    assert len(index.search(query, 9, where=lambda chunk: chunk.metadata["page"] % 100 == 3)) == 5
    assert index.search(query, 9, where=lambda chunk: False) == []


def test_where_may_read_the_index_and_not_change_it(index: PacketIndex) -> None:
    fill(index, 30)
    query = vectors_of(1)[0]
    assert len(index.search(query, 2, where=lambda chunk: index.get([chunk.chunk_id]) == [chunk])) == 2
    with pytest.raises(StoreError, match="while it is searched"):
        index.search(query, 2, where=lambda chunk: bool(index.delete([chunk.chunk_id])))
    assert len(index) == 30


def test_scores_stay_within_one(index: PacketIndex) -> None:
    vectors = fill(index, 200)
    scores = [index.search(vector, 1)[0].score for vector in vectors]
    assert max(scores) <= 1.0
    assert min(scores) > 0.999999


def test_only_the_direction_of_a_vector_counts(index: PacketIndex) -> None:
    vector = vectors_of(1)[0]
    index.add(chunks_of(4), [vector, vector * 1e-30, vector * 1e30, vector.astype(np.float16)], ["p"] * 4)
    np.testing.assert_allclose([hit.score for hit in index.search(vector * 1e-200, 4)], 1.0, atol=1e-6)  # float16


def test_a_deleted_chunk_is_gone_at_once(index: PacketIndex) -> None:
    vectors = fill(index, 50)
    assert index.delete(["c7", "unknown", "c3", "c7"]) == ["c7", "c3"]
    assert not {"c3", "c7"} & set(ids_of(index.search(vectors[7], 50)))
    assert (len(index), index.get(["c3", "c4"])) == (48, [chunks_of(50)[4]])
    assert index.delete([]) == []


def test_an_update_replaces_text_vector_and_packet_and_keeps_the_place(index: PacketIndex) -> None:
    vectors = fill(index, 20)
    new = vectors_of(1, seed=9)
    index.add([Chunk("c5", "new text", "d0")], new, ["new packet"])
    hit = index.search(new[0], 1)[0]
    assert (hit.chunk.text, hit.packet_id, hit.score > 0.999) == ("new text", "new packet", True)
    assert index.search(vectors[5], 1)[0].score < 0.999
    assert index.chunk_ids("d0") == [f"c{i}" for i in range(10)]
    assert len(index) == 20


def test_of_one_id_twice_in_a_batch_the_last_counts(index: PacketIndex) -> None:
    vectors = vectors_of(3)
    index.add([Chunk("a", "1"), Chunk("b", "2"), Chunk("a", "3")], vectors, ["p1", "p2", "p3"])
    assert [(chunk.text, packet_id) for chunk, packet_id in index.rows()] == [("3", "p3"), ("2", "p2")]
    assert ids_of(index.search(vectors[2], 1)) == ["a"]


def test_metadata_and_packet_ids_change_without_touching_the_vector(index: PacketIndex) -> None:
    vectors = fill(index, 5)
    index.set_metadata("c2", {"page": "two"})
    index.set_packet_ids({"c2": "again", "unknown": "skipped"})
    hit = index.search(vectors[2], 1)[0]
    assert (hit.chunk.metadata, hit.packet_id, hit.chunk.text) == ({"page": "two"}, "again", "text 2")
    with pytest.raises(StoreError, match="no chunk 'unknown'"):
        index.set_metadata("unknown", {})


def test_vectors_come_back_as_directions_in_the_order_asked(index: PacketIndex) -> None:
    vectors = fill(index, 5)
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(index.vectors(["c3", "c0", "c3"]), expected[[3, 0, 3]], atol=1e-7)  # float32
    assert index.vectors([]).shape == (0, DIM)
    with pytest.raises(StoreError, match="no chunk 'nope'"):
        index.vectors(["c0", "nope"])


def test_documents_and_rows_are_listed_in_insertion_order(index: PacketIndex) -> None:
    fill(index, 1234)
    assert index.documents() == [f"d{i}" for i in range(124)]
    assert index.chunk_ids("d3") == [f"c{i}" for i in range(30, 40)]
    assert index.chunk_ids("unknown") == []
    assert list(index.rows()) == [(chunk, f"p{i}") for i, chunk in enumerate(chunks_of(1234))]


def test_rows_may_change_while_they_are_listed(index: PacketIndex) -> None:
    fill(index, 700)
    listed = []
    for chunk, _ in index.rows():
        listed.append(chunk.chunk_id)
        index.delete([f"c{i}" for i in range(600, 700)] if len(listed) == 1 else [])
    assert listed == [f"c{i}" for i in range(600)]


def test_an_emptied_index_takes_another_embedder(index: PacketIndex) -> None:
    fill(index, 3)
    index.delete(["c0", "c1", "c2"])
    index.add([Chunk("a", "")], [[1.0, 2.0]], ["p"])
    assert (index.dim, ids_of(index.search([1, 2], 3))) == (2, ["a"])


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((2, DIM)), "chunk 'c0' holds only zeros"),
        ([[1.0] * DIM, [float("nan")] * DIM], "chunk 'c1' holds NaN"),
        ([[1.0] * DIM, [float("inf")] + [1.0] * (DIM - 1)], "chunk 'c1' holds NaN or infinity"),
        (np.ones((2, DIM + 1)), r"shape \(2, 17\), expected \(2, 16\)"),
        (np.ones((3, DIM)), r"shape \(3, 16\), expected \(2, 16\)"),
        (np.ones(DIM), r"shape \(16,\)"),
        ([[1.0], [1.0, 2.0]], "cannot be read"),
        (["a", "b"], "cannot be read"),
    ],
)
def test_a_vector_without_direction_or_of_another_shape_is_refused(
    index: PacketIndex, vectors: Any, message: str
) -> None:
    index.add([Chunk("old", "")], vectors_of(1), ["p"])
    with pytest.raises(StoreError, match=message):
        index.add(chunks_of(2), vectors, ["p", "p"])
    assert [chunk.chunk_id for chunk, _ in index.rows()] == ["old"]


@pytest.mark.parametrize("query", [np.zeros(DIM), np.full(DIM, np.nan), np.ones(DIM - 1), np.ones((1, DIM))])
def test_a_question_without_direction_or_of_another_shape_is_refused(index: PacketIndex, query: Any) -> None:
    fill(index, 3)
    with pytest.raises(StoreError, match=r"expected|the question"):
        index.search(query, 1)


@pytest.mark.parametrize("k", [0, -1])
def test_asking_for_no_hit_is_an_error(index: PacketIndex, k: int) -> None:
    with pytest.raises(StoreError, match="at least one"):
        index.search(np.ones(DIM), k)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk("a", "", "", {"fine": 1, "when": object()}), "metadata 'when': its value cannot be written as JSON"),
        (Chunk("a", "", "", {1: "x"}), "the key is of type int"),  # type: ignore[dict-item]
        (Chunk("a", "bad \udc80 text"), "text has half a surrogate pair at character 4"),
    ],
)
def test_what_cannot_be_stored_is_named(index: PacketIndex, chunk: Chunk, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        index.add([Chunk("good", ""), chunk], vectors_of(2), ["p", "p"])
    assert len(index) == 0


def test_packet_ids_must_match_the_chunks(index: PacketIndex) -> None:
    with pytest.raises(StoreError, match="2 chunks came with 1 packet ids"):
        index.add(chunks_of(2), vectors_of(2), ["p"])
