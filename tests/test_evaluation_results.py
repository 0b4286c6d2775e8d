"""From records to rows and tables, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_samples import record

from kvpacket_rag.evaluation.cross_domain import adapter_variants, cross_domain, cross_domain_markdown
from kvpacket_rag.evaluation.records import Record
from kvpacket_rag.evaluation.results import Row, summarise
from kvpacket_rag.evaluation.tables import markdown, write_results

_TIMES = ("ttft_seconds", "load_seconds", "assemble_seconds")


def records(method: str, kl: list[float], f1: list[float] | None = None, **more: Any) -> list[Record]:
    """One question each."""
    scores = f1 or [0.5] * len(kl)
    return [
        record(method=method, sample_id=f"q{number}", kl=value, f1=score, **more)
        for number, (value, score) in enumerate(zip(kl, scores, strict=True))
    ]


def row(rows: list[Row], method: str, data: str = "set") -> Row:
    return next(found for found in rows if (found["method"], found["data"]) == (method, data))


def test_rows_hold_means_and_gaps_with_their_intervals():
    found = summarise(
        [
            *records("full", [0, 0, 0, 0], [1.0, 0.8, 0.9, 0.9]),
            *records("plain", [0.2, 0.4, 0.6, 0.8], [0.1, 0.2, 0.0, 0.1]),
            *records("packet", [0.1, 0.1, 0.2, 0.1], [0.6, 0.5, 0.4, 0.7]),
        ]
    )
    packet = row(found, "packet")
    assert (packet["n"], packet["runs"], packet["part"]) == (4, 4, "all")
    assert packet["kl"] == pytest.approx(0.125) and packet["f1"] == pytest.approx(0.55)
    assert packet["recovered_gap"] == pytest.approx(1 - 0.5 / 2.0)
    assert packet["recovered_gap_f1"] == pytest.approx((0.55 - 0.1) / (0.9 - 0.1))
    assert packet["f1_minus_full"] == pytest.approx(-0.35)
    for name in ("kl", "f1", "recovered_gap", "recovered_gap_f1", "ttft_seconds"):
        assert packet[f"{name}_low"] <= packet[name] <= packet[f"{name}_high"]
    assert row(found, "plain")["recovered_gap"] == 0 and row(found, "full")["recovered_gap_f1"] == 1


def test_a_gap_that_is_not_there_is_not_divided_by():
    found = summarise([*records("full", [0, 0]), *records("plain", [0.0, 0.0]), *records("packet", [0.1, 0.2])])
    packet = row(found, "packet")
    assert packet["recovered_gap"] is None and packet["recovered_gap_f1"] is None
    assert row(summarise(records("packet", [0.1])), "packet")["recovered_gap"] is None
    json.dumps(found, allow_nan=False)


def test_times_are_medians_over_all_runs_and_repetitions_are_no_questions_of_their_own():
    found = [
        record(sample_id=f"q{number}", seed=seed, ttft_seconds=0.1 + seed + number, f1=float(number == seed))
        for number in range(2)
        for seed in range(3)
    ]
    full = row(summarise(found), "full")
    assert (full["n"], full["runs"]) == (2, 6)
    assert full["ttft_seconds"] == pytest.approx(np.median([0.1, 1.1, 2.1, 1.1, 2.1, 3.1]))
    assert full["ttft_seconds_p95"] == pytest.approx(np.quantile([0.1, 1.1, 2.1, 1.1, 2.1, 3.1], 0.95))
    assert (full["f1"], full["f1_low"], full["f1_high"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_asking_again_makes_no_interval_of_a_time_narrower():
    drawn = np.random.default_rng(0).random(10)
    once, often, uneven = (
        row(
            summarise(
                [
                    record(sample_id=f"q{number}", seed=seed, **dict.fromkeys(_TIMES, value))
                    for number, value in enumerate(drawn)
                    for seed in range(repeats(number))
                ]
            ),
            "full",
        )
        for repeats in (lambda n: 1, lambda n: 20, lambda n: 3 + (n == 0))
    )
    for name in _TIMES:
        low, high = f"{name}_low", f"{name}_high"
        assert (often[low], often[high]) == pytest.approx((once[low], once[high]), rel=0.05)
        assert uneven[high] - uneven[low] == pytest.approx(once[high] - once[low], rel=0.25)
    assert uneven["ttft_seconds"] == pytest.approx(np.median([drawn[0], *np.repeat(drawn, 3)]))


@pytest.mark.parametrize(("plain", "is_told"), [(1e-7, False), (1e-3, True)])
def test_a_divergence_by_rounding_alone_is_no_gap_to_recover(plain: float, is_told: bool):
    found = summarise([*records("plain", [plain, 2 * plain]), *records("packet", [2 * plain, plain])])
    assert (row(found, "packet")["recovered_gap"] is not None) is is_told


def test_gaps_compare_the_same_questions_only():
    found = summarise([*records("plain", [0.4, 0.4, 9.0]), *records("packet", [0.1, 0.1])])
    assert row(found, "packet")["recovered_gap"] == pytest.approx(0.75)


def test_yes_no_questions_and_places_of_the_supporting_chunk_stand_apart():
    found = summarise(
        [
            *(record(sample_id=f"q{n}", gold_position=place, f1=0.1 * place) for n in range(2) for place in (0, 3)),
            record(sample_id="y", gold_position=0, yes_no=True, f1=1.0),
        ]
    )
    assert [(r["data"], r["part"], r["n"]) for r in found] == [
        ("set", "all", 2),
        ("set (yes/no)", "yes/no", 1),
        ("set (gold at 0)", "gold 0", 2),
        ("set (gold at 3)", "gold 3", 2),
    ]
    assert found[0]["f1"] == pytest.approx(0.15) and found[3]["f1"] == pytest.approx(0.3)


def test_sets_weigh_equally_in_their_mean():
    found = summarise(
        [
            *records("plain", [0.4] * 10, data="a"),
            *records("packet", [0.1] * 10, data="a"),
            *records("plain", [1.0] * 2, data="b"),
            *records("packet", [0.5] * 2, data="b"),
        ]
    )
    both = row(found, "packet", "mean of 2 sets")
    assert both["recovered_gap"] == pytest.approx((0.75 + 0.5) / 2)
    assert (both["n"], both["ttft_seconds"], both["part"]) == (12, None, "mean")


def test_the_interval_of_a_mean_of_sets_does_not_depend_on_the_order_of_their_questions():
    drawn = np.random.default_rng(1).random(40)
    expected = 2 * 1.96 * np.sqrt(drawn.var() / 40 / 2)  # of two sets that have nothing to do with each other
    for other in (drawn, 1 - drawn, np.sort(drawn)):
        sets = [*records("full", [0] * 40, list(drawn), data="a"), *records("full", [0] * 40, list(other), data="b")]
        both = row(summarise(sets), "full", "mean of 2 sets")
        assert both["f1_high"] - both["f1_low"] == pytest.approx(expected, rel=0.1)


def chance(full: list[float], none: list[float]) -> list[Record]:
    return [*records("full", [0.0] * len(full), full), *records("none", [1.0] * len(none), none)]


def test_tables_say_where_full_prefill_is_near_chance():
    weak, strong = (
        summarise(chance([0.1, 0.0, 0.2, 0.0], [0.0, 0.2, 0.0, 0.1])),
        summarise(chance([0.9] * 4, [0.1] * 4)),
    )
    assert row(weak, "full")["full_beats_none"] is False and row(strong, "full")["full_beats_none"] is True
    assert row(summarise(records("full", [0.0])), "full")["full_beats_none"] is None
    assert "fidelity (KL, agreement) is the measure" in " ".join(markdown(weak, {}).split())
    assert "is the measure" not in markdown(strong, {})


def test_files_hold_the_rows_and_a_table_of_each_set(tmp_path: Path):
    rows = summarise([*records("full", [0.0, 0.0]), *records("plain", [0.2, 0.4])])
    write_results(rows, tmp_path / "new", {"Model": "tiny", "Adapter": "none"})
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == rows
    text = (tmp_path / "new" / "results.md").read_text()
    assert "- Model: tiny" in text and "## set" in text and "2 questions, 4.0 chunks" in text
    assert "| plain | 0.500 [0.500, 0.500] | 0.000 [0.000, 0.000] |" in text and "0.3000 [0.2000, 0.4000]" in text
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["results.json", "results.md"]


def test_adapters_are_set_against_data_sets(adapter: Any):
    assert [(v.label, v.method) for v in adapter_variants({"niah": adapter})] == [("packet:niah", "packet")]
    rows = summarise(
        [
            *records("plain", [0.4, 0.4], data="a"),
            *records("packet:niah", [0.1, 0.1], data="a"),
            *records("packet:mix", [0.2, 0.2], data="a"),
            *records("plain", [0.4, 0.4], data="b"),
            *records("packet:mix", [0.1, 0.1], data="b"),
        ]
    )
    table = cross_domain(rows)
    assert table["niah"] == {"a": pytest.approx(0.75)}
    assert table["mix"]["a"] == pytest.approx(0.5) and table["mix"]["mean of 2 sets"] == pytest.approx(0.625)
    text = cross_domain_markdown(rows)
    assert "| adapter | a | b | mean of 2 sets |" in text and "| niah | 0.75 [0.75, 0.75] | – | – |" in text
    assert cross_domain_markdown(summarise(records("plain", [0.1]))) == ""
