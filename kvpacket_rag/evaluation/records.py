"""What was measured, one line of JSON for each question and method, so that a run goes on where it was stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvpacket_rag.errors import StoreError
from kvpacket_rag.evaluation.measure import Measurement

_FIGURES = [field.name for field in fields(Measurement) if field.name != "answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Measurement):
    """One method on one question.

    Attributes:
        key: digest of all that the figures depend on.
        data: name of the data set.
        sample_id: of the question in it.
        yes_no: the answer is yes or no.
        seed: of distractors and order.
        gold_position: place of the first supporting chunk if it was set, else None.
        chunks: in the prompt.
        prompt_tokens: as full prefill reads them.
        method: as it is called in tables.
    """

    key: str
    data: str
    sample_id: str
    yes_no: bool
    seed: int
    gold_position: int | None
    chunks: int
    prompt_tokens: int
    method: str


class RecordFile:
    """Records on disk; appending is all that is ever done to it.

    Args:
        path: of a .jsonl file, made with its folder when the first record comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {record.key: record for record in _read(path)}
        self._ends_in_a_line = _ends_in_a_line(path)

    def find(self, key: str) -> Record | None:
        """The record of that key, if it was measured before."""
        return self._known.get(key)

    def append(self, record: Record) -> None:
        """Add a record; it is in the hands of the system when this returns."""
        line = json.dumps(asdict(record), ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line if self._ends_in_a_line else "\n" + line)
        except OSError as error:
            self._ends_in_a_line = False
            raise StoreError(
                f"cannot write to {self._path}: {error}; make room, and the run goes on from here"
            ) from error
        self._ends_in_a_line = True
        self._known[record.key] = record


def _read(path: Path) -> Iterator[Record]:
    """Records of a file; lines that were cut short, or are of another version, are left out and measured again."""
    if not path.is_file():
        return
    names = {field.name for field in fields(Record)}
    for line in path.read_bytes().split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.keys() == names and all(map(_is_figure, map(found.get, _FIGURES))):
            yield Record(**found)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _ends_in_a_line(path: Path) -> bool:
    return not path.is_file() or path.read_bytes()[-1:] in (b"", b"\n")
