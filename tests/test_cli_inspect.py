"""The commands that show, import and demonstrate."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401

from kvpacket_rag import demo as demo_module
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.demo import DemoQuestion
from kvpacket_rag.engine import KVPacketEngine


def test_inspect_tells_what_an_index_holds_without_loading_a_model(kv: Run, index: Path, docs: Path, monkeypatch: Any):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: pytest.fail("loaded a model"))
    next((index / "packets").rglob("*.safetensors")).unlink()
    code, out, _ = kv("inspect", index, "--documents", "--json")
    found = json.loads(out)
    assert code == 0 and (found["documents"], found["chunks"], found["chunks_without_packet"]) == (4, 4, 1)
    assert found["embedder"] == "all-MiniLM-L6-v2" and found["chunk_tokens"] == "256"
    assert found["documents_listed"] == {str(docs / f"{n}.txt"): 1 for n in range(4)}
    code, out, _ = kv("inspect", index, "--documents")
    assert code == 0 and f"     1  {docs / '0.txt'}" in out and "model" in out


@pytest.mark.parametrize("damage", ["'no signature'", "CAST(x'ff' AS TEXT)", "'[]'"])
def test_inspect_shows_a_damaged_signature_as_such(kv: Run, index: Path, damage: str):
    with closing(sqlite3.connect(index / "packets.sqlite")) as db:
        db.execute(f"UPDATE packets SET signature = {damage}")
        db.commit()
    code, out, err = kv("inspect", index, "--json")
    assert code == 0 and "damaged" in json.loads(out)["signatures"][0], err
    assert json.loads(out)["signatures"][0]["packets"] == 4


def test_inspect_names_what_to_do_about_damaged_counts(kv: Run, index: Path):
    with closing(sqlite3.connect(index / "packets.sqlite")) as db:
        db.execute("UPDATE totals SET stored = -1")
        db.commit()
    code, _, err = kv("inspect", index)
    assert code == 1 and "counts" in err and "check DIR --repair" in err


def test_inspect_proves_a_packet_whole_or_says_what_is_wrong(kv: Run, index: Path):
    file = next((index / "packets").rglob("*.safetensors"))
    found = json.loads(kv("inspect", file, "--json")[1])
    assert found["verified"] and found["packet_id"] == file.stem and found["signature"]["dtype"] == "float32"
    assert found["tensors"]["0"][2] == found["tokens"] == found["span"]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    code, out, _ = kv("inspect", file)
    assert code == 0 and "verified   no" in out and "checksum" in out


def test_adapters_are_imported_and_inspected(kv: Run, tmp_path: Path):
    content = {"header": torch.randn(1, 3, 16), "trailer": torch.randn(1, 2, 16)}
    torch.save(content, tmp_path / "in.pt")
    target = tmp_path / "out.safetensors"
    code, out, _ = kv("import-adapter", tmp_path / "in.pt", target)
    assert code == 0 and "3 header and 2 trailer tokens, hidden size 16" in out
    assert torch.equal(Adapter.load(target).header, content["header"][0])
    found = json.loads(kv("inspect", target, "--json")[1])
    assert (found["header_tokens"], found["trailer_tokens"], found["hidden_size"]) == (3, 2, 16)
    assert kv("import-adapter", tmp_path / "in.pt", target)[0] == 1
    assert kv("import-adapter", tmp_path / "in.pt", target, "--force")[0] == 0
    assert kv("import-adapter", tmp_path / "in.pt", tmp_path / "none" / "out.safetensors")[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.safetensors"]


@pytest.fixture
def small_demo(docs: Path, monkeypatch: Any) -> None:
    """The demo over the four files."""
    questions = [DemoQuestion("Who signed the lease?", "Ada Marlow", "1.txt"), DemoQuestion("When?", "now", "2.txt")]
    monkeypatch.setattr(demo_module, "corpus_folder", lambda: docs)
    monkeypatch.setattr(demo_module, "questions", lambda: questions)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_asks_compares_and_encodes_nothing_the_second_time(kv: Run, tmp_path: Path):
    code, out, _ = kv("demo", "--index", tmp_path / "index")
    assert code == 0 and "4 packets, " in out and "1. Who signed the lease?" in out and "2. When?" in out
    assert "reused from 4 packets" in out and "median" in out and "times sooner" in out
    code, out, _ = kv("demo", "--index", tmp_path / "index", "--limit", 1, "-k", 2)
    assert code == 0 and "0 packets encoded" in out and "2. When?" not in out


@pytest.mark.usefixtures("small_demo")
def test_the_demo_follows_its_corpus_and_keeps_out_of_other_indexes(kv: Run, docs: Path, index: Path, tmp_path: Path):
    kv("demo", "--index", tmp_path / "own")
    (docs / "0.txt").unlink()
    assert "3 documents, 3 chunks" in kv("demo", "--index", tmp_path / "own")[1]
    code, _, err = kv("demo", "--index", index)
    assert code == 1 and "holds other documents" in err
