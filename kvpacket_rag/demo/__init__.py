"""The documents and questions of `kvpacket demo`: an invented company that builds cold-room controllers.

Nothing here knows of indexes or models; it only says where the texts lie and what to ask about them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question that one document of the corpus answers.

    Attributes:
        question: what to ask.
        answer: the shortest right answer, as the document words it.
        document: file name, within the corpus folder, of the document that holds the answer.
    """

    question: str
    answer: str
    document: str


def corpus_folder() -> Path:
    """The folder of Markdown documents to build the demo's index from: handbook, policies and product manual."""
    return _FOLDER / "corpus"


def questions() -> list[DemoQuestion]:
    """The questions the demo asks, in the order it asks them."""
    entries = json.loads((_FOLDER / "questions.json").read_text(encoding="utf-8"))
    return [DemoQuestion(**entry) for entry in entries]
