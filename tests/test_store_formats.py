"""Folders that earlier versions wrote are read as they were meant."""

from __future__ import annotations

import contextlib
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_samples import documents, pipeline
from safetensors import safe_open
from test_store import SIGNATURE, closing, make_packet  # noqa: F401 (closing is a fixture)

from kvpacket_rag import database
from kvpacket_rag.chunk import Chunk
from kvpacket_rag.cli import main
from kvpacket_rag.errors import StoreFormatError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import change_lock
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

DATA = Path(__file__).parent / "data"
TEXTS = [
    "Ada Marlow signed the lease of the harbour office in March 2021.",
    "Refunds are paid within nine working days.",
]


def expected(seed: int) -> tuple[torch.Tensor, ...]:
    """What the fixtures were filled with: numbers in order, moved up by the seed."""
    return tuple(torch.arange(24 * width, dtype=torch.float32).reshape(2, 3, 4, width) + seed for width in (8, 4))


@pytest.fixture(params=sorted(path.name for path in DATA.glob("store-format-*.zip")))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small index with its packets, as the version of that format wrote it."""
    with zipfile.ZipFile(DATA / request.param) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


def test_a_fixture_is_kept_of_every_format() -> None:
    assert {path.stem[-1] for path in DATA.glob("store-format-*.zip")} == {"1", "2", "3", "4"}


def version_in(path: Path) -> str:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return str(file.metadata()["format_version"])
    if path.suffix != ".sqlite":
        return ""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        sql = "PRAGMA user_version" if path.stem == "index" else "SELECT value FROM meta WHERE key = 'format_version'"
        return str(connection.execute(sql).fetchone()[0])


def test_every_file_of_a_folder_says_its_format_but_for_a_lock_that_holds_nothing(
    backbone: Any, tmp_path: Path
) -> None:
    with pipeline(backbone, tmp_path, lock=change_lock(tmp_path)) as rag:
        rag.add(documents())
        rag.engine.store._folder.set_aside(next(rag.index.rows())[1])  # type: ignore[attr-defined]
    versions = {path.name: version_in(path) for path in tmp_path.rglob("*") if path.is_file()}
    packets = {name: found for name, found in versions.items() if name.endswith(".safetensors")}
    assert len(packets) == 4 and set(packets.values()) == {"1"}
    rest = {name: found for name, found in versions.items() if name not in packets}
    assert rest == {"packets.sqlite": "3", "index.sqlite": "4", ".changing.lock": ""}
    assert (tmp_path / ".changing.lock").read_bytes() == b""


@pytest.mark.parametrize("opener", [DiskStore, PacketIndex.open])
def test_an_earlier_format_that_cannot_be_written_is_refused_with_the_command_that_migrates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Any
) -> None:
    def refuse(*_: object) -> None:
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_READONLY, "SQLITE_READONLY"
        raise error

    with zipfile.ZipFile(DATA / "store-format-1.zip") as archive:
        archive.extractall(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(StoreFormatError, match=f"run 'kvpacket check {tmp_path}'"):
        patch.setattr(database, "use_write_ahead_log", refuse)
        opener(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    opener(tmp_path).close()


def test_a_store_of_an_earlier_format_gives_its_packets_and_takes_new_ones(old: Path) -> None:
    store = DiskStore(old)
    assert [chunk.text for chunk in store.known(SIGNATURE)] == TEXTS
    for seed in range(2):
        found = store.get(packet_id([seed], SIGNATURE), SIGNATURE)
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, expected(seed), strict=True))
        assert (found.span, found.num_tokens) == (6, 4)
    store.put(make_packet(7), "new", "owner")
    store.close()
    again = DiskStore(old)
    assert again.check().is_sound and len(again) == 3 and again.metrics.snapshot().damaged_rows == 0
    assert again.drop_owners(["c0"]) == [packet_id([0], SIGNATURE)]


def test_an_index_of_an_earlier_format_gives_its_chunks_and_takes_new_ones(old: Path) -> None:
    with_ids = [(Chunk(f"c{n}", TEXTS[n], f"d{n}", {"title": f"T{n}"}), packet_id([n], SIGNATURE)) for n in range(2)]
    index = PacketIndex.open(old)
    assert list(index.rows()) == with_ids and index.get_setting("embedder") == "words"
    assert index.search([0, 1, 0, 0], 1)[0].chunk == with_ids[1][0]
    index.add([Chunk("c2", "new")], [[0.0, 0, 1, 0]], ["p"])
    index.close()
    again = PacketIndex.open(old)
    assert (len(again), again.damaged(), again.faults()) == (3, {}, [])
    again.close()


OLD_STATEMENTS = {
    "settings": "INSERT INTO settings (key, value) VALUES ('unsettled', '{}') ON CONFLICT (key) DO NOTHING",
    "chunks": "INSERT INTO chunks (chunk_id, document_id, text, metadata, packet_id) VALUES ('a', 'b', 'c', '{}', 'p')",
    "vectors": "INSERT INTO vectors (seq, vector) VALUES (9, x'00')",
    "owners": "INSERT INTO owners (packet_id, owner) VALUES ('p', 'o')",
}


@pytest.mark.parametrize("table", OLD_STATEMENTS)
def test_a_process_of_an_earlier_version_that_is_still_open_can_write_nothing_unsealed(old: Path, table: str) -> None:
    if version_in(old / "index.sqlite") == "4":
        return  # nothing is brought up to date
    file = old / ("packets.sqlite" if table == "owners" else "index.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as still_open:
        still_open.execute("SELECT COUNT(*) FROM sqlite_master")
        PacketIndex.open(old).close()
        DiskStore(old).close()
        with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
            still_open.execute(OLD_STATEMENTS[table])
    assert main(["check", str(old)]) == 0


def test_an_index_that_a_later_version_has_changed_is_not_written_any_more(old: Path) -> None:
    with contextlib.closing(PacketIndex.open(old)) as index:
        with contextlib.closing(sqlite3.connect(old / "index.sqlite")) as later:
            later.execute("PRAGMA user_version = 9")
        with pytest.raises(StoreFormatError, match=r"brought to format 9 by another version.*open it again"):
            index.set_setting("embedder", "other")
    with contextlib.closing(DiskStore(old)) as store:
        with contextlib.closing(sqlite3.connect(old / "packets.sqlite")) as later:
            later.execute("UPDATE meta SET value = '9' WHERE key = 'format_version'")
            later.commit()
        with pytest.raises(StoreFormatError, match=r"brought to format 9 by another version.*open it again"):
            store.put(make_packet(7), "new", "owner")


DAMAGED_CELLS = {
    "a text": ("index.sqlite", "chunks", "UPDATE chunks SET text = NULL WHERE rowid = 1"),
    "an id": ("index.sqlite", "chunks", "UPDATE chunks SET chunk_id = NULL WHERE rowid = 1"),
    "no vector": ("index.sqlite", "vectors", "UPDATE vectors SET vector = NULL WHERE rowid = 1"),
    "a number": ("index.sqlite", "vectors", "UPDATE vectors SET vector = 5 WHERE rowid = 1"),
    "a vector of text": ("index.sqlite", "vectors", "UPDATE vectors SET vector = 'abc' WHERE rowid = 1"),
    "a place of text": ("index.sqlite", "vectors", "UPDATE vectors SET seq = 'abc' WHERE rowid = 1"),
    "a packet's text": ("packets.sqlite", "packets", "UPDATE packets SET text = NULL WHERE number = 1"),
}


@pytest.mark.parametrize("harm", DAMAGED_CELLS)
@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_one_damaged_cell_does_not_keep_a_folder_from_being_brought_up_to_date(
    tmp_path: Path, harm: str, version: str
) -> None:
    with zipfile.ZipFile(DATA / f"store-format-{version}.zip") as archive:
        archive.extractall(tmp_path)
    file, table, sql = DAMAGED_CELLS[harm]
    with contextlib.closing(sqlite3.connect(tmp_path / file)) as db:
        ((layout,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        db.execute("PRAGMA writable_schema = ON")
        change = "UPDATE sqlite_master SET sql = ? WHERE name = ?"
        for statement, values in (
            (change, (layout.replace(" NOT NULL", ""), table)),
            (sql, ()),
            (change, (layout, table)),
        ):
            db.execute(statement, values)
            db.commit()
            db.execute("PRAGMA writable_schema = RESET")
            db.execute("PRAGMA writable_schema = ON")
    with contextlib.closing(PacketIndex.open(tmp_path)) as index, contextlib.closing(DiskStore(tmp_path)) as store:
        assert TEXTS[1] in [hit.chunk.text for hit in index.search([1.0, 1, 1, 1], 2)]
        assert TEXTS[1] in [known.text for known in store.known(SIGNATURE)]


def test_bringing_a_folder_up_to_date_may_be_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(DATA / "store-format-1.zip") as archive:
        archive.extractall(tmp_path)

    def cut_short(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Exception, match="user-defined function raised"):
        patch.setattr("kvpacket_rag.store.schema._seal", cut_short)
        DiskStore(tmp_path)
    with sqlite3.connect(tmp_path / "packets.sqlite") as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone() == ("1",)
    connection.close()
    assert [chunk.text for chunk in DiskStore(tmp_path).known(SIGNATURE)] == TEXTS


@pytest.mark.parametrize("version", ["0", "4", "x", "-1", "1.5"])
def test_a_format_that_is_not_known_is_refused_naming_both(tmp_path: Path, version: str) -> None:
    with zipfile.ZipFile(DATA / "store-format-1.zip") as archive:
        archive.extractall(tmp_path)
    with sqlite3.connect(tmp_path / "packets.sqlite") as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format_version'", (version,))
    connection.close()
    before = (tmp_path / "packets.sqlite").read_bytes()
    with pytest.raises(
        StoreFormatError, match=f"format version {version}, expected 3 or an earlier one; use the version"
    ):
        DiskStore(tmp_path)
    assert (tmp_path / "packets.sqlite").read_bytes() == before
