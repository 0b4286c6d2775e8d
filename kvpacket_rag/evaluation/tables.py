"""Results as files: ``results.json`` for programs, ``results.md`` for people."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpacket_rag.evaluation.cross_domain import cross_domain_markdown
from kvpacket_rag.evaluation.results import Row

_QUALITY = (
    "method",
    "F1",
    "minus full",
    "EM",
    "contains",
    "KL, nats a token",
    "agreement",
    "recovered gap in KL",
    "in contains",
)
_COST = (
    "method",
    "first token, ms",
    "95th percentile",
    "of it loading",
    "of it assembling",
    "FLOPs",
    "read again",
    "bytes a token",
)
_NOTES = """\
Figures stand before their 95 % interval, found by drawing questions again with replacement. F1 and EM are those of
SQuAD, the best over the gold answers; *minus full* is F1 less that of full prefill, question by question; *contains*
counts answers in which a gold answer stands word for word (yes/no questions: whose first yes or no is right). KL is
the divergence of the next-token distributions from those of full prefill, and agreement the share of equal most likely
tokens, both along the greedy answer of full prefill. The recovered gap is (method - plain) / (full - plain): 0 is plain
concatenation, 1 full prefill; "–" where the two cannot be told apart or were not measured. *Read again* and bytes a
token are for each token of the chunks; shorter documents are text, which every method but *none* reads.
"""


def write_results(rows: Sequence[Row], folder: Path, about: Mapping[str, str]) -> None:
    """Write both files anew.

    Args:
        rows: of :func:`~kvpacket_rag.evaluation.results.summarise`.
        folder: where to.
        about: what was measured, and on what, name to value.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "results.json", json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n")
    _replace(folder / "results.md", markdown(rows, about))


def markdown(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    """The tables as text."""
    parts = ["# Evaluation\n", "\n".join(f"- {name}: {value}" for name, value in about.items()) + "\n", _NOTES]
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data]
        parts += [f"## {data}\n", _introduction(own), _table(_QUALITY, [_quality(row) for row in own])]
        if own[0]["ttft_seconds"] is not None:
            parts.append(_table(_COST, [_cost(row) for row in own]))
    return "\n".join(filter(None, [*parts, cross_domain_markdown(rows)]))


def _introduction(rows: Sequence[Row]) -> str:
    first = rows[0]
    most = max(row["n"] for row in rows)
    text = (
        f"{most} questions, {first['chunks']:.1f} chunks and {first['prompt_tokens']:.0f} tokens a prompt on average."
    )
    if any(row["runs"] > row["n"] for row in rows):
        text += f" Each asked several times, {max(row['runs'] for row in rows)} answers a method in all."
    if first["full_beats_none"] is False:
        text += (
            " **Full prefill itself answers these questions no better, as far as this many can tell, than the model "
            "does without any documents: scores of answers say little here, and fidelity (KL, agreement) is the "
            "measure.**"
        )
    return text + "\n"


def _quality(row: Row) -> list[str]:
    digits = {"f1": 3, "f1_minus_full": 3, "em": 3, "contains": 3, "kl": 4, "agreement": 3}
    figures = [_with_interval(row, name, count) for name, count in digits.items()]
    return [row["method"], *figures, *(_with_interval(row, f"recovered_gap{n}", 2) for n in ("", "_contains"))]


def _cost(row: Row) -> list[str]:
    return [
        row["method"],
        _with_interval(row, "ttft_seconds", 1, 1000),
        *(f"{1000 * row[name]:.1f}" for name in ("ttft_seconds_p95", "load_seconds", "assemble_seconds")),
        f"{row['flops']:.3g}",
        f"{100 * row['recompute_ratio']:.0f} %",
        f"{row['bytes_per_token']:,.0f}" if row["bytes_per_token"] else "–",
    ]


def _with_interval(row: Row, name: str, digits: int, scale: float = 1.0) -> str:
    if row[name] is None:
        return "–"
    value, low, high = (f"{scale * row[key]:.{digits}f}" for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a whole file, or leave the one that is there as it was."""
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
