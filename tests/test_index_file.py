"""The index after reopening, beside other processes and threads, and where its file is not what it should be."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_samples import DIM, chunks_of, fill, ids_of, vectors_of

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError, StoreFormatError, StoreFullError
from kvpacket_rag.index import FILE_NAME, PacketIndex
from kvpacket_rag.index_file import FORMAT_VERSION
from kvpacket_rag.nearest import NearestVectors


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PacketIndex]:
    opened = PacketIndex.open(tmp_path / "index")
    yield opened
    opened.close()


def test_a_reopened_index_gives_identical_hits(tmp_path: Path) -> None:
    index = PacketIndex.open(tmp_path)
    fill(index, 200)
    index.delete([f"c{i}" for i in range(0, 200, 9)])
    index.set_setting("embedder", "mini")
    before = [index.search(query, 6) for query in vectors_of(10, seed=3)]
    index.close()
    again = PacketIndex.open(tmp_path)
    assert [again.search(query, 6) for query in vectors_of(10, seed=3)] == before
    assert (again.get_setting("embedder"), again.get_setting("other"), again.dim) == ("mini", None, DIM)
    again.close()


def test_memory_and_folder_give_the_same(index: PacketIndex) -> None:
    memory = PacketIndex.open(None)
    query = vectors_of(1, seed=1)[0]
    fill(memory, 100)
    fill(index, 100)
    assert memory.search(query, 10) == index.search(query, 10)
    memory.close()


def test_a_second_handle_sees_every_change_at_its_next_call(tmp_path: Path) -> None:
    one, two = PacketIndex.open(tmp_path), PacketIndex.open(tmp_path)
    vectors = fill(one, 40)
    assert ids_of(two.search(vectors[8], 1)) == ["c8"]
    one.delete(["c8"])
    two.add([Chunk("c9", "new")], vectors[8:9], ["p"])
    one.add([Chunk("c1", "moved")], -vectors[8:9], ["p"])
    for index in (one, two):
        hits = index.search(vectors[8], 40)
        assert (len(hits), hits[0].chunk.text, hits[-1].chunk.text) == (39, "new", "moved")
        index.close()


def in_another_process(folder: Path, code: str) -> subprocess.Popen[str]:
    imports = "import os, sys, numpy as np\nfrom kvpacket_rag import Chunk, PacketIndex\n"
    return subprocess.Popen([sys.executable, "-c", imports + code, str(folder)], text=True)


def test_what_another_process_deleted_is_not_found(index: PacketIndex, tmp_path: Path) -> None:
    vectors = fill(index, 40)
    assert index.search(vectors[3], 1)[0].chunk.chunk_id == "c3"
    assert in_another_process(tmp_path / "index", "PacketIndex.open(sys.argv[1]).delete(['c3'])").wait(120) == 0
    assert "c3" not in ids_of(index.search(vectors[3], 40))
    assert index.get(["c3"]) == []


def test_a_process_killed_inside_add_leaves_the_index_as_it_was(index: PacketIndex, tmp_path: Path) -> None:
    vectors = fill(index, 10)
    code = """
index = PacketIndex.open(sys.argv[1])
db = index._rows.file._db
db.create_function("die", 0, lambda: os._exit(9))
db.execute("CREATE TEMP TRIGGER killer AFTER INSERT ON vectors WHEN NEW.seq = 12 BEGIN SELECT die(); END")
index.add([Chunk("c1", "new")] + [Chunk(f"n{i}", "") for i in range(3)], np.eye(4, 16), ["p"] * 4)
"""
    assert in_another_process(tmp_path / "index", code).wait(120) == 9
    again = PacketIndex.open(tmp_path / "index")
    assert list(again.rows()) == [(chunk, f"p{i}") for i, chunk in enumerate(chunks_of(10))]
    assert again.search(vectors[1], 10) == index.search(vectors[1], 10)
    again.close()


def test_an_error_inside_add_leaves_rows_and_vectors_as_they_were(index: PacketIndex) -> None:
    vectors = fill(index, 10)
    before = index.search(vectors[1], 10)
    fail = "CREATE TEMP TRIGGER fail AFTER INSERT ON vectors WHEN NEW.seq = 12 BEGIN SELECT RAISE(ABORT, 'no'); END"
    index._rows.file._db.execute(fail)
    with pytest.raises(StoreError, match="no; close it"):
        index.add([Chunk(name, "") for name in ("c1", "x", "y", "z")], vectors_of(4), ["p"] * 4)
    assert index.search(vectors[1], 10) == before
    assert len(index) == 10


def test_a_failure_while_vectors_are_loaded_is_made_good_by_the_next_search(
    index: PacketIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_done(found: NearestVectors, ids: Any, vectors: Any) -> None:
        found._index.add_with_ids(vectors, ids)
        raise MemoryError

    vectors = fill(index, 10)
    expected = index.search(vectors[1], 10)
    index.add([Chunk("x", "")], -vectors[1:2], ["p"])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(NearestVectors, "add", half_done)
        index.search(vectors[1], 1)
    assert index.search(vectors[1], 20)[:10] == expected
    assert ids_of(index.search(-vectors[1], 20)).count("x") == 1


def test_processes_that_start_one_index_together_lose_nothing(tmp_path: Path) -> None:
    code = """
for i in range(10):
    index = PacketIndex.open(sys.argv[1])
    index.add([Chunk(f"{os.getpid()} {i}", "")], np.eye(1, 16, i), ["p"])
    index.close()
"""
    processes = [in_another_process(tmp_path, code) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    index = PacketIndex.open(tmp_path)
    assert len(index.search(np.ones(DIM), 100)) == 40
    index.close()


def test_threads_that_search_and_write_get_whole_answers(index: PacketIndex) -> None:
    vectors = fill(index, 100)
    wrong: list[object] = []

    def search() -> None:
        wrong.extend(hit for _ in range(30) for hit in index.search(vectors[0], 1) if hit.chunk.chunk_id != "c0")

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(10, 30):
        index.delete([f"c{i}"])
    for thread in threads:
        thread.join()
    assert (wrong, len(index)) == ([], 80)


def test_another_number_of_dimensions_is_refused_naming_both(index: PacketIndex, tmp_path: Path) -> None:
    fill(index, 2)
    with pytest.raises(StoreError, match="holds vectors of 16 dimensions, but 8 were given"):
        PacketIndex.open(tmp_path / "index", dim=8)
    PacketIndex.open(tmp_path / "index", dim=16).close()


def test_a_closed_index_says_so(index: PacketIndex) -> None:
    index.close()
    index.close()
    for call in (lambda: index.search(np.ones(DIM), 1), lambda: len(index), lambda: index.delete(["c0"])):
        with pytest.raises(StoreError, match="is closed"):
            call()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot hold an index"):
            PacketIndex.open(path)


@pytest.mark.parametrize("content", [b"hello", b"x" * 5000, b"SQLite format 3\0" + b"\0" * 40])
def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StoreFormatError, match="not a database; choose another folder"):
        PacketIndex.open(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content


@pytest.mark.parametrize("statement", ["CREATE TABLE people (name TEXT)", "PRAGMA application_id = 5"])
def test_the_database_of_another_program_is_refused_and_left_alone(tmp_path: Path, statement: str) -> None:
    db = sqlite3.connect(tmp_path / FILE_NAME)
    db.execute(statement)
    db.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreFormatError, match="database of another program"):
        PacketIndex.open(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_on_a_full_disk_a_change_is_refused_whole(index: PacketIndex) -> None:
    vectors = fill(index, 10)
    before = index.search(vectors[1], 10)
    (pages,) = index._rows.file._db.execute("PRAGMA page_count").fetchone()
    index._rows.file._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreFullError, match="make room on the disk"):
        index.add([Chunk("c1", "x" * 100_000)], vectors_of(1), ["p"])
    assert index.search(vectors[1], 10) == before
    index.add([Chunk("c1", "small")], vectors_of(1), ["p"])


def test_the_file_does_not_keep_deleted_text(index: PacketIndex, tmp_path: Path) -> None:
    index.add([Chunk("a", "the secret"), Chunk("b", "stays")], vectors_of(2), ["p", "p"])
    index.delete(["a"])
    index.close()
    content = b"".join(file.read_bytes() for file in (tmp_path / "index").iterdir())
    assert b"stays" in content
    assert b"secret" not in content


def test_another_format_version_is_refused_naming_both(index: PacketIndex, tmp_path: Path) -> None:
    index._rows.file._db.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    with pytest.raises(StoreFormatError, match=f"has format {FORMAT_VERSION + 1}.*reads format {FORMAT_VERSION}"):
        PacketIndex.open(tmp_path / "index")


def test_a_damaged_vector_is_told_of_at_opening(
    index: PacketIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(index, 3)
    index._rows.file._db.execute("UPDATE vectors SET vector = zeroblob(64) WHERE seq = 2")
    again = PacketIndex.open(tmp_path / "index")
    assert again.lost == 1 and "1 chunks are damaged and passed over; 'kvpacket check" in caplog.text
    again.close()


def test_an_unknown_kind_or_dimension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'ivf' is unknown"):
        PacketIndex.open(tmp_path, kind="ivf")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="0 dimensions"):
        PacketIndex.open(tmp_path, dim=0)
