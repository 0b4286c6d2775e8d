"""Fixtures of the command line's tests: commands run in this process, on tiny models and four small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from pipeline_samples import WordEmbedder, loader

from kvpacket_rag import pipeline as pipeline_module
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.cli import main
from kvpacket_rag.engine import KVPacketEngine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="tiny")
def tiny_fixture(backbone: Any, make_model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    """Tiny models in place of the real ones."""
    other = Backbone(make_model(seed=1), tokenizer, "other")
    monkeypatch.setattr(KVPacketEngine, "load", loader(backbone, other=other))
    monkeypatch.setattr(pipeline_module, "SentenceTransformerEmbedder", WordEmbedder)


@pytest.fixture(name="kv")
def kv_fixture(tiny: None, capsys: Any) -> Run:
    """Runs a command on tiny models and gives exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(name="docs")
def docs_fixture(tmp_path: Path) -> Path:
    """Four files of one chunk each."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, text in enumerate(CHUNKS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(name="index")
def index_fixture(kv: Run, docs: Path, tmp_path: Path) -> Path:
    """An index of them."""
    assert kv("ingest", docs, "--index", tmp_path / "index")[0] == 0
    return tmp_path / "index"
