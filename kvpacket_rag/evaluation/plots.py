"""Pictures of results, drawn by matplotlib into files; no window is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpacket_rag.errors import MissingExtraError
from kvpacket_rag.evaluation.results import NONE, WHOLE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one fewer than colours, so that each pair of the two differs
_KNOWN = ("packet", "plain", "full", "none", "random", "epic", "cacheblend", "a3", "legolink", "sam-kv")
_PANEL_INCHES = (4.2, 3.4)
_MOST_COLUMNS = 3
_DPI = 150
_CURVES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("loss", "loss", {"alpha": 0.4, "linewidth": 1}),
    ("validation_kl", "validation KL", {"marker": "o"}),
)
_LINEAR_BELOW = 1e-3  # nats; the axis of the divergence is logarithmic above


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that matplotlib's Agg draws.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("pictures need matplotlib; pip install 'kvpacket-rag[eval]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def plot_f1_against_ttft(rows: Sequence[Row], path: Path) -> None:
    """F1 of the answers against the time to the first token; a panel for each data set, lines join one method's ratios.

    Args:
        rows: of :func:`~kvpacket_rag.evaluation.results.summarise`; those of whole data sets are shown.
        path: of the picture.
    """
    shown = [row for row in rows if row["part"] == WHOLE]
    figure, axes = _panels(shown)
    order = _order(shown)
    for data, axis in axes.items():
        for family, points in _families([row for row in shown if row["data"] == data]).items():
            times = [1000 * row["ttft_seconds"] for row in points]
            _draw(axis, family, times, points, "f1", order[family])
        axis.set_xscale("log", subs=[2, 5])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.set(xlabel="time to first token, ms (median)", ylabel="F1", title=data, ylim=(0, None))
    _legend(figure, axes)
    save(figure, path)


def plot_kl_against_recompute_ratio(rows: Sequence[Row], path: Path) -> None:
    """Divergence from full prefill against the share of chunk tokens read again; a panel for each data set.

    Args:
        rows: of :func:`~kvpacket_rag.evaluation.results.summarise`; those of whole data sets are shown, but not
            the method without the chunks.
        path: of the picture.
    """
    shown = [row for row in rows if row["part"] == WHOLE and row["method"] != NONE]
    figure, axes = _panels(shown)
    order = _order(shown)
    for data, axis in axes.items():
        for family, points in _families([row for row in shown if row["data"] == data]).items():
            ratios = [100 * row["recompute_ratio"] for row in points]
            _draw(axis, family, ratios, points, "kl", order[family])
        axis.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axis.set(xlabel="chunk tokens read again, %", ylabel="KL from full prefill, nats a token", title=data)
        axis.set_ylim(0, None)
    _legend(figure, axes)
    save(figure, path)


def plot_frontier(curves: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Quality against the bytes that are stored for a token: F1 of answers, and divergence from full prefill.

    Args:
        curves: name to rows of :func:`~kvpacket_rag.evaluation.results.summarise`, of one data set or the mean of
            several, in the order in which a line is to join them.
        path: of the picture.
    """
    figure = new_figure(2 * _PANEL_INCHES[0], _PANEL_INCHES[1] + 0.9)
    quality, distance = figure.subplots(1, 2)
    for number, (name, rows) in enumerate(curves.items()):
        sizes = [row["bytes_per_token"] / 1000 for row in rows]
        _draw(quality, name, sizes, rows, "f1", number)
        _draw(distance, name, sizes, rows, "kl", number)
    quality.set(ylabel="F1", ylim=(0, None))
    distance.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    distance.set(ylabel="KL from full prefill, nats a token")
    for axis in (quality, distance):
        axis.set_xscale("log", subs=[2, 5])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.set_xlabel("kB stored for a token")
        axis.grid(alpha=0.3)
    _legend(figure, {"": quality})
    save(figure, path)


def plot_heat_map(
    table: Mapping[str, Mapping[str, float | None]], path: Path, title: str = "Recovered gap in KL"
) -> None:
    """A table of shares as colours and numbers; 0 is plain concatenation, 1 full prefill.

    Args:
        table: row name to column name to value; None for what was not measured.
        path: of the picture.
        title: above it.
    """
    names = list(dict.fromkeys(column for row in table.values() for column in row))
    values = [[row.get(name) for name in names] for row in table.values()]
    grid = np.array([[np.nan if value is None else value for value in row] for row in values], dtype=float)
    figure = new_figure(2.6 + 1.1 * len(names), 1.6 + 0.55 * len(table))
    axis = figure.subplots()
    image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_yticks(range(len(table)), list(table))
    for (row, column), value in np.ndenumerate(grid):
        text, is_dark = ("–", False) if np.isnan(value) else (f"{value:.2f}", value < 0.6)
        axis.text(column, row, text, ha="center", va="center", color="white" if is_dark else "black")
    axis.set(xlabel="tested on", ylabel="trained on", title=title)
    figure.colorbar(image, ax=axis)
    save(figure, path)


def plot_training(logs: Mapping[str, Path], path: Path) -> None:
    """Curves of loss and validation divergence over steps.

    Args:
        logs: name to JSON Lines file; lines hold ``step`` and ``loss``, ``validation_kl`` or both.
        path: of the picture.
    """
    figure = new_figure(1.6 * _PANEL_INCHES[0], 1.2 * _PANEL_INCHES[1])
    axis = figure.subplots()
    for number, (name, log) in enumerate(logs.items()):
        entries = _read_log(log)
        colour = _COLOURS[number % len(_COLOURS)]
        for key, label, style in _CURVES:
            points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                axis.plot(steps, values, color=colour, label=f"{name}: {label}", **style)
    axis.set(xlabel="step", ylabel="nats a token", title="Training")
    axis.set_ylim(0, None)
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, path)


def _read_log(path: Path) -> list[dict[str, Any]]:
    """Its entries; a line that was cut short when a run was stopped is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
    return entries


def _panels(rows: Sequence[Row]) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one panel a data set."""
    names = list(dict.fromkeys(row["data"] for row in rows)) or [""]
    columns = min(len(names), _MOST_COLUMNS)
    lines = -(-len(names) // columns)
    figure = new_figure(columns * _PANEL_INCHES[0], lines * _PANEL_INCHES[1] + 0.6)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in grid[len(names) :]:
        axis.set_visible(False)
    for axis in grid:
        axis.grid(alpha=0.3)
    return figure, dict(zip(names, grid, strict=False))


def _families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by method without its setting, each family in the order of what it reads again."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_family(row["method"]), []).append(row)
    return {name: sorted(points, key=lambda row: row["recompute_ratio"]) for name, points in found.items()}


def _order(rows: Sequence[Row]) -> dict[str, int]:
    """A number for every family, by which it is drawn; known ones always have the same."""
    return {name: number for number, name in enumerate(dict.fromkeys((*_KNOWN, *_families(rows))))}


def _family(method: str) -> str:
    name, _, setting = method.rpartition("-")
    return name if name and setting.replace(".", "", 1).isdigit() else method


def _draw(axis: Axes, family: str, across: Sequence[float], rows: Sequence[Row], figure: str, number: int) -> None:
    values = [row[figure] for row in rows]
    below = [max(0.0, row[figure] - row[f"{figure}_low"]) for row in rows]
    above = [max(0.0, row[f"{figure}_high"] - row[figure]) for row in rows]
    axis.errorbar(
        across,
        values,
        yerr=[below, above],
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=6,
        linewidth=1,
        elinewidth=0.8,
        capsize=2,
        clip_on=False,  # whole markers where a figure is 0
        zorder=3,
        label=family,
    )


def _legend(figure: Figure, axes: Mapping[str, Axes]) -> None:
    """One legend for all panels, below them."""
    shown: dict[str, Any] = {}
    for axis in axes.values():
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    if shown:
        fitting = int(figure.get_figwidth() / (0.1 * max(map(len, shown)) + 0.9))  # inches of letters and of a sign
        columns = max(1, min(len(shown), fitting))
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False)
