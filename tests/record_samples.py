"""A small data set and made-up records for the tests of evaluation."""

from __future__ import annotations

from typing import Any

from conftest import CHUNKS

from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.evaluation.records import Record

QUESTIONS = [
    ("How cold is the cold room?", "minus twenty degrees", 0),
    ("Who signed the lease?", "Ada Marlow", 1),
    ("Are refunds paid in cash?", "no", 2),
]


def samples(count: int = 3) -> list[QASample]:
    """Questions about the four chunks, of which one is supporting; the third wants yes or no."""
    found = []
    for number, (question, answer, gold) in enumerate(QUESTIONS[:count]):
        documents = tuple(SourceText("", text, place == gold) for place, text in enumerate(CHUNKS))
        found.append(QASample(f"q{number}", question, (answer,), documents, "tiny"))
    return found


def record(**changed: Any) -> Record:
    """A record with plausible figures, some of them replaced; the key is made of those that name it."""
    base: dict[str, Any] = {
        "data": "set",
        "sample_id": "q0",
        "yes_no": False,
        "seed": 0,
        "gold_position": None,
        "chunks": 4,
        "prompt_tokens": 120,
        "method": "full",
        "answer": "an answer",
        "f1": 0.5,
        "em": 0.0,
        "contains": 1.0,
        "kl": 0.0,
        "agreement": 1.0,
        "load_seconds": 0.001,
        "assemble_seconds": 0.002,
        "ttft_seconds": 0.1,
        "flops": 1e9,
        "recompute_ratio": 1.0,
        "bytes_per_token": 0.0,
    } | changed
    names = ("data", "sample_id", "seed", "gold_position", "method")
    return Record(**{"key": "-".join(str(base[name]) for name in names)} | base)
