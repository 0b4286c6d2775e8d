"""Packets made by other processes are the bytes that this one makes, in any order and as often as it takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401 (fixtures)
from pipeline_samples import contents, documents, encoded_texts, long_document, packet_files, pipeline

from kvpacket_rag.documents import Document
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError
from kvpacket_rag.packet_writer import MissingPacket


class Workers:
    """In this process: last batch first, each twice, and the first of a batch alone before, as if a worker died."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.dies_after = dies_after
        self.made: list[str] = []

    def make(self, engine: KVPacketEngine, batches: Sequence[Sequence[MissingPacket]]) -> Iterator[str]:
        for batch in reversed(batches):
            for _ in range(2):
                engine.writer.write(batch)
            for packet in batch:
                if len(self.made) == self.dies_after:
                    raise StoreError("all workers died")
                self.made.append(packet.packet_id)
                yield packet.packet_id


@pytest.fixture
def given(engine: KVPacketEngine) -> list[Document]:
    """More chunks than an ingest stores at a time, several of equal text and several of equal length."""
    return [*documents(), long_document(70), long_document(30, "other"), *documents()[:2]]


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "packets").rglob("*.safetensors")}


def test_they_store_the_bytes_and_rows_of_this_process(backbone: Any, tmp_path: Path, given: list[Document]):
    with pipeline(backbone, tmp_path / "a", chunk_tokens=90) as alone:
        expected = alone.add(given)
        rows = contents(alone)
    workers = Workers()
    with pipeline(backbone, tmp_path / "b", chunk_tokens=90) as helped:
        report = helped.add(given, workers=workers)
        assert contents(helped) == rows
    assert (report.added, report.chunks, report.packets_encoded, report.tokens_encoded) == (
        expected.added,
        expected.chunks,
        expected.packets_encoded,
        expected.tokens_encoded,
    )
    assert stored(tmp_path / "a") == stored(tmp_path / "b") and len(stored(tmp_path / "a")) > 64
    assert sorted(workers.made) == sorted(packet_files(tmp_path / "b"))


def test_progress_counts_what_they_made(backbone: Any, tmp_path: Path, given: list[Document]):
    seen: list[tuple[int, int]] = []
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        report = rag.add(given, lambda told: seen.append((told.tokens_done, told.tokens_total)), Workers())
    assert seen == sorted(seen) and seen[-1] == (report.tokens_encoded, report.tokens_encoded)


def test_what_they_made_before_they_died_is_not_made_again_and_is_deleted_with_its_document(
    backbone: Any, tmp_path: Path, given: list[Document]
):
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        with pytest.raises(StoreError, match="all workers died"):
            rag.add(given, workers=Workers(dies_after=20))
        kept = len(packet_files(tmp_path))
        assert kept >= 20 and len(rag.index) == 0
        seen = encoded_texts(rag)
        rag.add(given)
        assert len(seen) == len(packet_files(tmp_path)) - kept
        for document in {document.document_id for document in given}:
            rag.delete(document)
        assert packet_files(tmp_path) == set()


def test_without_ray_it_says_what_to_install_and_starts_nothing(
    kv: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = kv("ingest", docs, "--index", tmp_path / "own", "--engine", "ray")
    assert code == 1 and "kvpacket-rag[ray]" in error and not (tmp_path / "own").exists()


def test_workers_of_an_engine_that_has_none_are_refused(kv: Run, docs: Path, tmp_path: Path):
    code, _, error = kv("ingest", docs, "--index", tmp_path / "own", "--workers", "2")
    assert code == 2 and "--workers needs --engine ray" in error
