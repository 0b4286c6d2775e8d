"""Logs and errors carry ids and never a chunk's text, and nothing is logged where nothing is wrong."""

from __future__ import annotations

import ast
import contextlib
import errno
import logging
import os
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from harm_samples import SHORT
from pipeline_samples import documents, packet_files, pipeline

from kvpacket_rag.documents import Document
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.reading import Reuse

WORDS = {word for chunk in CHUNKS for word in chunk.split() if len(word) > 6}  # any of them gives a text away
ASKED = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWhat?"

Harm = Callable[[KVPacketRAG, Path, pytest.MonkeyPatch], object]


def statement(path: Path, sql: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(sql)
    connection.close()


def cut(rag: KVPacketRAG, folder: Path, patch: pytest.MonkeyPatch) -> None:
    for path in (folder / "packets").rglob("*.safetensors"):
        os.truncate(path, 700)


def fail(function: str, number: int) -> Harm:
    def harm(rag: KVPacketRAG, folder: Path, patch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        cut(rag, folder, patch)
        patch.setattr(os, function, refuse)

    return harm


HARM: dict[str, Harm] = {
    "damaged packets": cut,
    "missing packets": lambda rag, folder, patch: [
        path.unlink() for path in (folder / "packets").rglob("*.safetensors")
    ],
    "a full disk": fail("fsync", errno.ENOSPC),
    "a damaged packet that cannot be moved": fail("replace", errno.EROFS),
    "a forged row of packets": lambda rag, folder, patch: statement(
        folder / "packets.sqlite", "UPDATE packets SET num_tokens = 99"
    ),
    "a forged row of the index": lambda rag, folder, patch: statement(
        folder / "index.sqlite", "UPDATE chunks SET metadata = '{}'"
    ),
    "damage to all the catalogue": lambda rag, folder, patch: [
        (folder / name).write_bytes(b"\xff" * 200_000) for name in ("packets.sqlite", "packets.sqlite-wal")
    ],
}


@pytest.mark.parametrize("harm", HARM)
def test_no_log_and_no_error_tells_what_a_chunk_says(
    backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    with (
        contextlib.suppress(KVPacketError),  # a damaged catalogue cannot be closed in order either
        pipeline(backbone, tmp_path, chunk_tokens=90) as rag,
        monkeypatch.context() as patch,
    ):
        rag.add(documents())
        HARM[harm](rag, tmp_path, patch)
        for work in (
            lambda: rag.engine.generate(ASKED, SHORT, reuse=Reuse(on_miss="warn")),
            lambda: rag.engine.generate(ASKED, SHORT, reuse=Reuse(on_miss="error")),
            lambda: rag.ask(CHUNKS[1], 2, SHORT),
            lambda: rag.add([Document("d0", CHUNKS[2] + CHUNKS[3]), Document("new", CHUNKS[1])]),
            lambda: rag.delete("d1"),
            lambda: rag.engine.store.check(repair=True),  # type: ignore[attr-defined]
            lambda: rag.engine.encode(CHUNKS),
        ):
            try:
                answer = work()
                told += [miss.reason for miss in getattr(getattr(answer, "usage", None), "misses", ())]
            except KVPacketError as error:
                told += traceback.format_exception_only(error)
                told += map(str, (error.__cause__, error.__context__))
    told += [record.getMessage() for record in caplog.records]
    assert told, "harm must be told of"
    assert [(word, line) for line in told for word in WORDS if word in line] == []


def test_an_ordinary_life_of_a_folder_logs_no_warning_and_prints_nothing(
    backbone: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
            rag.add(documents())
            rag.ask("Who signed the lease?", 2, SHORT)
            rag.add([Document("d0", CHUNKS[1])])
            rag.delete("d2")
            assert rag.engine.store.check().is_sound  # type: ignore[attr-defined]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "") and len(packet_files(tmp_path)) == 2


SOURCES = [
    path for name in ("kvpacket_rag", "integrations") for path in (Path(__file__).parents[1] / name).rglob("*.py")
]


def test_no_log_keeps_an_error_alive_with_the_tensors_of_its_frames() -> None:
    """A record holds its arguments, an error its traceback, and that every local name of its frames."""
    assert len(SOURCES) > 100
    kept = []
    for path in SOURCES:
        for handler in ast.walk(ast.parse(path.read_text())):
            if isinstance(handler, ast.ExceptHandler) and handler.name:
                calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call)]
                logs = [call for call in calls if ast.unparse(call.func).startswith("logger.")]
                given = [arg for call in logs for arg in call.args if isinstance(arg, ast.Name)]
                kept += [f"{path}:{arg.lineno}" for arg in given if arg.id == handler.name]
    assert kept == []
