"""A damaged index: what is whole is found, what is not is counted, named and repaired; nothing crashes."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_samples import documents, pipeline
from test_store import make_packet

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.cli import main
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.errors import KVPacketError, StoreError, StoreFormatError
from kvpacket_rag.index import FILE_NAME, PacketIndex
from kvpacket_rag.store import DiskStore

NUMBER = 6
CHUNKS = [Chunk(f"c{n}", f"text {n} of the harbour office", f"d{n // 2}", {"page": n}) for n in range(NUMBER)]
PACKETS = [f"{n:064x}" for n in range(NUMBER)]
VECTORS = np.eye(NUMBER, 16) + 0.1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds an index of six chunks with a vector each; the disk is not waited for."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    with contextlib.closing(PacketIndex.open(tmp_path)) as index:
        index.add(CHUNKS, VECTORS, PACKETS)
        index.set_setting("chunk_tokens", "256")
    return tmp_path


def statement(folder: Path, *sql: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as db:
        for each in sql:
            db.execute(each)
        db.commit()


def found(folder: Path) -> tuple[set[str], int]:
    """Chunks that searches find, each first for its own vector and just as it was added, and how many were lost."""
    with contextlib.closing(PacketIndex.open(folder)) as index:
        hits = [hit for vector in VECTORS for hit in index.search(vector, NUMBER)]
        right = {(chunk.chunk_id, packet): chunk for chunk, packet in zip(CHUNKS, PACKETS, strict=True)}
        assert all(right[hit.chunk.chunk_id, hit.packet_id] == hit.chunk for hit in hits)
        names = {hit.chunk.chunk_id for hit in hits}
        for chunk, vector in zip(CHUNKS, VECTORS, strict=True):
            assert chunk.chunk_id not in names or index.search(vector, 1)[0].chunk == chunk
        index.get_setting("chunk_tokens")
        return names, index.lost


ROW_DAMAGE = {
    "a narrower vector": "UPDATE vectors SET vector = x'0000803f' WHERE seq = 2",
    "a wider vector": "UPDATE vectors SET vector = zeroblob(68) WHERE seq = 2",
    "half a number": "UPDATE vectors SET vector = x'0000' WHERE seq = 2",
    "an empty vector": "UPDATE vectors SET vector = x'' WHERE seq = 2",
    "a vector of text": "UPDATE vectors SET vector = 'abc' WHERE seq = 2",
    "a vector of another chunk": "UPDATE vectors SET seq = 99 WHERE seq = 2",
    "no vector": "DELETE FROM vectors WHERE seq = 2",
    "a number that is text": "UPDATE vectors SET checksum = 'x' WHERE seq = 2",
    "a text of bytes": "UPDATE chunks SET text = CAST(text AS BLOB) WHERE seq = 2",
    "a text that is none": "UPDATE chunks SET text = CAST(x'ff80' AS TEXT) WHERE seq = 2",
    "an id that is none": "UPDATE chunks SET chunk_id = CAST(x'6380' AS TEXT) WHERE seq = 2",
    "metadata": "UPDATE chunks SET metadata = '[1' WHERE seq = 2",
    "another packet": "UPDATE chunks SET packet_id = 'q' WHERE seq = 2",
    "a digest of text": "UPDATE chunks SET digest = 'q' WHERE seq = 2",
}


@pytest.mark.parametrize("sql", ROW_DAMAGE.values(), ids=ROW_DAMAGE)
def test_a_damaged_row_is_passed_over_counted_and_repaired(folder: Path, sql: str) -> None:
    statement(folder, "PRAGMA ignore_check_constraints = 1", sql)
    assert found(folder) == ({"c0", "c2", "c3", "c4", "c5"}, 1)
    assert main(["check", str(folder)]) == 3 and main(["check", str(folder), "--repair"]) == 0
    assert main(["check", str(folder)]) == 0
    names, lost = found(folder)
    assert lost == 0 and names >= {"c2", "c3", "c4", "c5"} and "c1" not in names


def test_rows_that_changed_places_are_damaged(folder: Path) -> None:
    statement(folder, *(f"UPDATE chunks SET seq = {a} WHERE seq = {b}" for a, b in ((99, 2), (2, 3), (3, 99))))
    assert found(folder) == ({"c0", "c3", "c4", "c5"}, 2)


@pytest.mark.parametrize("sql", ["UPDATE vectors SET vector = x'00'", "UPDATE chunks SET text = 'forged'"])
def test_rows_that_are_all_damaged_are_all_counted(folder: Path, sql: str) -> None:
    statement(folder, sql)
    assert found(folder) == (set(), NUMBER)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE settings SET value = '25' WHERE key = 'chunk_tokens'",
        "UPDATE settings SET value = CAST(value AS BLOB)",
        "UPDATE settings SET key = 'chunk_tokenz'",
        "UPDATE settings SET digest = ''",
    ],
)
def test_damaged_settings_are_refused_and_told_by_check(
    folder: Path, sql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    statement(folder, sql)
    with pytest.raises(StoreError, match=r"is damaged \('chunk_token.'\); move its folder away and ingest"):
        PacketIndex.open(folder)
    assert main(["check", str(folder)]) == 3
    assert "setting 'chunk_token" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["unsettled", "deleting", "remote", "owner_prefix_in_folder"])
def test_whatever_setting_is_damaged_packets_are_verified_and_rows_left(
    folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(PacketIndex.open(folder)) as index:
        index.set_setting(key, "{}")
        rows = len(index)
    with contextlib.closing(DiskStore(folder)) as store:
        store.put(make_packet(1), "text", "owner")
        path = store._folder.path_of(make_packet(1).packet_id)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    statement(folder, f"UPDATE settings SET value = '[]' WHERE key = '{key}'")
    for more in ([], ["--repair"]):
        assert main(["check", str(folder), "--json", *more]) == 3
        found = json.loads(capsys.readouterr().out)
        assert found["faults_of_index"] == [f"setting {key!r} is damaged"]
        assert list(found["damaged_packets"]) == [make_packet(1).packet_id]
        assert ("move the folder away" in found["verdict"]) == bool(more)
    assert not path.exists()  # set aside
    with contextlib.closing(PacketIndex.open(folder, load=False)) as index:
        assert sum(1 for _ in index.rows()) == rows


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_bytes_are_damaged_answers_are_right_or_refused(
    folder: Path, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, chance, outcomes = folder / FILE_NAME, random.Random(8), set()
    whole = path.read_bytes()
    used = [place for place in range(len(whole)) if whole[place]]
    for number in range(rounds):
        content = bytearray(whole)
        place = chance.choice(used if number % 4 else range(len(whole)))
        content[place] = content[place] ^ 1 << chance.randrange(8) if number % 2 else chance.randrange(256)
        path.write_bytes(content)
        try:
            names, lost = found(folder)
            assert lost or len(names) == NUMBER or _tells_of_loss(folder), f"round {number}: byte {place}"
            outcomes.add("whole" if len(names) == NUMBER else "lost")
        except KVPacketError:
            outcomes.add("refused")
        code = main(["check", str(folder), *(["--repair"] if number % 3 else [])])
        assert code in (0, 1, 3) and "Traceback" not in capsys.readouterr().err
        for rest in folder.iterdir():
            rest.unlink() if rest.is_file() else None
    assert outcomes == {"whole", "lost", "refused"}


def _tells_of_loss(folder: Path) -> bool:
    """Whether a chunk that went without a trace, its vector with it, shows in the file's structure."""
    with contextlib.closing(PacketIndex.open(folder)) as index:
        return bool(index.faults() or index.damaged())


TRIGGERS = {
    "a trigger": "CREATE TRIGGER evil AFTER INSERT ON chunks BEGIN DELETE FROM settings; END",
    "a view": "CREATE VIEW evil AS SELECT * FROM chunks",
    "a table": "CREATE TABLE evil (a)",
    "an index": "CREATE INDEX evil ON chunks (text)",
    "a column": "ALTER TABLE chunks ADD COLUMN evil",
}


@pytest.mark.parametrize("sql", TRIGGERS.values(), ids=TRIGGERS)
def test_an_index_with_more_in_it_than_we_made_is_refused(folder: Path, sql: str) -> None:
    statement(folder, sql)
    with pytest.raises(StoreFormatError, match=r"not laid out as this program does it: .*move its folder away"):
        PacketIndex.open(folder)


def test_an_index_cut_to_nothing_beside_its_packets_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpacket_rag.index._START_SECONDS", 0)
    (folder / FILE_NAME).write_bytes(b"")
    PacketIndex.open(folder).close()
    (folder / FILE_NAME).write_bytes(b"")
    (folder / "packets" / "00").mkdir(parents=True)
    (folder / "packets" / "00" / f"{0:064x}.safetensors").write_bytes(b"x")
    with pytest.raises(
        StoreError, match=r"is empty, though packet files lie beside it: .*Put the file back; or remove"
    ):
        PacketIndex.open(folder)
    assert (folder / FILE_NAME).read_bytes() == b""


def test_a_packet_whose_row_is_lost_is_a_counted_miss(backbone: Any, tmp_path: Path) -> None:
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        rag.add(documents())
        before = rag.ask("Who signed the lease?", 4)
    with contextlib.closing(sqlite3.connect(tmp_path / "packets.sqlite")) as db:
        ((lost,),) = db.execute("DELETE FROM packets WHERE number = 2 RETURNING packet_id").fetchall()
        db.commit()
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        usage = rag.ask("Who signed the lease?", 4).answer.usage
        assert (before.answer.usage.chunks_reused, usage.chunks_reused) == (4, 3)
        assert [(miss.packet_id, miss.reason) for miss in usage.misses] == [(lost, "the store knows no such chunk")]
        assert rag.add(documents()).packets_encoded == 1
        assert rag.ask("Who signed the lease?", 4).answer.usage.chunks_reused == 4


@pytest.mark.parametrize("rounds", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_bytes_of_the_index_are_damaged_asking_answers_or_refuses(
    backbone: Any, tmp_path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    settings = GenerationSettings(max_new_tokens=1)
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        rag.add(documents())
        texts = {hit.chunk.text for hit in rag.ask("Who signed the lease?", 4, settings).hits}
    path, chance, answered = tmp_path / FILE_NAME, random.Random(3), 0
    whole = path.read_bytes()
    used = [place for place in range(len(whole)) if whole[place]]
    for _ in range(rounds):
        content = bytearray(whole)
        content[chance.choice(used)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        with contextlib.suppress(KVPacketError), pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
            found = rag.ask("Who signed the lease?", 4, settings)
            hits = {hit.chunk.text for hit in found.hits}
            assert hits <= texts and (hits == texts or rag.index.lost or rag.index.faults())
            assert found.answer.usage.chunks_reused == len(hits)
            answered += 1
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
    assert answered > 0
