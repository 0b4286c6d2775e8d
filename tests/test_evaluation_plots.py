"""Pictures are drawn, and show what they should; the attention behind one of them is that of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from record_samples import record, samples

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import MissingExtraError
from kvpacket_rag.evaluation import attention, plots
from kvpacket_rag.evaluation.attention import mass, question_attention, segments
from kvpacket_rag.evaluation.case import score
from kvpacket_rag.evaluation.measure import prefilled
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.methods.observe import observed
from kvpacket_rag.evaluation.questions import PromptSettings, make_questions
from kvpacket_rag.evaluation.results import Row, summarise

METHODS = {"full": 1.0, "plain": 0.0, "none": 0.0, "a3-0.1": 0.1, "a3-0.5": 0.5, "packet:mine": 0.0}


@pytest.fixture(name="rows")
def rows_fixture() -> list[Row]:
    """Two data sets, six methods."""
    return summarise(
        [
            record(data=data, method=method, sample_id=f"q{n}", kl=0.1 * n, recompute_ratio=ratio)
            for data in ("one", "two")
            for n in range(3)
            for method, ratio in METHODS.items()
        ]
    )


@pytest.fixture(name="drawn")
def drawn_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures as they are saved."""
    found: list[Any] = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure) or save(figure, path))
    return found


def labels(axis: Any) -> set[str]:
    return set(axis.get_legend_handles_labels()[1])


def test_a_frontier_joins_the_points_of_a_line_in_their_order(drawn: list[Any], tmp_path: Path):
    sizes = {"packet@none": 4000.0, "packet@random-0.5": 2000.0, "packet@int8": 2100.0}
    found = [
        record(method=method, sample_id=f"q{n}", kl=0.1 + n, bytes_per_token=size)
        for method, size in sizes.items()
        for n in range(3)
    ]
    rows = {row["method"]: row for row in summarise(found)}
    curves = {"none": [rows["packet@none"], rows["packet@random-0.5"]], "int8": [rows["packet@int8"]]}
    plots.plot_frontier(curves, tmp_path / "frontier.png")
    for axis in drawn[0].axes[:2]:
        assert labels(axis) == {"none", "int8"}
        assert list(axis.get_lines()[0].get_xdata()) == [4.0, 2.0]
    assert (tmp_path / "frontier.png").stat().st_size > 0


def test_a_legend_of_long_names_stays_in_the_picture(rows: list[Row], drawn: list[Any], tmp_path: Path):
    stored = {**rows[0], "bytes_per_token": 1000.0}
    curves = {f"single cache, compactor, k8v4 {number}": [stored] for number in range(6)}
    plots.plot_frontier(curves, tmp_path / "frontier.png")
    (legend,) = drawn[0].legends
    place = legend.get_window_extent()
    assert place.x0 >= 0 and place.x1 <= drawn[0].bbox.width


@pytest.mark.parametrize("plot", [plots.plot_f1_against_ttft, plots.plot_kl_against_recompute_ratio])
def test_there_is_a_panel_for_every_data_set_and_a_line_for_every_method(
    plot: Callable[..., None], rows: list[Row], drawn: list[Any], tmp_path: Path
):
    plot(rows, tmp_path / "deep" / "picture.png")
    assert (tmp_path / "deep" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in drawn[0].axes] == ["one", "two"]
    shown = {"full", "plain", "a3", "packet:mine"}
    assert labels(drawn[0].axes[0]) == (shown | {"none"} if plot is plots.plot_f1_against_ttft else shown)


def test_the_ratios_of_one_method_are_joined_in_their_order(rows: list[Row], drawn: list[Any], tmp_path: Path):
    plots.plot_kl_against_recompute_ratio(rows, tmp_path / "picture.svg")
    lines = {bar.get_label(): bar.lines[0].get_xdata().tolist() for bar in drawn[0].axes[0].containers}
    assert lines["a3"] == pytest.approx([10, 50]) and lines["full"] == pytest.approx([100])


def test_a_heat_map_shows_every_number_and_what_is_missing(drawn: list[Any], tmp_path: Path):
    plots.plot_heat_map({"mix": {"a": 0.5, "b": 1.2}, "niah": {"a": None}}, tmp_path / "picture.png")
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["0.50", "1.20", "–", "–"]


def test_training_curves_come_from_the_log(drawn: list[Any], tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0, "validation_kl": 0.3}\n{"step": 1, "loss": 0.5}\n\n{"step": 2, "loss": 0.4, "lr": 1}\n')
    plots.plot_training({"mix": log}, tmp_path / "picture.png")
    lines = {
        line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in drawn[0].axes[0].lines
    }
    assert lines == {"mix: loss": ([1, 2], [0.5, 0.4]), "mix: validation KL": ([0], [0.3])}


def test_a_line_cut_short_leaves_the_curves_as_they_are(drawn: list[Any], tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    plots.plot_training({"mix": log}, tmp_path / "picture.png")
    (line,) = drawn[0].axes[0].lines
    assert line.get_xdata().tolist() == [1]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[eval\]"):
        plots.plot_heat_map({"mix": {"a": 0.5}}, tmp_path / "picture.png")


@pytest.mark.parametrize("method", ["plain", "packet"])
def test_attention_of_the_question_is_that_of_the_model(backbone: Backbone, adapter: Adapter, method: str):
    case = next(make_questions(backbone, samples(1), PromptSettings(max_chunks=3))).case
    used = adapter if method == "packet" else Adapter.empty(backbone.hidden_size)
    expected: dict[int, torch.Tensor] = {}

    def watch(layer: int, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> None:
        keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)  # query head h reads key head h // 2
        products = queries @ keys.transpose(-1, -2) * scaling
        later = torch.ones(products.shape[-2:], dtype=torch.bool).triu(products.shape[-1] - products.shape[-2] + 1)
        expected[layer] = products.masked_fill(later, -torch.inf).softmax(-1).mean((0, 1))

    with prefilled(backbone, parse_method(method, Bench(backbone, adapter)), case) as state, torch.no_grad():
        before = score(backbone, state, [5, 6])
        state.rewind()
        question = case.parts[-1].ids or []
        found = question_attention(backbone, state.bound, state.context, question)
        with observed(backbone.model, range(3), watch):
            question_attention(backbone, state.bound, state.context, question)
        after = score(backbone, state, [5, 6])
    places = segments(case.parts, used)
    assert torch.allclose(found, torch.stack([expected[n] for n in range(3)]), atol=1e-5)
    assert torch.allclose(before, after, atol=1e-4) and backbone.model.config._attn_implementation != "eager"
    assert places[-1].stop == found.shape[1] and sum(mass(found, places).values()) == pytest.approx(1, abs=1e-5)


def test_segments_follow_the_adapter_and_what_it_absorbs(backbone: Backbone, adapter: Adapter):
    case = next(make_questions(backbone, samples(1), PromptSettings(max_chunks=2))).case
    bare, soft = (segments(case.parts, used) for used in (Adapter.empty(64), adapter))
    assert [s.kind for s in bare] == ["preamble", "chunk", "text", "chunk", "question"]
    one = ["soft tokens", "chunk", "soft tokens"]
    assert [s.kind for s in soft] == ["preamble", *one, *one, "question"]
    assert [s.stop - s.start for s in soft if s.kind == "soft tokens"] == [3, 2, 3, 2]
    assert bare[0].start == 0 and all(a.stop == b.start for a, b in pairwise(soft))
    left_out = segments(case.parts, Adapter(adapter.header, adapter.trailer, {"header": "left out"}))
    assert [s.stop - s.start for s in left_out if s.kind == "soft tokens"] == [2, 2]


def test_the_picture_of_attention_has_a_panel_for_each_way(
    backbone: Backbone, adapter: Adapter, drawn: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "save", plots.save)
    case = next(make_questions(backbone, samples(1), PromptSettings(max_chunks=2))).case
    attention.draw_attention(backbone, case, adapter, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").is_file()
    plain, packets = drawn[0].axes
    assert {label.rpartition(" ")[0] for label in labels(plain)} == {"preamble", "chunk", "text", "question"}
    assert {label.rpartition(" ")[0] for label in labels(packets)} == {"preamble", "chunk", "soft tokens", "question"}
