"""Rows drawn from domains."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from conftest import CHUNKS
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PromptError, TrainingError
from kvpacket_rag.training.mixture import Domain, Mixture, Shape, hold_out, was_trained_on
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.row import make_row
from kvpacket_rag.training.student import _lay_out, _Layout


def _samples(domain: str, count: int = 6, documents: int = 12) -> list[QASample]:
    def text(number: int) -> str:
        return f"Note {domain} {number}. {CHUNKS[number % 4]} {CHUNKS[(number + 1) % 4]}"

    texts = [SourceText(f"Title {n}", text(n), n == 0) for n in range(documents)]
    return [QASample(f"{domain}-{n}", f"Question {n}?", ("Ada Marlow",), tuple(texts), domain) for n in range(count)]


@pytest.fixture
def encoder(backbone: Backbone) -> PacketEncoder:
    return PacketEncoder(backbone, Adapter.empty(backbone.hidden_size))


def _mixture(encoder: PacketEncoder, seed: int = 0, pool: int = 0, **shape: int) -> Mixture:
    domains = [Domain("a", _samples("a"), 3.0), Domain("b", _samples("b"), 1.0)]
    return Mixture(encoder, domains, Shape(**shape), seed, pool)


def test_a_number_gives_the_same_row_every_time(encoder: PacketEncoder) -> None:
    first, second = _mixture(encoder), _mixture(encoder)
    assert [first.row(n) for n in (5, 0)] == [second.row(n) for n in (5, 0)]
    assert first.row(1) != first.row(2) and first.row(1) != _mixture(encoder, seed=1).row(1)


def test_a_pool_repeats_its_rows(encoder: PacketEncoder) -> None:
    mixture = _mixture(encoder, pool=3)
    assert mixture.row(4) == mixture.row(1)


def test_domains_come_by_weight(encoder: PacketEncoder) -> None:
    found = Counter(_mixture(encoder, max_chunks=2).row(number).domain for number in range(120))
    assert 0.6 < found["a"] / 120 < 0.9


def test_chunks_keep_to_their_budgets(encoder: PacketEncoder) -> None:
    mixture = _mixture(encoder, min_chunk_tokens=20, max_chunk_tokens=40, context_tokens=150)
    for number in range(30):
        sizes = [part.num_tokens for part in mixture.row(number).context if part.packet_id]
        assert sizes and sum(sizes) <= 150 + 20 * len(sizes)  # a title inside a chunk comes on top


def test_number_and_place_of_chunks_and_prompts_vary(encoder: PacketEncoder) -> None:
    rows = [_mixture(encoder, context_tokens=4000).row(number) for number in range(40)]
    counts = {sum(1 for part in row.context if part.packet_id) for row in rows}
    places = {next(n for n, p in enumerate(p for p in row.context if p.packet_id) if "Note" in p.text) for row in rows}
    assert len(counts) > 4 and places and len({row.context[0].text for row in rows}) > 4


def test_the_first_question_is_the_samples_own(encoder: PacketEncoder) -> None:
    row = _mixture(encoder, questions=3).row(0)
    assert len(row.suffixes) == 3
    assert "Question" in encoder.backbone.decode(list(row.suffixes[0]))


def test_the_mixture_describes_itself(encoder: PacketEncoder) -> None:
    about = json.loads(_mixture(encoder, pool=9).describe())
    first, second = about["domains"]
    assert (first["name"], first["samples"], first["weight"], about["pool"]) == ("a", 6, 3.0, 9)
    other = Mixture(encoder, [Domain("a", _samples("c"), 3.0)], Shape())
    assert json.loads(other.describe())["domains"][0]["content"] != first["content"] != second["content"]


def test_a_sample_of_which_no_row_can_be_made_is_passed_over(encoder: PacketEncoder) -> None:
    odd = QASample("odd", f"Why {CHUNKS[0]}?", ("x",), (SourceText("", CHUNKS[0], True),), "a")
    mixture = Mixture(encoder, [Domain("a", [odd, *_samples("a", 3)])])
    rows = [mixture.row(number) for number in range(12)]
    assert all("Why" not in encoder.backbone.decode(list(suffix)) for row in rows for suffix in row.suffixes[:1])
    with pytest.raises(TrainingError, match="no row could be made of 20 samples, the last of them 'odd' of a"):
        Mixture(encoder, [Domain("a", [odd])]).row(0)


@pytest.mark.parametrize(
    "shape", [{"max_chunks": 0}, {"questions": 0}, {"min_chunk_tokens": 300}, {"context_tokens": 5}, {"questions": 99}]
)
def test_a_shape_no_row_can_have_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(TrainingError, match="rows cannot be made in the shape"):
        Shape(**shape)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight: float, encoder: PacketEncoder) -> None:
    with pytest.raises(TrainingError, match="weight above 0"):
        Mixture(encoder, [Domain("a", _samples("a"), weight)])


def test_held_out_samples_are_not_trained_on() -> None:
    (train,), (held_out,) = hold_out([Domain("b", _samples("a", 20), 3.0)])
    assert len(held_out.samples) == 2 and len(train.samples) == 18
    assert (train.name, train.weight, held_out.name, held_out.weight) == ("b", 3.0, "b", 3.0)
    assert not {s.sample_id for s in train.samples} & {s.sample_id for s in held_out.samples}


def _read(sample: QASample) -> str:
    return sample.question + "".join(sorted(document.text for document in sample.documents))


@pytest.mark.parametrize("seed", range(3))
def test_samples_that_come_twice_are_on_one_side_alone_and_that_is_said(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    once = _samples("a", 20)
    again = [replace(s, sample_id=f"again {n}", documents=s.documents[::-1]) for n, s in enumerate(once)]
    sets = [Domain("a", [*once, *again]), Domain("b", [*again[:10], *_samples("b", 10)])]
    train, held_out = (
        {s.question for d in part for s in d.samples if d.name == "a"} for part in hold_out(sets, seed=seed)
    )
    assert len(train) == 18 and len(held_out) == 2 and not train & held_out
    _, (_, second) = hold_out(sets, seed=seed)
    assert all(s.domain == "b" for s in second.samples)
    assert "left out 20 samples of a that repeat others" in caplog.text
    assert "left out 10 samples of b that repeat others" in caplog.text


def test_what_an_adapter_was_trained_on_is_known_by_its_metadata(encoder: PacketEncoder) -> None:
    used, other = _samples("a", 20), _samples("b", 20)
    train, _ = hold_out([Domain("a", used), Domain("c", _samples("c"))], seed=4)
    about = {"data": Mixture(encoder, train, seed=4).describe()}
    descendant = {"data": "no JSON", "warm_start_training": json.dumps(about)}
    for metadata in (about, descendant):
        assert was_trained_on(metadata, used) and was_trained_on(metadata, [*used, used[0]])
        assert not was_trained_on(metadata, other) and not was_trained_on(metadata, used[:1])
    assert not was_trained_on({}, used)


def test_too_little_data_is_an_error(encoder: PacketEncoder) -> None:
    with pytest.raises(TrainingError, match="two at least"):
        hold_out([Domain("a", _samples("a", 1))])
    with pytest.raises(TrainingError, match="data set b has 0 samples, without 6 that repeat others"):
        hold_out([Domain("a", _samples("a")), Domain("b", _samples("a"))])
    with pytest.raises(TrainingError, match="nothing to draw from: a"):
        Mixture(encoder, [Domain("a", [])])


def test_rows_leave_room_for_soft_tokens_and_answers(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    narrow = Backbone(make_model(max_position_embeddings=700), tokenizer, "narrow")
    adapter = Recipe(header=8, trailer=8, keep_header=True, rank=0).build(narrow)
    mixture = Mixture(PacketEncoder(narrow, adapter), [Domain("a", _samples("a"))], Shape(context_tokens=400))
    longest = 0
    for number in range(40):
        row = mixture.row(number)
        layout = _Layout()
        _lay_out(layout, 0, row, [[5] * 32 for _ in row.suffixes], narrow, adapter)
        longest = max(longest, *layout.positions)
    assert 600 < longest < 700


def test_documents_too_short_for_packets_are_named_as_the_cause(encoder: PacketEncoder) -> None:
    short = QASample("s", "Who?", ("Ada",), (SourceText("", "Ada signed it.", True),), "a")
    with pytest.raises(TrainingError, match=r"the longest of its 1 chunks has \d+ tokens, and one of fewer than 16 is"):
        Mixture(encoder, [Domain("a", [short])]).row(0)


def test_questions_before_the_chunks_are_refused(encoder: PacketEncoder) -> None:
    from kvpacket_rag.chat import Message

    chats = [[Message("user", f"{question} {CHUNKS[0]} Answer.")] for question in ("Who?", "When?")]
    with pytest.raises(PromptError, match="expected the questions to come last"):
        make_row(encoder, chats, CHUNKS[:1])
    with pytest.raises(PromptError, match="holds no chunk"):
        make_row(encoder, [[Message("user", "Who?")]], CHUNKS[:1])
