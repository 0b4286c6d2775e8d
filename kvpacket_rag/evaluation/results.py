"""From records to figures with 95 % intervals, one row for each data set and method."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpacket_rag.evaluation.bootstrap import (
    Estimate,
    average,
    difference,
    estimate,
    estimate_of_runs,
    mean,
    median,
    percentile_95,
    recovered_divergence,
    recovered_score,
)
from kvpacket_rag.evaluation.records import Record

Row = dict[str, Any]

FULL, PLAIN, NONE = "full", "plain", "none"  # methods
WHOLE, YES_NO, MEAN = "all", "yes/no", "mean"  # parts of a data set; places of the supporting chunk are "gold 0", …
_MEANS = ("f1", "em", "contains", "kl", "agreement", "flops", "recompute_ratio", "bytes_per_token")
_SECONDS = ("ttft_seconds", "load_seconds", "assemble_seconds")
_LEAST_KL = 5e-5  # nats a token that tables show as more than 0; rounding alone comes to 1e-7 in float32
_SCORES = ("f1", "em", "contains")
_Unit = tuple[str, int, int | None]  # sample, seed, place of the supporting chunk
_Measured = dict[_Unit, Record]
_SIZES_OVER_SETS = ("chunks", "prompt_tokens", "bytes_per_token")
_OVER_SETS = ("f1", "em", "contains", "kl", "agreement", "f1_minus_full", "recovered_gap")


def summarise(records: Sequence[Record], seed: int = 0) -> list[Row]:
    """Figures of every data set and method.

    Yes/no questions stand apart, as ``"NAME (yes/no)"``, and so does every place of the supporting chunk that was
    tried, as ``"NAME (gold at 2)"``. With several data sets the rows of ``"mean of N sets"`` weigh each equally.

    Args:
        records: of any number of data sets and methods, in the order they shall have.
        seed: of the draws.

    Returns:
        Rows with ``data``, ``part`` (of the data set), ``method``, ``n`` (questions), ``runs`` (records), figures and
        the ends of their intervals, such as ``f1``, ``f1_low``, ``f1_high``. Times are medians,
        ``ttft_seconds_p95`` is the 95th percentile. ``recovered_gap`` is of the divergence, ``recovered_gap_f1`` and
        so on of scores; a gap that is not there, or cannot be told from zero, is None. ``f1_minus_full`` compares
        the answers with those of full prefill, question by question. ``full_beats_none`` says whether the answers
        of full prefill can be told from those without documents; None where one of the two was not measured.
    """
    rows: list[Row] = []
    whole: dict[str, dict[str, dict[str, Estimate]]] = {}
    for (name, part), found in _groups(records).items():
        methods = _by_method(found)
        own_seed = _seed_of(seed, name)
        figures = {method: _figures(method, methods, own_seed) for method in methods}
        beats = _full_beats_none(methods, own_seed)
        for method, measured in methods.items():
            counts = {"n": len({unit[0] for unit in measured}), "runs": len(measured)}
            head = {"data": name, "part": part, "method": method, **counts}
            rows.append(head | _flat(figures[method]) | _sizes(measured.values()) | {"full_beats_none": beats})
        if part == WHOLE:
            whole[name] = figures
    return rows + _over_sets(whole, rows)


def _seed_of(seed: int, data: str) -> int:
    """A seed for each data set, so that sets of equal size are not drawn alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {data}".encode()).digest()[:8])


def _groups(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by the name and part of their row: open questions, yes/no questions, places of the supporting chunk."""
    records = list(records)
    places: dict[str, set[int | None]] = {}
    for record in records:
        places.setdefault(record.data, set()).add(record.gold_position)
    groups: dict[tuple[str, str], list[Record]] = {}
    for data, tried in places.items():
        own = [record for record in records if record.data == data]
        is_open = [record for record in own if not record.yes_no]
        groups[data, WHOLE] = is_open
        groups[f"{data} (yes/no)", YES_NO] = [record for record in own if record.yes_no]
        for place in sorted(place for place in tried if place is not None) if len(tried) > 1 else ():
            chosen = [record for record in is_open if record.gold_position == place]
            groups[f"{data} (gold at {place})", f"gold {place}"] = chosen
    return {name: found for name, found in groups.items() if found}


def _by_method(records: Iterable[Record]) -> dict[str, _Measured]:
    found: dict[str, _Measured] = {}
    for record in records:
        unit = (record.sample_id, record.seed, record.gold_position)
        found.setdefault(record.method, {})[unit] = record
    return found


def _runs(measured: _Measured, name: str, units: Iterable[_Unit] | None = None) -> list[list[float]]:
    """The numbers of each question, one for every time it was asked."""
    values: dict[str, list[float]] = {}
    for unit in measured if units is None else units:
        values.setdefault(unit[0], []).append(getattr(measured[unit], name))
    return list(values.values())


def _column(measured: _Measured, name: str, units: Iterable[_Unit]) -> list[float]:
    """One number a question, the mean over its repetitions, so that these do not pass for questions of their own."""
    return [float(np.mean(repeated)) for repeated in _runs(measured, name, units)]


def _figures(method: str, methods: Mapping[str, _Measured], seed: int) -> dict[str, Estimate]:
    measured = methods[method]
    found = {name: estimate(mean, _column(measured, name, measured), seed=seed) for name in _MEANS}
    for name in _SECONDS:
        found[name] = estimate_of_runs(median, _runs(measured, name), seed)
    found["ttft_seconds_p95"] = estimate_of_runs(percentile_95, _runs(measured, "ttft_seconds"), seed)
    plain, full = methods.get(PLAIN, {}), methods.get(FULL, {})
    if shared := [unit for unit in measured if unit in full]:
        columns = [_column(side, "f1", shared) for side in (measured, full)]
        found["f1_minus_full"] = estimate(difference, *columns, seed=seed)
    if shared := [unit for unit in measured if unit in plain]:
        columns = [_column(side, "kl", shared) for side in (measured, plain)]
        if np.mean(columns[1]) >= _LEAST_KL:
            found["recovered_gap"] = estimate(recovered_divergence, *columns, seed=seed)
    if shared := [unit for unit in measured if unit in plain and unit in full]:
        for name in _SCORES:
            columns = [_column(side, name, shared) for side in (measured, plain, full)]
            if _differ(estimate(difference, columns[2], columns[1], seed=seed)):
                found[f"recovered_gap_{name}"] = estimate(recovered_score, *columns, seed=seed)
    return {name: figure for name, figure in found.items() if figure.is_defined}


def _differ(gap: Estimate) -> bool:
    return gap.low > 0 or gap.high < 0


def _full_beats_none(methods: Mapping[str, _Measured], seed: int) -> bool | None:
    full, none = methods.get(FULL, {}), methods.get(NONE, {})
    shared = [unit for unit in full if unit in none]
    if not shared:
        return None
    score = "contains" if full[shared[0]].yes_no else "f1"
    columns = [_column(side, score, shared) for side in (full, none)]
    return estimate(difference, *columns, seed=seed).low > 0


def _flat(figures: Mapping[str, Estimate]) -> Row:
    """Every figure with its interval; those not defined as None."""
    gaps = ("recovered_gap", *(f"recovered_gap_{name}" for name in _SCORES))
    row: Row = {}
    for name in (*_MEANS, *_SECONDS, "ttft_seconds_p95", "f1_minus_full", *gaps):
        figure = figures.get(name)
        row[name] = figure.value if figure else None
        row[f"{name}_low"] = figure.low if figure else None
        row[f"{name}_high"] = figure.high if figure else None
    return row


def _sizes(records: Iterable[Record]) -> Row:
    """Means that need no interval."""
    found = list(records)
    return {name: float(np.mean([getattr(record, name) for record in found])) for name in ("chunks", "prompt_tokens")}


def _over_sets(whole: Mapping[str, Mapping[str, Mapping[str, Estimate]]], rows: Sequence[Row]) -> list[Row]:
    if len(whole) < 2:
        return []
    sets = list(whole.values())
    found: list[Row] = []
    for method in [name for name in sets[0] if all(name in figures for figures in sets)]:
        figures = {
            name: average([figures[method][name] for figures in sets])
            for name in _OVER_SETS
            if all(name in figures[method] for figures in sets)
        }
        own = [row for row in rows if row["method"] == method and row["part"] == WHOLE]
        counts = {name: sum(row[name] for row in own) for name in ("n", "runs")}
        sizes = {name: float(np.mean([row[name] for row in own])) for name in _SIZES_OVER_SETS}
        head = {"data": f"mean of {len(sets)} sets", "part": MEAN, "method": method, **counts}
        found.append(head | _flat(figures) | sizes | {"full_beats_none": None})
    return found
