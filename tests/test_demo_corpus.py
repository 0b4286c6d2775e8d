"""The corpus that ships with the project is big enough, answers its questions and does not repeat itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvpacket_rag.demo import DemoQuestion, corpus_folder, questions


def _documents() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(corpus_folder().glob("*.md"))}


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def _paragraphs(text: str) -> set[str]:
    blocks = (block.strip() for block in text.split("\n\n"))
    return {_normalised(block) for block in blocks if block and not block.startswith("#")}


def test_the_corpus_has_thirty_documents_or_more_and_thirteen_thousand_words_or_more():
    documents = _documents()
    assert len(documents) >= 30
    assert sum(len(text.split()) for text in documents.values()) >= 13_000


def test_the_corpus_covers_handbook_policies_and_manual():
    assert {name.partition("_")[0] for name in _documents()} == {"handbook", "policy", "manual"}


def test_the_corpus_folder_holds_documents_only():
    assert {path.name for path in Path(corpus_folder()).iterdir()} == set(_documents())


@pytest.mark.parametrize("item", questions(), ids=lambda item: item.document)
def test_the_answer_stands_in_the_document_that_is_named_for_it(item: DemoQuestion):
    assert _normalised(item.answer) in _normalised(_documents()[item.document])


def test_the_demo_asks_at_least_five_different_questions_about_different_documents():
    assert len({item.question for item in questions()}) == len(questions()) >= 5
    assert len({item.document for item in questions()}) == len(questions())


def test_no_two_documents_share_a_paragraph():
    counts = Counter(paragraph for text in _documents().values() for paragraph in _paragraphs(text))
    assert [paragraph for paragraph, count in counts.items() if count > 1] == []
