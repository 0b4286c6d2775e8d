"""An ingest cut short at any point, by a person, a full disk or a kill, is taken up where it ended."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_samples import (
    LEASE,
    NEW_LEASE,
    contents,
    documents,
    encoded_texts,
    long_document,
    packet_files,
    pipeline,
)

from kvpacket_rag import ownership
from kvpacket_rag.documents import Document
from kvpacket_rag.errors import StoreError, StoreFullError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal, remove_document
from kvpacket_rag.pipeline import KVPacketRAG


@pytest.fixture
def rag(backbone: Any, tmp_path: Path) -> Iterator[KVPacketRAG]:
    with pipeline(backbone, tmp_path, chunk_tokens=90) as opened:
        yield opened


def test_an_interruption_by_the_caller_loses_nothing_and_the_next_run_goes_on(
    rag: KVPacketRAG, backbone: Any, tmp_path: Path
):
    texts = [long_document(5, f"d{n}") for n in range(40)]

    def stop(progress: Any) -> None:
        if progress.tokens_done > progress.tokens_total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rag.add(texts, stop)
    kept, seen = len(rag.engine.store), encoded_texts(rag)
    report = rag.add(texts)
    with pipeline(backbone, tmp_path / "whole", chunk_tokens=90) as whole:
        whole.add(texts)
        assert contents(rag) == contents(whole) and len(rag.engine.store) == len(whole.engine.store)
    assert len(seen) == report.packets_encoded == len(rag.engine.store) - kept and kept > 0


def test_a_document_that_changed_after_an_interruption_leaves_no_packet_behind(rag: KVPacketRAG):
    with pytest.raises(KeyboardInterrupt):
        rag.add([Document("d", LEASE), *documents()], lambda progress: (_ for _ in ()).throw(KeyboardInterrupt))
    assert len(rag.engine.store) > 0 and len(rag.index) == 0
    rag.add([Document("d", NEW_LEASE)])
    for name in OwnerJournal(rag.index, rag.engine.store).documents():
        assert rag.delete(name) == 0
    assert [known.text for known in rag.engine.store.known(rag.engine.signature)] == [NEW_LEASE]


@pytest.mark.parametrize("step", ["delete", "settle"])
def test_an_update_cut_short_between_rows_and_packets_is_put_right_by_the_next_run(
    rag: KVPacketRAG, monkeypatch: Any, step: str
):
    rag.add([Document("d", LEASE)])
    where = rag.index if step == "delete" else rag._ingester._journal
    monkeypatch.setattr(where, step, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rag.add([Document("d", NEW_LEASE)])
    monkeypatch.undo()
    rag.add([Document("d", NEW_LEASE)])
    assert [chunk.text for chunk, _ in rag.index.rows()] == [NEW_LEASE]
    assert [known.text for known in rag.engine.store.known(rag.engine.signature)] == [NEW_LEASE]


def test_a_deletion_cut_short_can_be_repeated(rag: KVPacketRAG, monkeypatch: Any):
    rag.add([Document("d", LEASE)])
    monkeypatch.setattr(OwnerJournal, "settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rag.delete("d")
    monkeypatch.undo()
    remove_document(rag.index, rag.engine.store, "d")
    assert len(rag.engine.store) == 0
    with pytest.raises(StoreError, match="no document 'd'"):
        rag.delete("d")


@pytest.mark.parametrize("step", ["rows", "packets"])
def test_a_deletion_cut_short_is_finished_at_the_next_opening(
    rag: KVPacketRAG, backbone: Any, tmp_path: Path, monkeypatch: Any, step: str
):
    rag.add([Document("d", LEASE), *documents()])
    where, name = (rag.index, "delete") if step == "rows" else (rag.engine.store, "drop_owners")
    monkeypatch.setattr(where, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rag.delete("d")
    monkeypatch.undo()
    OwnerJournal(rag.index, rag.engine.store).finish_deletions()
    assert "d" not in rag.index.documents()
    assert LEASE not in [known.text for known in rag.engine.store.known(rag.engine.signature)]
    assert OwnerJournal(rag.index, rag.engine.store).documents() == []


def test_a_full_disk_keeps_what_was_stored_and_room_lets_the_run_go_on(rag: KVPacketRAG, monkeypatch: Any):
    put, allowed = rag.engine.store.put, [2]

    def limited(*arguments: Any) -> None:
        if not allowed[0]:
            raise StoreFullError("the disk is full")
        allowed[0] -= 1
        put(*arguments)

    monkeypatch.setattr(rag.engine.store, "put", limited)
    with pytest.raises(StoreFullError):
        rag.add(documents())
    assert len(rag.engine.store) == 2
    monkeypatch.undo()
    assert rag.add(documents()).packets_encoded == 2 and len(rag.index) == 4


_KILLED = """
import os, signal
from pathlib import Path
from pipeline_samples import long_document, pipeline

def test_killed(backbone):
    def kill(progress):
        if progress.tokens_done > progress.tokens_total / 2:
            os.kill(os.getpid(), signal.SIGKILL)
    rag = pipeline(backbone, Path(os.environ["FOLDER"]), chunk_tokens=90)
    rag.add([long_document(5, f"d{n}") for n in range(40)], kill)
"""


def ingest_until_killed(folder: Path) -> None:
    """Another process that ingests into the folder and is killed half way, with no chance to tidy up."""
    script = folder / "test_killed.py"
    script.write_text(_KILLED)
    here = Path(__file__).parent
    environment = os.environ | {"FOLDER": str(folder), "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout


def test_a_killed_process_leaves_an_index_that_the_next_run_completes(rag: KVPacketRAG, backbone: Any, tmp_path: Path):
    ingest_until_killed(tmp_path)
    kept, texts = len(rag.engine.store), [long_document(5, f"d{n}") for n in range(40)]
    report = rag.add(texts)
    with pipeline(backbone, tmp_path / "whole", chunk_tokens=90) as whole:
        whole.add(texts)
        assert contents(rag) == contents(whole)
        assert packet_files(tmp_path) == packet_files(tmp_path / "whole")
    assert report.packets_encoded == len(rag.engine.store) - kept and kept > 0


def test_encoding_again_replaces_every_packet_and_can_be_interrupted(
    rag: KVPacketRAG, monkeypatch: Any, tmp_path: Path
):
    rag.add([long_document(80), *documents()])
    old, chunks = packet_files(tmp_path), len(rag.index)
    other = replace(rag.engine.signature, adapter="another")
    monkeypatch.setattr(rag.engine.encoder, "signature", other)
    calls: list[Any] = []

    def stop(progress: Any) -> None:
        calls.append(progress)
        if len(calls) == chunks // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rag._ingester.reencode(stop)
    seen = encoded_texts(rag)
    report = rag._ingester.reencode(calls.append)
    assert report.chunks == chunks and report.packets_encoded == len(seen)
    assert len(seen) <= chunks - chunks // 2 + 1 and calls[-1].tokens_done == calls[-1].tokens_total
    assert packet_files(tmp_path) == {name for _, name in rag.index.rows()} and not old & packet_files(tmp_path)


def known_owners(folder: Path) -> dict[str, str]:
    """The packet of every owner that a store names."""
    with closing(sqlite3.connect(folder / "packets.sqlite")) as catalogue:
        return dict(catalogue.execute("SELECT owner, packet_id FROM owners").fetchall())


@pytest.mark.parametrize("dies_at", ["nothing", "set_packet_ids", "add_owners"])
def test_encoding_again_leaves_the_packets_that_others_own(
    rag: KVPacketRAG, monkeypatch: Any, tmp_path: Path, dies_at: str
):
    rag.add([Document("d", LEASE), Document("e", NEW_LEASE)])
    (kept,) = rag.engine.encode([LEASE], ["langchain/intro.md"])
    (lost,) = rag.engine.encode([NEW_LEASE])
    rag.engine.drop_owners([])
    with closing(sqlite3.connect(tmp_path / "packets.sqlite")) as catalogue, catalogue:
        catalogue.execute("DELETE FROM owners WHERE packet_id = ?", [lost])
    monkeypatch.setattr(rag.engine.encoder, "signature", replace(rag.engine.signature, adapter="another"))
    if dies_at != "nothing":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            where = PacketIndex if dies_at == "set_packet_ids" else ownership
            patch.setattr(where, dies_at, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            rag._ingester.reencode()
    rag._ingester.reencode()
    new = {chunk.document_id: (f":{chunk.chunk_id}", name) for chunk, name in rag.index.rows()}
    assert known_owners(tmp_path) == {"langchain/intro.md": kept} | dict(new.values())
    assert packet_files(tmp_path) == {kept, new["d"][1], new["e"][1]} and lost not in rag.engine.store


def test_documents_deleted_after_a_killed_encoding_leave_no_packet_past_the_next_opening(
    rag: KVPacketRAG, backbone: Any, monkeypatch: Any, tmp_path: Path
):
    rag.add([Document("d", LEASE)])
    monkeypatch.setattr(rag.engine.encoder, "signature", replace(rag.engine.signature, adapter="another"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ownership.Ownership, "_settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        rag._ingester.reencode()
    remove_document(rag.index, rag.engine.store, "d")
    with pipeline(backbone, tmp_path) as opened:
        assert packet_files(tmp_path) == set() and len(opened.index) == 0


def test_threads_that_add_at_the_same_time_lose_nothing(rag: KVPacketRAG):
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda n: rag.add([long_document(6, f"d{n % 4}")]), range(8)))
    assert sum(r.added for r in reports) == 4 and sum(r.unchanged for r in reports) == 4
    assert len(rag.index.documents()) == 4 and OwnerJournal(rag.index, rag.engine.store).documents() == []
