"""Adapters against data sets: what an adapter learnt on one kind of text is worth on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.evaluation.results import MEAN, WHOLE, Row
from kvpacket_rag.evaluation.run import Variant

_PREFIX = "packet:"


def adapter_variants(adapters: Mapping[str, Adapter]) -> list[Variant]:
    """Packets under each of the named adapters, every one a method of its own, called ``packet:NAME``."""
    return [Variant(_PREFIX + name, "packet", adapter) for name, adapter in adapters.items()]


def cross_domain(rows: Sequence[Row], figure: str = "recovered_gap") -> dict[str, dict[str, float | None]]:
    """A figure of every adapter on every data set.

    Args:
        rows: of :func:`~kvpacket_rag.evaluation.results.summarise`, with the methods of :func:`adapter_variants`;
            other methods are left out.
        figure: of the rows.

    Returns:
        Name of the adapter to name of the data set to figure; None where it is not defined.
    """
    table: dict[str, dict[str, float | None]] = {}
    for row in _of_adapters(rows):
        table.setdefault(row["method"].removeprefix(_PREFIX), {})[row["data"]] = row[figure]
    return table


def cross_domain_markdown(rows: Sequence[Row]) -> str:
    """The recovered gap in KL of every adapter on every data set, with intervals; empty without such adapters."""
    found = _of_adapters(rows)
    if not found:
        return ""
    names = list(dict.fromkeys(row["data"] for row in found))
    methods = list(dict.fromkeys(row["method"] for row in found))
    cells = {(row["method"], row["data"]): _cell(row) for row in found}
    lines = [["adapter", *names], ["---", *["---:"] * len(names)]]
    lines += [[m.removeprefix(_PREFIX), *(cells.get((m, name), "–") for name in names)] for m in methods]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## Recovered gap in KL: adapters against data sets\n\n{table}\n"


def _of_adapters(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["part"] in (WHOLE, MEAN) and row["method"].startswith(_PREFIX)]


def _cell(row: Row) -> str:
    if row["recovered_gap"] is None:
        return "–"
    return f"{row['recovered_gap']:.2f} [{row['recovered_gap_low']:.2f}, {row['recovered_gap_high']:.2f}]"
