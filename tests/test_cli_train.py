"""``kvpacket train`` and ``kvpacket verify`` on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpacket_rag import models
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.cli import main
from kvpacket_rag.datasets import open_dataset
from kvpacket_rag.demo import questions
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.verify import probe_rows

SMALL = ["header=2", "trailer=1", "rank=2", "steps=2", "batch_rows=1", "validate_every=1", "max_chunks=3"]


@pytest.fixture(autouse=True)
def _tiny_model(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, **options: Any) -> KVPacketEngine:
        adapter = options["adapter"]
        return KVPacketEngine(backbone, adapter=Adapter.load(adapter) if adapter not in (None, "auto") else None)

    monkeypatch.setattr(models, "load_model", lambda *_: (backbone.model, backbone.tokenizer))
    monkeypatch.setattr(KVPacketEngine, "load", load)


def _train(folder: Path, *more: str) -> int:
    settings = [part for name in SMALL for part in ("--set", name)]
    return main(["train", "--out", str(folder), "--validation", "2", "--samples", "12", *settings, *more])


def test_train_makes_an_adapter_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path) == 0
    first = capsys.readouterr()
    assert "plain concatenation: KL all" in first.err and "adapter.safetensors" in first.out
    assert Adapter.load(tmp_path / "adapter.safetensors").header.shape == (2, 64)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert _train(tmp_path) == 0
    assert "step 1;" not in capsys.readouterr().err


def test_inspect_prints_recipe_data_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _train(tmp_path, "--data", "niah=2", "biography")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "adapter.safetensors"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)["about"]
    assert about["recipe"]["rank"] == 2 and [d["weight"] for d in about["data"]["domains"]] == [2.0, 1.0]
    assert set(about["validation_kl"]) <= {"all", "niah", "biography"} and about["weights"]
    assert main(["inspect", str(tmp_path / "adapter.safetensors")]) == 0
    assert "validation_kl: all 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "learning_rate=1"], "no setting 'learning_rate'"),
        (["--set", "rank=many"], "--set rank=many: expected a value of type int"),
        (["--set", "deep=maybe"], "expected a value of type bool"),
        (["--data", "niah=x"], "--data niah=x: expected a number"),
        (["--data", "nothing-of-that-name"], "no data set is called"),
    ],
)
def test_what_cannot_be_trained_is_said(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, *options) == 1
    assert said in capsys.readouterr().err


def test_settings_are_listed_with_their_meaning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path, "--settings") == 0
    listed = capsys.readouterr().out
    assert "rank=2 " in listed and "max_chunks=3 " in listed and "of the low-rank update of the encoder" in listed


def test_verify_prints_laws_figures_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _train(tmp_path)
    capsys.readouterr()
    assert main(["verify", "tiny", "--adapter", str(tmp_path / "adapter.safetensors")]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("Law A", "Law B", "plain concatenation", "full prefill", "Verdict: "))
    assert "Its validation" in out
    assert main(["verify", "tiny", "--adapter", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packets"] == found["plain"] and found["recovered_gap"] == 0 and not found["has_adapter"]
    assert found["full"]["kl"] < 1e-4 and found["fit"] is (found["packets"]["kl"] <= 0.02)


def test_every_prompt_of_the_probe_set_holds_its_answer(backbone: Backbone) -> None:
    encoder = PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))
    rows = list(probe_rows(encoder))
    answers = [s.answers[0] for name in ("niah", "biography") for s in open_dataset(name, "dev", seed=7, limit=6)]
    answers += [asked.answer for asked in questions()]
    for row, answer in zip(rows, answers, strict=True):
        assert any(answer in part.text for part in row.context if part.packet_id), answer


def test_train_goes_on_from_a_trained_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "first") == 0
    trained = tmp_path / "first" / "adapter.safetensors"
    assert _train(tmp_path / "second", "--warm-start", str(trained), "--set", "steps=1") == 0
    about = Adapter.load(tmp_path / "second" / "adapter.safetensors").metadata
    assert about["warm_start"] == Adapter.load(trained).digest
    assert main(["inspect", str(trained)]) == 0
    assert _train(tmp_path / "third", "--warm-start", str(trained), "--set", "rank=3") == 1
    assert "built otherwise" in capsys.readouterr().err
