from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from kvpacket_rag.datasets.niah import generate_niah, haystack_from_folder
from kvpacket_rag.datasets.sample import QASample, Split
from kvpacket_rag.errors import DatasetError

SPLITS: tuple[Split, Split] = ("train", "dev")
# Ten texts, no two of which share a sentence.
ESSAYS = [" ".join(f"Essay{text}word{word} said something{text}x{word}." for word in range(1000)) for text in range(10)]


def words_of(samples: list[QASample]) -> set[str]:
    return {word for sample in samples for document in sample.documents for word in document.text.split()}


@pytest.mark.parametrize("haystack", [[], ESSAYS], ids=["made up", "essays"])
def test_the_value_stands_in_the_supporting_passage_alone_beside_its_key(haystack: list[str]) -> None:
    for sample in generate_niah(200, 3, haystack):
        (gold,) = [document for document in sample.documents if document.is_supporting]
        (value,) = sample.answers
        assert [document for document in sample.documents if value in document.text] == [gold]
        assert re.search(rf"{sample.meta['key']}.*{value}|{value}.*{sample.meta['key']}", gold.text)
        assert sample.meta["key"] in sample.question
        assert sample.documents[sample.meta["gold_position"]] is gold


def test_most_values_are_numbers_of_seven_digits() -> None:
    values = [sample.answers[0] for sample in generate_niah(500, 0)]
    assert 0.7 < sum(bool(re.fullmatch(r"[1-9]\d{6}", value)) for value in values) / 500 < 0.9


def test_the_place_of_the_needle_is_uniformly_random() -> None:
    found = Counter(sample.meta["gold_position"] for sample in generate_niah(3000, 1, ESSAYS))
    assert all(abs(found[place] - 500) < 105 for place in range(6))  # five standard deviations


def test_other_needles_are_about_other_keys_in_other_passages() -> None:
    for sample in generate_niah(200, 2, ESSAYS):
        needles = [d for d in sample.documents if re.search(r"magic number|password|access code", d.text)]
        assert len(needles) == 1 + sample.meta["other_needles"]
        assert sum(sample.meta["key"] in document.text for document in needles) == 1


@pytest.mark.parametrize("haystack", [[], ESSAYS], ids=["made up", "essays"])
def test_the_same_seed_gives_the_same_samples_and_fewer_are_the_first_of_more(haystack: list[str]) -> None:
    samples = generate_niah(20, 7, haystack)
    assert generate_niah(8, 7, haystack) == samples[:8]
    assert generate_niah(20, 8, haystack) != samples


@pytest.mark.parametrize("haystack", [[], ESSAYS, ESSAYS[:2], ESSAYS[:1]], ids=["made up", "ten", "two", "one"])
def test_train_and_dev_share_no_key_value_or_passage(haystack: list[str]) -> None:
    train, dev = (generate_niah(300, 0, haystack, split=split) for split in SPLITS)
    for part in ("key", "value", "sentence"):
        seen = [set(), set()]  # type: list[set[str]]
        for place, samples in enumerate((train, dev)):
            for sample in samples:
                texts = [document.text for document in sample.documents]
                sentences = {sentence for text in texts for sentence in re.split(r"(?<=\.) ", text)}
                seen[place] |= {"key": {sample.meta["key"]}, "value": {*sample.answers}, "sentence": sentences}[part]
        assert seen[0].isdisjoint(seen[1]), part


def test_passages_are_about_as_long_as_asked_and_cut_at_sentence_ends() -> None:
    for sample in generate_niah(50, 0, ESSAYS, words_per_chunk=60):
        for document in sample.documents:
            assert 30 <= len(document.text.split()) <= 90 + 16  # a needle is at most 16 words long
            assert document.text.endswith((".", '"'))


def test_text_without_sentence_ends_is_cut_between_words() -> None:
    (sample,) = generate_niah(1, 0, [" ".join(map(str, range(20_000)))], chunks=3)
    assert all(40 <= len(document.text.split()) <= 140 for document in sample.documents)


def test_no_passage_of_a_sample_is_shown_twice() -> None:
    for sample in generate_niah(100, 0, ESSAYS):
        assert len({document.text.split()[3] for document in sample.documents}) > 1
        assert len({document.text for document in sample.documents}) == 6


def test_one_chunk_can_be_had() -> None:
    assert [len(sample.documents) for sample in generate_niah(5, 0, chunks=1)] == [1] * 5


def test_a_haystack_too_short_is_refused() -> None:
    with pytest.raises(DatasetError, match="the haystack holds 0 passages of 80 words"):
        generate_niah(1, 0, ["Short.", "Also short."])


@pytest.mark.parametrize("count", [0, -1])
def test_no_samples_are_refused(count: int) -> None:
    with pytest.raises(DatasetError, match=f"count is {count}"):
        generate_niah(count, 0)


def test_a_folders_texts_are_read_below_it_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in {"b.md": "B", "a.txt": "A", "sub/c.TXT": "C", "d.py": "D", "e.txt": " "}.items():
        (tmp_path / name).write_text(text)
    assert haystack_from_folder(tmp_path) == ["A", "B", "C"]


def test_a_folder_without_texts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no text"):
        haystack_from_folder(tmp_path)
    with pytest.raises(DatasetError, match="is no folder"):
        haystack_from_folder(tmp_path / "missing")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DatasetError, match=r"x\.txt cannot be read"):
        haystack_from_folder(tmp_path)
