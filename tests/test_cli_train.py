"""``kvpacket train`` and ``kvpacket verify`` on the tiny model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from dataset_samples import ROW, write_rows
from transformers.utils import generic

from kvpacket_rag import models, shipped
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.cli import main
from kvpacket_rag.datasets import open_dataset
from kvpacket_rag.demo import questions
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.verdict import RULE, Fidelity, Verdict
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
    out = capsys.readouterr().out
    assert re.search(r"^validation kl +all 0\.", out, re.MULTILINE) and "{" not in out and "[" not in out
    assert re.search(r"^data domains +name niah, samples \d+, weight 2, ", out, re.MULTILINE)
    assert main(["inspect", str(tmp_path)]) == 0 and capsys.readouterr().out == out  # the folder of the run


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
    code = main(["verify", "tiny", "--adapter", str(tmp_path / "adapter.safetensors")])
    out = capsys.readouterr().out
    assert code == (0 if "Verdict: fit" in out else 3) and "0.50 or more" in out and "at most 0.020 nats" in out
    assert all(word in out for word in ("Law A", "Law B", "plain concatenation", "full prefill", "Verdict: "))
    assert "Its validation" in out
    code = main(["verify", "tiny", "--adapter", "none", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fit"] else 3) and found["thresholds"]["recovered_gap"] == 0.5
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
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "second" / "adapter.safetensors")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^warm start training recipe +header 2, ", out, re.MULTILINE) and "{" not in out
    assert _train(tmp_path / "third", "--warm-start", str(trained), "--set", "rank=1") == 1
    assert "built otherwise" in capsys.readouterr().err
    assert _train(tmp_path / "first", "--warm-start", str(trained)) == 1
    assert "that one started from nothing, this one starts from " in (err := capsys.readouterr().err) and "{" not in err


def test_a_run_that_is_there_does_not_need_the_adapter_that_it_began_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path / "first") == 0
    trained = tmp_path / "first" / "adapter.safetensors"
    assert _train(tmp_path / "second", "--warm-start", str(trained)) == 0
    expected = Adapter.load(tmp_path / "second" / "adapter.safetensors")
    trained.unlink()
    assert _train(tmp_path / "second", "--warm-start", str(trained)) == 0
    found = Adapter.load(tmp_path / "second" / "adapter.safetensors")
    assert found.digest == expected.digest and found.metadata == expected.metadata
    assert "is gone and not needed: the run began from adapter" in capsys.readouterr().err
    assert _train(tmp_path / "third", "--warm-start", str(trained)) == 1
    assert "cannot read the adapter" in capsys.readouterr().err


def test_an_adapter_of_no_run_is_replaced_only_by_force(
    backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "adapter.safetensors"
    Adapter.empty(backbone.hidden_size).save(path)
    before = path.read_bytes()
    assert _train(tmp_path) == 1 and path.read_bytes() == before
    assert "adapter.safetensors exists, and no state of a run is beside it" in (err := capsys.readouterr().err)
    assert "--force" in err
    assert _train(tmp_path, "--force") == 0 and path.read_bytes() != before
    assert _train(tmp_path) == 0


def test_eval_warns_of_data_that_the_adapter_was_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for seed in (0, 1):
        rows = [asdict(sample) for sample in open_dataset("niah", "train", limit=8, seed=seed)]
        files.append(write_rows(tmp_path / f"{seed}.jsonl", rows))
    assert _train(tmp_path / "run", "--data", str(files[0]), "--set", "steps=1") == 0
    for seed, file in enumerate(files):
        capsys.readouterr()
        options = ["--data", str(file), "--limit", "1", "--max-new-tokens", "2", "--methods", "full,packet"]
        options += ["--adapter", str(tmp_path / "run" / "adapter.safetensors"), "--out", str(tmp_path / f"out {seed}")]
        assert main(["eval", *options]) == 0
        assert (f"the adapter was trained on {file}" in capsys.readouterr().err) is (not seed)


def test_data_sets_of_one_name_have_figures_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = []
    for name in ("niah", "biography"):
        path = tmp_path / name / "data.jsonl"
        path.parent.mkdir()
        rows = [asdict(sample) for sample in open_dataset(name, "train", limit=8)]
        path.write_text("\n".join(json.dumps(row) for row in [*rows, *rows]))
        data.append(str(path))
    assert _train(tmp_path / "out", "--data", *data, "--set", "steps=1", "--validation", "6") == 0
    about = json.loads(Adapter.load(tmp_path / "out" / "adapter.safetensors").metadata["validation_kl"])
    assert set(about) == {"all", *data}
    capsys.readouterr()
    assert _train(tmp_path / "out", "--data", *data[::-1], "--set", "steps=1", "--validation", "6") == 1
    assert re.search(r"belongs to another run: validation was .* and is .*\. Go on", capsys.readouterr().err)


def test_train_goes_on_from_the_adapter_that_ships(
    backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "_FOLDER", tmp_path / "shipped")
    assert _train(tmp_path / "none", "--warm-start", "auto") == 1
    assert "no adapter ships for" in capsys.readouterr().err
    assert _train(tmp_path / "first") == 0
    (tmp_path / "shipped").mkdir()
    shutil.copy(tmp_path / "first" / "adapter.safetensors", tmp_path / "shipped")
    assert _train(tmp_path / "second", "--warm-start", "auto", "--set", "steps=1") == 0
    ancestor = Adapter.load(tmp_path / "first" / "adapter.safetensors")
    assert Adapter.load(tmp_path / "second" / "adapter.safetensors").metadata["warm_start"] == ancestor.digest


def test_a_run_that_has_no_adapter_yet_is_told_from_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.jsonl").touch()
    assert main(["inspect", str(tmp_path)]) == 1 and "has no adapter yet" in capsys.readouterr().err
    assert main(["ask", "Who?", "--index", str(tmp_path)]) == 1
    assert "folder of a training run, not of an index" in capsys.readouterr().err


def test_verify_tells_from_where_on_packets_are_fit_and_how_it_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"{RULE[1:]}. Exits with 0 if they are fit and with 3 if they are not" in told


@pytest.mark.parametrize(
    ("kl", "plain", "fit"),
    [(0.02, 0.03, True), (0.021, 0.03, False), (0.02, 0.019, False), (0.1, 0.2, True), (0.101, 0.2, False)],
)
def test_fit_is_what_the_rule_says(kl: float, plain: float, fit: bool) -> None:
    verdict = Verdict(0.0, 0.0, 9, Fidelity(kl, 1.0), Fidelity(plain, 1.0), Fidelity(0.0, 1.0), True)
    assert verdict.is_fit is fit and verdict.to_dict()["thresholds"] == {"recovered_gap": 0.5, "kl": 0.02, "rule": RULE}


BAD = {
    "empty": ("", "holds no sample|is empty"),
    "malformed": (json.dumps(ROW) + "\n{", "line 2"),
    "without documents": (json.dumps(ROW | {"documents": []}), "line 1.*documents"),
    "empty answer": (json.dumps(ROW | {"answers": [""]}), "line 1.*answer"),
}


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line_that_names_the_file_and_the_place(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BAD[name]
    (tmp_path / "bad.jsonl").write_text(content)
    assert main([command, "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvpacket: error: ") and "bad.jsonl" in last and re.search(said, last)


def test_training_raises_no_warning_of_old_names(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(generic.logger, "warning_once", said.append)
    assert _train(tmp_path, "--set", "steps=1") == 0 and said == []
