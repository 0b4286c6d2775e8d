"""Rows and samples for the tests of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpacket_rag.datasets.sample import QASample, SourceText

ROW: dict[str, Any] = {
    "id": "q1",
    "question": "Who signed the lease?",
    "answers": ["Ada Marlow", "A. Marlow"],
    "documents": [
        {"title": "Lease", "text": "Ada Marlow signed the lease.", "is_supporting": True},
        {"title": "Garden", "text": "The garden is open.", "is_supporting": False},
    ],
    "meta": {"hops": 1},
}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def sample_with(supporting: tuple[int, ...], count: int) -> QASample:
    """A sample of ``count`` documents, of which those at the places given are supporting."""
    documents = tuple(SourceText(f"t{i}", f"Text number {i}.", i in supporting) for i in range(count))
    return QASample("s", "Which?", ("number",), documents, "test")


def char_ids(text: str) -> list[int]:
    """A tokenizer with one token a character."""
    return [ord(letter) for letter in text]


def word_ids(text: str) -> list[int]:
    """A tokenizer with one token a word."""
    return [len(word) for word in text.split()]
