"""A damaged catalogue: whatever is asked of the store, the answer is right, or one of our errors."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from test_store import SIGNATURE, make_packet, same

from kvpacket_rag.cli import main
from kvpacket_rag.errors import KVPacketError, StoreError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

NUMBER = 5


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of five packets; the disk is not waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with contextlib.closing(DiskStore(tmp_path / "whole")) as store:
        for seed in range(NUMBER):
            store.put(make_packet(seed), f"text {seed}", f"owner {seed}")
    return tmp_path / "whole"


@pytest.mark.parametrize("rounds", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_whatever_bytes_are_damaged_answers_are_right_or_refused(
    whole: Path, tmp_path: Path, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, folder, used_all = random.Random(4), tmp_path / "damaged", 0
    content = (whole / "packets.sqlite").read_bytes()
    used = [place for place in range(len(content)) if content[place]]
    for number in range(rounds):
        shutil.copytree(whole, folder)
        damaged, place = bytearray(content), chance.choice(used)
        damaged[place] = damaged[place] ^ 1 << chance.randrange(8) if number % 2 else chance.randrange(256)
        (folder / "packets.sqlite").write_bytes(damaged)
        if number % 3:
            codes = [main(["check", str(folder), *options]) for options in ([], ["--repair"])]
            assert set(codes) <= {0, 1, 3} and "Traceback" not in capsys.readouterr().err
        with contextlib.suppress(KVPacketError):
            used_all += _use(folder, None if number % 2 else 10**6)
        shutil.rmtree(folder)
    assert 0 < used_all < rounds


def _use(folder: Path, cap: int | None) -> int:
    """Everything a store does."""
    with contextlib.closing(DiskStore(folder, cap)) as store:
        known = list(store.known(SIGNATURE))
        assert all(chunk.packet_id == packet_id([int(chunk.text[5:])], SIGNATURE) for chunk in known)
        for seed in range(NUMBER):
            with contextlib.suppress(KVPacketError):
                assert same(store.get(packet_id([seed], SIGNATURE), SIGNATURE), make_packet(seed))
        assert (len(store), store.size_bytes, store.revision()) >= (0, 0, 0)
        assert store.state().packets >= 0 and store.signatures() is not None
        store.put(make_packet(9), "text 9", "owner 9")
        store.drop_owners(["owner 2"])
        store.delete(packet_id([3], SIGNATURE))
        left = store._catalogue._rows("SELECT text FROM packets NOT INDEXED")
        assert not {("text 2",), ("text 3",)} & set(left), "a deletion was said to be done"
        return 1


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE meta SET value = CAST(x'ff' AS TEXT) WHERE key = 'last_sweep'",
        "UPDATE meta SET value = 'x' WHERE key = 'format_version'",
        "DELETE FROM meta",
        "UPDATE totals SET stored = 'many'",
        "DELETE FROM totals",
        "INSERT INTO totals VALUES (1, 2, 3)",
    ],
)
def test_damaged_facts_are_no_crash_and_repaired_or_refused_with_what_to_do(
    whole: Path, sql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(whole / "packets.sqlite")) as catalogue:
        catalogue.execute(sql)
        catalogue.commit()
    codes = [main(["check", str(whole), *options]) for options in ([], ["--repair"], [])]
    told = capsys.readouterr()
    if codes[0] == 1:
        assert "ingest the documents" in told.err
        with pytest.raises(StoreError, match="ingest the documents"):
            DiskStore(whole)
    else:
        assert codes[1:] == [0, 0]
        with contextlib.closing(DiskStore(whole)) as store:
            assert len(store) == NUMBER and len(list(store.known(SIGNATURE))) == NUMBER
