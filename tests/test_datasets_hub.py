from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvpacket_rag.datasets.catalogue import open_dataset
from kvpacket_rag.datasets.hub import (
    HUB_DATASETS,
    hotpotqa_sample,
    load_from_hub,
    musique_sample,
    squad_samples,
    two_wiki_sample,
)
from kvpacket_rag.datasets.sample import SourceText
from kvpacket_rag.errors import DatasetError, MissingExtraError

HOTPOT: dict[str, Any] = {
    "id": "5a",
    "question": "Which river passes the town of Ina's birth?",
    "answer": "the Orr",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["Ina", "Lund", "Lund"], "sent_id": [0, 0, 1]},
    "context": {
        "title": ["Ina", "Sea", "Lund", "Empty"],
        "sentences": [["Ina was born in Lund."], ["The sea", " is wide."], ["Lund is old.", " The Orr passes it."], []],
    },
}
MUSIQUE: dict[str, Any] = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Ina", "paragraph_text": "Ina was born in Lund.", "is_supporting": True},
        {"idx": 1, "title": "Sea", "paragraph_text": "The sea is wide.", "is_supporting": False},
    ],
    "question": "Where was Ina born?",
    "question_decomposition": [{"id": 1, "question": "Ina >> born", "answer": "Lund", "paragraph_support_idx": 0}],
    "answer": "Lund",
    "answer_aliases": ["Lund", "Town of Lund"],
    "answerable": True,
}


def squad_row(number: int, title: str = "The_Sea", text: str = "Lund") -> dict[str, Any]:
    context = f"Paragraph {number // 2} of {title}."  # two questions a paragraph
    answers = {"text": [text, text], "answer_start": [0, 0]}
    return {"id": f"{title}{number}", "title": title, "context": context, "question": f"Q{number}?", "answers": answers}


class FakeHub(ModuleType):
    """Stands where the package ``datasets`` would."""

    def __init__(self, rows: Any) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.calls: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, config: str | None, split: str) -> Any:
        self.calls.append((path, config, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def test_a_hotpotqa_row_supports_by_title_and_its_sentences_are_joined() -> None:
    sample = hotpotqa_sample(HOTPOT)
    assert sample
    assert sample.documents == (
        SourceText("Ina", "Ina was born in Lund.", True),
        SourceText("Sea", "The sea is wide.", False),
        SourceText("Lund", "Lund is old. The Orr passes it.", True),
    )
    assert (sample.sample_id, sample.answers, sample.domain) == ("5a", ("the Orr",), "hotpotqa")


def test_a_2wiki_row_is_read_like_hotpotqas() -> None:
    hotpot, two_wiki = hotpotqa_sample(HOTPOT), two_wiki_sample({**HOTPOT, "evidences": []})
    assert hotpot and two_wiki
    assert two_wiki.documents == hotpot.documents
    assert two_wiki.domain == "2wikimultihopqa"


def test_a_musique_row_has_each_answer_once_and_its_hops() -> None:
    sample = musique_sample(MUSIQUE)
    assert sample
    assert sample.answers == ("Lund", "Town of Lund")
    assert [document.is_supporting for document in sample.documents] == [True, False]
    assert sample.meta == {"hops": "2hop"}


def test_rows_that_cannot_be_answered_give_no_sample() -> None:
    assert musique_sample({**MUSIQUE, "answerable": False}) is None
    assert hotpotqa_sample({**HOTPOT, "answer": ""}) is None
    assert hotpotqa_sample({**HOTPOT, "context": {"title": ["Empty"], "sentences": [[""]]}}) is None


def test_a_squad_row_gets_distractors_from_its_own_article() -> None:
    rows = [*(squad_row(i) for i in range(20)), *(squad_row(i, "Other") for i in range(4))]
    samples = list(squad_samples(rows, [3, 21], seed=0))
    assert [len(sample.documents) for sample in samples] == [5, 2]
    assert all(len(set(sample.documents)) == len(sample.documents) for sample in samples)
    assert all(document.title == "The Sea" for document in samples[0].documents)
    (gold,) = [document.text for document in samples[0].documents if document.is_supporting]
    assert gold == rows[3]["context"]
    assert samples[0].answers == ("Lund",)


def test_a_squad_question_without_answer_is_left_out() -> None:
    assert not list(squad_samples([squad_row(0, text="")], [0], seed=0))


@pytest.mark.parametrize("name", HUB_DATASETS)
def test_names_of_the_hub_load_their_repository_and_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"hotpotqa": HOTPOT, "musique": MUSIQUE, "2wikimultihopqa": HOTPOT, "squad": squad_row(0)}[name]
    hub = FakeHub([row])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [sample.domain for sample in open_dataset(name, "dev")] == [name]
    open_dataset(name, "train")
    source = HUB_DATASETS[name]
    assert hub.calls == [(source.path, source.config, "validation"), (source.path, source.config, "train")]


@pytest.mark.parametrize("name", ["musique", "squad"])
def test_a_limit_gives_the_first_of_a_random_order_that_the_seed_decides(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {**MUSIQUE, "id": str(i), "answerable": i % 2 == 0} if name == "musique" else squad_row(i) for i in range(40)
    ]
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(rows))
    whole = load_from_hub(name, "dev", seed=1)
    assert load_from_hub(name, "dev", seed=1, limit=7) == whole[:7]
    ids = [sample.sample_id for sample in whole]
    assert ids != [row["id"] for row in rows if row.get("answerable", True)]
    assert ids != [sample.sample_id for sample in load_from_hub(name, "dev", seed=2)]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[train\]"):
        load_from_hub("musique", "dev")


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(ConnectionError("no route")))
    with pytest.raises(DatasetError, match="cannot be loaded from the hub: no route"):
        load_from_hub("hotpotqa", "train")
