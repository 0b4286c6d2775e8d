from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import GenerationSettings, Sampler, TextStream
from kvpacket_rag.errors import PromptError

HARD_TEXTS = [
    "naïve café — 12 €",
    "漢字かな交じり文。",
    "한국어 문장",
    "👩‍👩‍👧‍👦 and 🇳🇴 and ✈️",
    "a\r\n\tb  c\n\n",
    "ends with é",
]


def stream_of(backbone: Backbone, text: str, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(backbone.decode, stop)
    pieces = []
    for token in backbone.token_ids(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_join_to_the_text_and_never_show_half_a_character(backbone: Backbone, text: str):
    pieces, _ = stream_of(backbone, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_stop_text_cuts_the_answer_wherever_tokens_end(backbone: Backbone, text: str):
    for start in range(1, len(text)):
        for stop in (text[start:], text[start : start + 2]):
            pieces, stream = stream_of(backbone, text, ("never there", stop))
            assert "".join(pieces) == text[: text.find(stop)] and stream.stopped


def test_what_might_become_a_stop_text_is_held_back_until_it_is_certain():
    letters = "abXcXYd"
    stream = TextStream(lambda ids: "".join(letters[i] for i in ids), ("XY",))
    assert [stream.push(i) for i in range(6)] == ["a", "b", "", "Xc", "", ""]
    assert stream.stopped and stream.finish() == ""


def test_bytes_that_never_become_a_character_are_shown_at_the_end_only(backbone: Backbone):
    (half, *_) = backbone.token_ids("漢")
    stream = TextStream(backbone.decode, ())
    assert stream.push(half) == "" and stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.3, "top_k": 5, "seed": 2},
        {"temperature": 1.0, "top_p": 0.6, "seed": 3},
        {"temperature": 0.9, "min_p": 0.2, "top_k": 40, "seed": 4},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.2, "temperature": 0.8, "seed": 5},
    ],
)
def test_sampling_draws_from_the_distribution_that_transformers_generation_builds(
    backbone: Backbone, settings: dict[str, Any]
):
    prompt, generator = [5, 9, 7, 9], torch.Generator().manual_seed(0)
    logits = torch.randn(1, 512, generator=generator) * 3
    config = GenerationConfig(
        do_sample=settings.get("temperature", 0) > 0,
        **{k: v for k, v in settings.items() if k != "seed"},
        **({} if "top_k" in settings else {"top_k": 0}),
    )
    processors = backbone.model._get_logits_processor(config, input_ids_seq_length=4)
    expected = processors(torch.tensor([prompt]), logits.clone())
    if not config.do_sample:
        token = int(expected.argmax())
    else:
        seeded = torch.Generator().manual_seed(settings["seed"])
        token = int(torch.multinomial(expected.softmax(-1), 1, generator=seeded))
    assert Sampler(GenerationSettings(**settings), lambda: prompt, torch.device("cpu")).pick(logits) == token


def test_a_seed_repeats_a_draw_and_leaves_the_global_generator_alone():
    logits = torch.zeros(1, 512)
    torch.manual_seed(11)
    draws = [
        Sampler(GenerationSettings(temperature=1.0, seed=8), list, torch.device("cpu")).pick(logits) for _ in range(3)
    ]
    after = torch.rand(1)
    torch.manual_seed(11)
    assert len(set(draws)) == 1 and torch.equal(after, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("stop", "x"),
        ("stop", ("",)),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: Any):
    with pytest.raises(PromptError, match=name):
        GenerationSettings(**{name: value})


def test_the_tokenizer_fixture_knows_its_control_tokens(tokenizer: PreTrainedTokenizerFast):
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in tokenizer.all_special_ids


@pytest.mark.parametrize("text", ["Questors are", "Question:", "Questio", "Qu", "QQuestion: x"])
def test_an_answer_that_begins_like_a_stop_text_is_shown_once(backbone: Backbone, text: str):
    pieces, _ = stream_of(backbone, text, ("Question:", "Quite another"))
    assert "".join(pieces) == text.partition("Question:")[0]
