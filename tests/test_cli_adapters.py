"""Indexes and adapters on the command line: which fits which, what is said when none does, and how to go on."""

from __future__ import annotations

import json
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401
from dataset_samples import ROW, write_rows
from pipeline_samples import WordEmbedder, documents, packet_files, pipeline

import kvpacket_rag
from kvpacket_rag import models
from kvpacket_rag import pipeline as pipeline_module
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.index import PacketIndex

ROOT = Path(kvpacket_rag.__file__).parents[1]


@pytest.fixture(name="file")
def file_fixture(adapter: Adapter, tmp_path: Path) -> Path:
    """An adapter's file."""
    adapter.save(tmp_path / "own adapter.safetensors")
    return tmp_path / "own adapter.safetensors"


@pytest.fixture(name="foreign")
def foreign_fixture(tiny: None, backbone: Backbone, tmp_path: Path) -> Path:
    """An index that does not say what its vectors are of, as another framework leaves it."""
    with pipeline(backbone, tmp_path / "foreign") as rag:
        rag.add(documents())
    with closing(sqlite3.connect(tmp_path / "foreign" / "index.sqlite")) as file:
        file.execute("DELETE FROM settings WHERE key IN ('embedder', 'chunk_tokens')")
        file.commit()
    return tmp_path / "foreign"


def _reused(kv: Run, index: Path, *options: object) -> int:
    code, out, err = kv("ask", "Who?", "--index", index, "--json", "--max-new-tokens", 2, *options)
    assert code == 0, err
    return int(json.loads(out)["usage"]["chunks_reused"])


def test_an_adapter_that_an_index_was_not_made_with_is_refused_with_both_named(kv: Run, index: Path, file: Path):
    code, out, err = kv("ask", "Who?", "--index", index, "--adapter", file)
    digest = Adapter.load(file).digest
    assert code == 1 and out == "" and f"adapter {file} (SHA-256 {digest[:12]}…)" in err and "with no adapter" in err
    assert err.strip().endswith(f"kvpacket ingest --reencode --index {index} --adapter '{file}'")
    kv("ingest", "--reencode", "--index", index, "--adapter", file)
    _, _, err = kv("ask", "Who?", "--index", index, "--adapter", "none")
    assert f"adapter.safetensors in it (SHA-256 {digest[:12]}…)" in err and "--adapter none" in err


def test_encoding_again_says_how_many_packets_it_made(kv: Run, index: Path, file: Path):
    code, out, _ = kv("ingest", "--reencode", "--index", index, "--adapter", file)
    assert code == 0 and "Encoded again  4 packets, " in out and "nothing" not in out and "Documents" not in out
    assert _reused(kv, index) == _reused(kv, index, "--adapter", file) == 4
    code, out, _ = kv("ingest", "--reencode", "--index", index)
    assert code == 0 and "Encoded again  nothing: all packets are of these already" in out


def test_auto_is_the_adapter_that_an_index_was_made_with(kv: Run, docs: Path, file: Path, tmp_path: Path):
    index = tmp_path / "own"
    assert kv("ingest", docs, "--index", index, "--adapter", file)[0] == 0
    assert _reused(kv, index, "--adapter", "auto") == 4
    before = packet_files(index)
    assert kv("ingest", "--reencode", "--index", index, "--adapter", "auto")[0] == 0
    assert not before & packet_files(index) and not (index / "adapter.safetensors").exists()  # none ships for it


def test_an_index_that_names_no_embedder_is_never_given_one(kv: Run, foreign: Path):
    code, out, err = kv("ask", "Who signed?", "--index", foreign)
    assert code == 1 and out == "" and "does not say which embedding model" in err and "--embedder NAME" in err
    assert _reused(kv, foreign, "--embedder", "all-MiniLM-L6-v2") == 4
    index = PacketIndex.open(foreign)
    assert index.get_setting("embedder") is None and index.get_setting("chunk_tokens") is None
    index.close()


class _Other(WordEmbedder):
    def embed_query(self, text: str) -> Any:
        return super().embed_query(text)[::-1]


class _Wider(WordEmbedder):
    def __init__(self, name: str) -> None:
        super().__init__(name, 65)


@pytest.mark.parametrize(("embedder", "said"), [(_Other, "cosine of 0."), (_Wider, "64 dimensions and its own 65")])
def test_an_embedder_that_an_index_was_not_filled_with_is_refused(
    kv: Run, foreign: Path, monkeypatch: Any, embedder: Any, said: str
):
    monkeypatch.setattr(pipeline_module, "SentenceTransformerEmbedder", embedder)
    code, _, err = kv("ask", "Who signed?", "--index", foreign, "--embedder", "other")
    assert code == 1 and "are not of the embedder 'other'" in err and said in err


def _readme_commands(section: str) -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    block = next(part for part in body.split("```")[1::2] if "kvpacket" in part)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines() if line.startswith("kvpacket ")]


def test_the_readmes_commands_about_adapters_run_in_order(
    kv: Run, backbone: Backbone, docs: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr(models, "load_model", lambda *_: (backbone.model, backbone.tokenizer))
    for name in ("hotpotqa/train.jsonl", "hotpotqa/dev.jsonl", "musique/train.jsonl", "my_questions.jsonl"):
        write_rows(
            tmp_path / name, [ROW | {"id": f"q{number}", "question": f"{name} {number}?"} for number in range(4)]
        )
    monkeypatch.chdir(tmp_path)
    small = "header=2 rank=2 steps=1 batch_rows=1 max_chunks=2 questions=1".split()
    own = ["--adapter", "run/adapter.safetensors"]
    more = {
        "train": ["--validation", "1", "--samples", "6", *(part for name in small for part in ("--set", name))],
        "eval": ["--limit", "1", "--max-chunks", "2", "--chunk-tokens", "30", "--max-new-tokens", "2", *own],
    }
    commands = _readme_commands("Adapters")
    local = {"MODEL": "tiny", "smollm2-135m-instruct": "tiny", "hotpotqa": "./hotpotqa", "musique": "./musique"}
    for command in commands:
        parts = [part.partition("=") for part in command]
        named = ["".join([local.get(name, name), *value]) for name, *value in parts]
        if command[0] == "train" and "--data" in command:  # other data are another run
            named[named.index("--out") + 1] = "mixed"
        code, _, err = kv(*named, *more.get(named[0], []))
        if "auto" in named:
            assert code == 1 and "no adapter ships for" in err  # for a model of nobody's
            continue
        assert code in ((0, 3) if named[0] == "verify" else (0,)), (named, err)
    assert {command[0] for command in commands} >= {"verify", "train", "ingest", "eval"}
