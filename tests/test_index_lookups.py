"""SQLite's own indexes are damaged: every call does what it says to the chunk it names, or is refused."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_store import SIGNATURE, make_packet, same

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.cli import main
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import FILE_NAME, PacketIndex
from kvpacket_rag.journal import remove_document
from kvpacket_rag.store import DiskStore

NUMBER = 8
PACKETS = [f"{n:064x}" for n in range(NUMBER)]
VECTORS = (np.eye(NUMBER) + 0.01).astype(np.float32)
PAGE = 8192


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds an index of eight chunks of a document each; the disk is not waited for."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    with contextlib.closing(PacketIndex.open(tmp_path)) as index:
        chunks = [Chunk(f"chunk-{n}", f"text {n}", f"doc-{n}", {"page": n}) for n in range(NUMBER)]
        index.add(chunks, VECTORS, PACKETS)
    return tmp_path


def flip(folder: Path, name: str, entry: bytes, offset: int, mask: int) -> None:
    """Change one byte near an entry of one of SQLite's trees, as a disk would."""
    path = folder / FILE_NAME
    with contextlib.closing(sqlite3.connect(path)) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchall()
    content = bytearray(path.read_bytes())
    place = content.index(entry, (root - 1) * PAGE, root * PAGE) + offset
    content[place] ^= mask
    path.write_bytes(content)


def flip_root(path: Path, name: str) -> None:
    """Make the first page of one of SQLite's trees no page of a tree."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchall()
        ((size,),) = db.execute("PRAGMA page_size").fetchall()
    content = bytearray(path.read_bytes())
    content[(root - 1) * size] ^= 64
    path.write_bytes(content)


HARM = {
    "a name leads to another row": ("sqlite_autoindex_chunks_1", b"chunk-2", 7, 4),
    "a name leads nowhere": ("sqlite_autoindex_chunks_1", b"chunk-2", 7, 64),
    "a name is gone": ("sqlite_autoindex_chunks_1", b"chunk-2", 0, 32),
    "a document leads to another row": ("chunks_by_document", b"doc-2", 5, 4),
    "a document is gone": ("chunks_by_document", b"doc-2", 0, 32),
    "a row leads to the vector of another": ("sqlite_autoindex_vectors_1", b"\x03\x01\x01\x03\x03", 4, 4),
}


@pytest.fixture(params=HARM.values(), ids=HARM)
def harmed(request: pytest.FixtureRequest, folder: Path) -> Path:
    flip(folder, *request.param)
    return folder


def rows(index: PacketIndex) -> dict[str, tuple[str, Any, str, int]]:
    found = {}
    for chunk, packet in index.rows():
        ((hit,),) = [index.search(index.vectors([chunk.chunk_id])[0], 1)]
        assert hit.chunk == chunk and hit.packet_id == packet
        found[chunk.chunk_id] = (
            chunk.text,
            dict(chunk.metadata),
            packet,
            int(index.vectors([chunk.chunk_id])[0].argmax()),
        )
    return found


WHOLE: dict[str, Any] = {f"chunk-{n}": (f"text {n}", {"page": n}, PACKETS[n], n) for n in range(NUMBER)}
CHANGES: dict[str, tuple[Callable[[PacketIndex], object], dict[str, Any]]] = {
    "delete": (lambda index: index.delete(["chunk-2"]), {"chunk-2": None}),
    "replace": (
        lambda index: index.add([Chunk("chunk-2", "new", "doc-2")], VECTORS[2:3], PACKETS[2:3]),
        {"chunk-2": ("new", {}, PACKETS[2], 2)},
    ),
    "set_metadata": (lambda index: index.set_metadata("chunk-2", {}), {"chunk-2": ("text 2", {}, PACKETS[2], 2)}),
    "set_packet_ids": (
        lambda index: index.set_packet_ids({"chunk-2": "f" * 64}),
        {"chunk-2": ("text 2", {"page": 2}, "f" * 64, 2)},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_reaches_the_chunk_that_it_names(harmed: Path, change: str) -> None:
    act, expected = CHANGES[change]
    with contextlib.closing(PacketIndex.open(harmed)) as index:
        act(index)
    with contextlib.closing(PacketIndex.open(harmed)) as index:
        assert rows(index) == {name: row for name, row in (WHOLE | expected).items() if row}
        assert (index.damaged(), index.faults()) == ({}, [])


def test_what_is_read_is_of_the_chunk_that_was_named(harmed: Path) -> None:
    with contextlib.closing(PacketIndex.open(harmed)) as index:
        assert [chunk.text for chunk in index.get([f"chunk-{n}" for n in range(NUMBER)])] == [
            f"text {n}" for n in range(NUMBER)
        ]
        assert index.vectors(list(WHOLE)).argmax(axis=1).tolist() == list(range(NUMBER))
        assert [index.chunk_ids(f"doc-{n}") for n in range(NUMBER)] == [[name] for name in WHOLE]
        assert index.get(["chunk-9"]) == [] and index.chunk_ids("doc-9") == []


def test_a_document_is_removed_and_no_other(harmed: Path) -> None:
    with contextlib.closing(PacketIndex.open(harmed)) as index, contextlib.closing(DiskStore(harmed)) as store:
        assert remove_document(index, store, "doc-2") == 1
        assert rows(index) == {name: row for name, row in WHOLE.items() if name != "chunk-2"}


def test_check_tells_of_it_and_repairs_it_without_loss(harmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(harmed)]) == 3
    told = capsys.readouterr().out
    assert "sqlite_autoindex" in told or "chunks_by_document" in told
    assert main(["check", str(harmed), "--repair"]) == 0
    assert main(["check", str(harmed)]) == 0
    with contextlib.closing(PacketIndex.open(harmed)) as index:
        assert rows(index) == WHOLE and index.faults() == []


@pytest.mark.parametrize("name", ["sqlite_autoindex_chunks_1", "chunks_by_document", "sqlite_autoindex_vectors_1"])
def test_an_index_that_is_no_tree_any_more_is_made_anew_without_loss(folder: Path, name: str) -> None:
    flip_root(folder / FILE_NAME, name)
    assert main(["check", str(folder)]) == 3
    with pytest.raises(StoreError, match="kvpacket check DIR --repair"):  # noqa: SIM117
        with contextlib.closing(PacketIndex.open(folder)) as index:
            index.delete(["chunk-2"])
    assert [main(["check", str(folder), *options]) for options in (["--repair"], [])] == [0, 0]
    with contextlib.closing(PacketIndex.open(folder)) as index:
        assert rows(index) == WHOLE and index.faults() == []
        assert index.delete(["chunk-2"]) == ["chunk-2"]


@pytest.mark.parametrize("name", ["sqlite_autoindex_packets_1", "packets_by_use", "owners_by_owner"])
def test_the_catalogue_of_packets_is_repaired_without_loss(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    with contextlib.closing(DiskStore(tmp_path)) as store:
        for seed in range(4):
            store.put(make_packet(seed), f"text {seed}", f"owner {seed}")
    flip_root(tmp_path / "packets.sqlite", name)
    assert main(["check", str(tmp_path)]) in (1, 3)
    assert [main(["check", str(tmp_path), *options]) for options in (["--repair"], [])] == [0, 0]
    with contextlib.closing(DiskStore(tmp_path)) as store:
        assert [known.text for known in store.known(SIGNATURE)] == [f"text {seed}" for seed in range(4)]
        assert all(same(store.get(make_packet(seed).packet_id, SIGNATURE), make_packet(seed)) for seed in range(4))
        assert store.drop_owners(["owner 2"]) == [make_packet(2).packet_id]


def test_a_row_that_claims_the_id_of_another_stops_changes_until_it_is_repaired(folder: Path) -> None:
    flip(folder, "chunks", b"chunk-3", 6, 1)  # it now says chunk-2
    with contextlib.closing(PacketIndex.open(folder)) as index:
        with pytest.raises(StoreError, match="kvpacket check DIR --repair"):
            index.delete(["chunk-2"])
        assert len(index) == NUMBER
    assert main(["check", str(folder), "--repair"]) == 0
    assert main(["check", str(folder)]) == 0
    with contextlib.closing(PacketIndex.open(folder)) as index:
        left = {name: row for name, row in WHOLE.items() if name != "chunk-3"}
        assert rows(index).items() <= left.items()
        assert "chunk-2" not in rows(index) or rows(index)["chunk-2"] == WHOLE["chunk-2"]
