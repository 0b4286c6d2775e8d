"""``kvpacket eval`` on a tiny model and a small file of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, kv_fixture, tiny_fixture  # noqa: F401
from record_samples import samples

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine

FEW = ("--max-new-tokens", 4, "--max-chunks", 2, "--chunk-tokens", 30)


@pytest.fixture(name="measure")
def measure_fixture(kv: Run, backbone: Backbone, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``kvpacket eval`` on the tiny model; its shipped adapter is the tiny one."""

    def load(model: str, *, adapter: Any, device: str, dtype: str, shipped: Adapter = adapter) -> KVPacketEngine:
        chosen = shipped if adapter == "auto" else adapter
        return KVPacketEngine(backbone, adapter=Adapter.load(chosen) if isinstance(chosen, str) else chosen)

    monkeypatch.setattr(KVPacketEngine, "load", load)
    return lambda *arguments: kv("eval", *arguments, *FEW)


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path) -> Path:
    """Three questions, one of them for yes or no."""
    path = tmp_path / "office.jsonl"
    lines = [
        {
            "id": sample.sample_id,
            "question": sample.question,
            "answers": list(sample.answers),
            "documents": [{"text": d.text, "is_supporting": d.is_supporting} for d in sample.documents],
        }
        for sample in samples()
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_results_hold_a_row_for_every_data_set_and_method(measure: Run, file: Path, tmp_path: Path):
    code, out, err = measure("--data", file, "niah", "--limit", 3, "--out", tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert code == 0 and "office: 3 of 3 questions" in err and "recovered gap" in out
    assert {row["method"] for row in rows} == {"full", "packet", "plain", "none"}
    assert [row["data"] for row in rows[::4]] == ["office", "office (yes/no)", "niah", "mean of 2 sets"]
    for name in ("n", "f1", "em", "contains", "kl", "agreement", "recovered_gap", "ttft_seconds", "flops", "f1_low"):
        assert rows[1][name] is not None
    assert rows[1]["bytes_per_token"] > rows[2]["bytes_per_token"] > 0
    assert "at most 2 chunks of 30 tokens" in (tmp_path / "out" / "results.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("attention.png", "f1_ttft.png", "kl_recompute.png"),
        *("records.jsonl", "results.json", "results.md"),
    ]


def test_the_same_command_measures_nothing_again(measure: Run, file: Path, tmp_path: Path):
    command = ("--data", file, "--methods", "full, plain", "--out", tmp_path / "out", "--seed", 0, 1)
    assert measure(*command)[0] == 0
    lines = (tmp_path / "out" / "records.jsonl").read_bytes()
    first = (tmp_path / "out" / "results.json").read_bytes()
    assert lines.count(b"\n") == 3 * 2 * 2
    assert measure(*command)[0] == 0
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == lines
    assert (tmp_path / "out" / "results.json").read_bytes() == first


def test_prompts_that_are_left_out_and_short_documents_are_told_with_the_reason(
    measure: Run, file: Path, tmp_path: Path
):
    short = {"text": "Ada signed.", "is_supporting": True}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["documents"][0] = short
    lines[1]["documents"] = [short]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, _, err = measure(
        *("--data", file, "--methods", "full,plain", "--out", tmp_path / "out", "--gold-positions", 0, 1)
    )
    text = (tmp_path / "out" / "results.md").read_text()
    assert code == 0 and "left out office q1 (gold at 0): none of its documents has 16 tokens" in err
    assert "Left out: 1 prompt: none of its documents has 16 tokens or more" in text
    assert "1 prompt: place 1 is behind the last of its documents" in text
    assert "Read as text: 2 documents of under 16 tokens" in text and "2 documents too short" in err
    assert "| full |" in text and "100 % |" in text and "1.0 chunks" in text


def test_adapters_are_compared_across_data_sets(measure: Run, file: Path, adapter: Adapter, tmp_path: Path):
    adapter.save(tmp_path / "mine.safetensors")
    named = f"mine={tmp_path / 'mine.safetensors'}"
    code, out, _ = measure(
        "--data", file, "--adapter", "none", "--adapters", named, "--out", tmp_path / "out", "--gold-positions", 1
    )
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert code == 0 and [row["method"] for row in rows[:5]] == ["full", "packet", "plain", "none", "packet:mine"]
    assert "| mine | " in (tmp_path / "out" / "results.md").read_text()
    assert (tmp_path / "out" / "cross_domain.png").is_file() and "cross_domain.png" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", "ful"], "no method 'ful'"),
        (["--style", "none of these"], "no style"),
        (["--gold-positions", "9"], "place 9 is behind the last of its documents"),
        (["--data", "no such set"], "no data set"),
        (["--gold-positions", "-1"], "below 0"),
        (["--adapters", "mine"], "NAME=FILE"),
    ],
)
def test_wrong_options_are_refused_in_one_line(measure: Run, file: Path, tmp_path: Path, options: list[str], says: str):
    code, _, err = measure("--data", file, "--out", tmp_path / "out", *options)
    assert code in (1, 2) and says in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_malformed_line_is_named(measure: Run, file: Path, tmp_path: Path):
    file.write_text(file.read_text() + "\n{")
    code, _, err = measure("--data", file, "--out", tmp_path / "out")
    assert code == 1 and "line 4" in err
