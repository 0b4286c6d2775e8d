from __future__ import annotations

import random
from collections import Counter

import pytest
from dataset_samples import char_ids, sample_with, word_ids

from kvpacket_rag.datasets.sample import SourceText
from kvpacket_rag.datasets.select import cut, cut_documents, select_documents, sentences
from kvpacket_rag.errors import DatasetError

STORY = "Ida came home late. The door was open! Was anyone in? She found 4711 written there. Then she slept."


def places(documents: list[SourceText]) -> list[int]:
    return [int(document.title[1:]) for document in documents]


@pytest.mark.parametrize(("max_chunks", "expected"), [(1, 2), (2, 2), (5, 5), (10, 10), (99, 10)])
def test_every_supporting_document_is_kept_and_the_rest_filled_up(max_chunks: int, expected: int) -> None:
    for seed in range(20):
        chosen = places(select_documents(sample_with((3, 7), 10), random.Random(seed), max_chunks))
        assert {3, 7} <= set(chosen)
        assert len(chosen) == len(set(chosen)) == expected


def test_the_same_seed_gives_the_same_documents() -> None:
    sample = sample_with((1,), 10)
    assert select_documents(sample, random.Random(5), 4) == select_documents(sample, random.Random(5), 4)


def test_shuffled_the_supporting_document_is_anywhere_equally_often() -> None:
    rng = random.Random(0)
    found = Counter(places(select_documents(sample_with((4,), 8), rng, 4)).index(4) for _ in range(4000))
    assert all(abs(found[place] - 1000) < 150 for place in range(4))  # five standard deviations


def test_without_shuffling_the_order_is_the_samples_own() -> None:
    chosen = places(select_documents(sample_with((8, 2), 10), random.Random(1), 6, shuffle=False))
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("position", range(4))
def test_the_first_supporting_document_stands_where_it_is_asked_to(position: int) -> None:
    for seed in range(10):
        chosen = places(select_documents(sample_with((5, 6), 9), random.Random(seed), 4, gold_position=position))
        assert chosen[position] == 5
        assert len(chosen) == 4


@pytest.mark.parametrize(("supporting", "position"), [((0,), 3), ((0,), -1), ((), 0)])
def test_a_place_that_is_not_there_is_refused(supporting: tuple[int, ...], position: int) -> None:
    with pytest.raises(DatasetError, match=f"none can stand at place {position}"):
        select_documents(sample_with(supporting, 5), random.Random(0), 3, gold_position=position)


def test_room_for_no_chunk_is_refused() -> None:
    with pytest.raises(DatasetError, match="max_chunks is 0"):
        select_documents(sample_with((0,), 5), random.Random(0), 0)


@pytest.mark.parametrize("text", [STORY, "no end", "", "One.\n\nTwo.\n", "A. B. Cole left. Dr. Who?  “Yes.” No"])
def test_sentences_joined_are_the_text_again(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_an_initial_or_a_decimal_point_ends_no_sentence() -> None:
    assert sentences("John F. Smith paid 3.50 there. He left.") == ["John F. Smith paid 3.50 there. ", "He left."]


def test_a_text_that_fits_is_whole_but_for_its_edges() -> None:
    assert cut(f" {STORY}\n", char_ids, len(STORY)) == STORY


def test_a_cut_falls_at_the_end_of_a_sentence() -> None:
    assert cut(STORY, word_ids, 9) == "Ida came home late. The door was open!"


@pytest.mark.parametrize("budget", range(1, len(STORY)))
def test_no_cut_is_over_the_budget_and_none_is_empty(budget: int) -> None:
    for keep in ((), ("4711",), ("4711", "slept"), ("nowhere",)):
        piece = cut(STORY, char_ids, budget, keep)
        assert 0 < len(piece) <= budget


@pytest.mark.parametrize("budget", range(4, len(STORY)))
def test_what_is_to_be_kept_is_kept_wherever_it_fits(budget: int) -> None:
    assert "4711" in cut(STORY, char_ids, budget, ["4711"])


def test_kept_sentences_stand_after_the_start_in_the_texts_own_order() -> None:
    assert cut(STORY, word_ids, 10, ["4711"]) == "Ida came home late. She found 4711 written there."


def test_what_is_to_be_kept_is_found_in_any_case_but_only_as_whole_words() -> None:
    text = "A long opening sentence stands here first. Norway is cold. The answer is NO way."
    assert cut(text, word_ids, 5, ["no"]) == "The answer is NO way."


def test_what_is_to_be_kept_is_not_parted_at_an_abbreviation_in_it() -> None:
    text = "She lived in Rome for many years. She was buried in St. Peter's Basilica there."
    assert "St. Peter's Basilica" in cut(text, word_ids, 8, ["St. Peter's Basilica"])


def test_a_word_longer_than_the_budget_is_cut_inside() -> None:
    assert cut("x" * 100, char_ids, 7) == "x" * 7


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(DatasetError, match="at most 0 tokens"):
        cut(STORY, word_ids, 0)


def test_only_supporting_documents_keep_the_answer() -> None:
    documents = [SourceText("", STORY, True), SourceText("", STORY, False)]
    gold, distractor = cut_documents(documents, ["4711"], word_ids, 9)
    assert "4711" in gold
    assert "4711" not in distractor


def test_yes_and_no_are_not_looked_for() -> None:
    text = "It began well. It went on. There was no end."
    assert cut_documents([SourceText("", text, True)], ["no"], word_ids, 6) == ["It began well. It went on."]
