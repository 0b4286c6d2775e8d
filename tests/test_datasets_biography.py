from __future__ import annotations

from collections import Counter
from datetime import datetime

import pytest

from kvpacket_rag.datasets.biography import generate_biographies
from kvpacket_rag.errors import DatasetError

SAMPLES = generate_biographies(1200, 0)


def test_the_question_names_the_person_whose_document_holds_the_answer() -> None:
    for sample in SAMPLES:
        (gold,) = [document for document in sample.documents if document.is_supporting]
        assert sample.answers[0] in gold.text
        assert gold.title in sample.question
        assert [d.title for d in sample.documents if d.title in sample.question] == [gold.title]
        assert sample.documents[sample.meta["gold_position"]] is gold


def test_every_document_is_six_sentences_that_name_its_person() -> None:
    for document in (document for sample in SAMPLES[:200] for document in sample.documents):
        assert document.text.count(document.title.split()[-1]) >= 6
        assert document.title in document.text


def test_all_attributes_and_numbers_of_documents_are_asked_about_equally_often() -> None:
    attributes = Counter(sample.meta["attribute"] for sample in SAMPLES)
    sizes = Counter(len(sample.documents) for sample in SAMPLES)
    assert len(attributes) == 6
    assert all(abs(count - 200) < 65 for count in attributes.values())  # five standard deviations
    assert sorted(sizes) == [2, 3, 5, 7]
    assert all(abs(count - 300) < 75 for count in sizes.values())


def test_the_place_of_the_person_asked_about_is_uniformly_random() -> None:
    found = Counter(sample.meta["gold_position"] for sample in SAMPLES if len(sample.documents) == 2)
    assert abs(found[0] - found[1]) < 90  # five standard deviations


def test_names_within_a_sample_differ_and_some_resemble_the_one_asked_about() -> None:
    resembling = 0
    for sample in SAMPLES:
        names = [document.title for document in sample.documents]
        assert len(set(names)) == len(names)
        gold = names.pop(sample.meta["gold_position"])
        resembling += any(set(name.split()) & set(gold.split()) for name in names)
    assert 0.2 < resembling / len(SAMPLES) < 0.7


def test_birth_dates_are_dates() -> None:
    for sample in SAMPLES:
        if sample.meta["attribute"] == "birth_date":
            assert 1950 <= datetime.strptime(sample.answers[0], "%B %d, %Y").year <= 2005


def test_the_same_seed_gives_the_same_samples_and_fewer_are_the_first_of_more() -> None:
    assert generate_biographies(10, 0) == SAMPLES[:10]
    assert generate_biographies(10, 1) != SAMPLES[:10]


def test_train_and_dev_share_no_person() -> None:
    dev = generate_biographies(1200, 0, "dev")
    train_names, dev_names = (
        {document.title for sample in samples for document in sample.documents} for samples in (SAMPLES, dev)
    )
    assert train_names.isdisjoint(dev_names)
    assert len(dev_names) > 1000


def test_no_samples_are_refused() -> None:
    with pytest.raises(DatasetError, match="count is 0"):
        generate_biographies(0, 0)
