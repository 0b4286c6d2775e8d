"""One question with its documents and answers, and the JSON Lines files that hold many."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvpacket_rag.errors import DatasetError

Split = Literal["train", "dev"]


@dataclass(frozen=True, slots=True)
class SourceText:
    """A document to read before answering.

    Attributes:
        title: may be empty.
        text: whole, as it was written.
        is_supporting: the answer is drawn from it; otherwise it is a distractor.
    """

    title: str
    text: str
    is_supporting: bool = False


@dataclass(frozen=True, slots=True)
class QASample:
    """A question, what to read, and the answers that count as right.

    Attributes:
        sample_id: unique within its data set.
        question: in natural language.
        answers: at least one; the first is the preferred wording.
        documents: at least one, in the order of the data set.
        domain: the kind of data, such as "hotpotqa".
        meta: whatever else the data set tells.
    """

    sample_id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[SourceText, ...]
    domain: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_yes_no(self) -> bool:
        """Whether every answer is yes or no, on which F1 says little."""
        return all(answer.strip().rstrip(".").lower() in ("yes", "no") for answer in self.answers)


def read_jsonl(path: str | Path, domain: str | None = None) -> list[QASample]:
    """The samples of a JSON Lines file, in its order; blank lines are skipped.

    Each line is an object ``{"id", "question", "answers": [...], "documents": [{"title", "text",
    "is_supporting"}], "meta": {...}}``. The id defaults to the file's name and the line number, "title" to
    "", "is_supporting" to false and "meta" to {}.

    Args:
        path: of the file, in UTF-8.
        domain: of every sample; by default the file's name without its ending, or for a file called
            ``train.jsonl`` or ``dev.jsonl`` the folder's.

    Raises:
        DatasetError: the file is missing, empty or malformed; the message names file and line.
    """
    path = Path(path)
    domain = domain or domain_of(path)
    samples: list[QASample] = []
    lines: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        sample = parse_row(row, where, domain, default_id=f"{path.stem}-{number}")
        first = lines.setdefault(sample.sample_id, number)
        if first != number:
            raise DatasetError(f"{where}: the id {sample.sample_id!r} is that of line {first} too; give each its own")
        samples.append(sample)
    if not samples:
        raise DatasetError(f"{path} is empty; it should hold one JSON object a line")
    return samples


def domain_of(path: Path) -> str:
    """A file's name without its ending; the folder's name for ``train.jsonl`` and ``dev.jsonl``."""
    return path.resolve().parent.name if path.stem in ("train", "dev") else path.stem


def parse_row(row: object, where: str, domain: str, default_id: str) -> QASample:
    """A sample from one decoded JSON object; DatasetError, which begins with ``where``, if it is malformed."""
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object, found {_kind(row)}")
    answers = _list(row, "answers", where)
    documents = _list(row, "documents", where)
    sample_id = row.get("id", default_id)
    meta = row.get("meta", {})
    if not isinstance(meta, dict):
        raise DatasetError(f"{where}: 'meta' should be an object, found {_kind(meta)}")
    return QASample(
        sample_id=_text(str(sample_id) if isinstance(sample_id, int) else sample_id, "'id'", where),
        question=_text(row.get("question"), "'question'", where),
        answers=tuple(_text(answer, f"answer {number}", where) for number, answer in enumerate(answers, 1)),
        documents=tuple(_document(found, f"document {number}", where) for number, found in enumerate(documents, 1)),
        domain=domain,
        meta=meta,
    )


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """Line numbers, counted from 1, and what the lines hold."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            raise DatasetError(f"{path}, line {number}: not JSON: {error}") from error


def _document(found: object, name: str, where: str) -> SourceText:
    if not isinstance(found, dict):
        raise DatasetError(f"{where}: {name} should be an object with 'title' and 'text', found {_kind(found)}")
    is_supporting = found.get("is_supporting", False)
    if not isinstance(is_supporting, bool):
        raise DatasetError(f"{where}: 'is_supporting' of {name} should be true or false, found {_kind(is_supporting)}")
    title = _string(found.get("title", ""), f"the title of {name}", where)
    return SourceText(title, _text(found.get("text"), f"the text of {name}", where), is_supporting)


def _list(row: dict[str, Any], key: str, where: str) -> Sequence[object]:
    value = row.get(key)
    if not isinstance(value, list):
        raise DatasetError(f"{where}: {key!r} should be a list, found {_kind(value)}")
    if not value:
        raise DatasetError(f"{where}: the list {key!r} is empty; it needs at least one entry")
    return value


def _text(value: object, name: str, where: str) -> str:
    """A string that says something."""
    text = _string(value, name, where)
    if not text.strip():
        raise DatasetError(f"{where}: {name} is empty")
    return text


def _string(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{where}: {name} should be a string, found {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"{where}: {name} holds a lone surrogate, which no encoding knows; remove it") from error
    return value


def _kind(value: object) -> str:
    """A value's type in the words of JSON."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "nothing" if value is None else kinds.get(type(value), "an object")
