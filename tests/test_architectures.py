"""The two laws on every kind of decoder, against what the model answers by itself.

Nothing here relies on the checks that loading a model makes: expected values come from the model's
own cache or from one forward under an explicit mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import tiny
from reference import error, own_layers, own_logits, random_ids, served_logits, slot_logits
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.rope import realign

CASES: dict[str, dict[str, Any]] = {
    # every head its own key; keys shared by groups of heads; one key for all
    "llama": {"num_key_value_heads": 4},
    "qwen2": {},
    "gemma": {"num_key_value_heads": 1},
    "falcon": {},
    # keys turned in part, in interleaved pairs, backwards, or behind a norm
    "phi": {},
    "gpt_neox": {},
    "stablelm": {},
    "nemotron": {},
    "persimmon": {},
    "gptj": {},
    "codegen": {},
    "glm": {},
    "glm4": {},
    "cohere": {},
    "helium": {},
    "ernie4_5": {},
    "nanochat": {},
    "qwen3": {},
    "olmo2": {},
    # latents: the rotary part is cached as values
    "deepseek_v2": {},
    "deepseek_v3": {},
    "longcat_flash": {},
    "minicpm3": {},
    "youtu": {},
    # an indexer's third tensor, in front or behind
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "hy_v4": {},
    "dots3_note_text": {},
    # windows, frequencies and positions by layer
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "modernbert-decoder": {},
    "mimo_v2_flash": {},
    "olmo3": {},
    "ministral3": {},
    "cohere2": {},
    "smollm3": {},
    "exaone4": {},
    "llama4_text": {},
    "laguna": {},
    "step3p5": {},
    # layers that share another's keys, heads of another width, layers run in a loop, layers that stay empty
    "gemma3n_text": {},
    "gemma4_text": {},
    "hrm_text": {},
    "mllama_text_model": {},
    # no position in keys or values at all
    "bloom": {},
    "mpt": {},
    "falcon with alibi": {"model_type": "falcon", "alibi": True},
    # experts
    "mixtral": {},
    "qwen3_moe": {},
    "dbrx": {},
    "phimoe": {},
    "granitemoe": {},
    "minimax_m2": {},
    # text decoders of larger models
    "qwen2_vl_text": {},
    "qwen3_vl_text": {},
    "glm4v_text": {},
    # scaled in unusual places
    "granite": {},
    "diffllama": {},
    "doge": {},
    "phi3": {},
    "starcoder2": {},
    "llama with tied weights": {"model_type": "llama", "tie_word_embeddings": True},
}
TAKE_NO_MASK = {"bloom", "falcon with alibi"}  # of our making; they read distances off a mask of their own
PACKETS = [("packet", random_ids(21, 1)), ("packet", random_ids(19, 2))]  # longer than the windows
QUESTION = ("text", random_ids(6, 3))
INTERLEAVED = [("text", random_ids(5, 4)), PACKETS[0], ("text", random_ids(4, 5)), PACKETS[1], QUESTION]


@pytest.fixture(scope="module", params=CASES)
def backbone(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Backbone:
    settings = dict(CASES[request.param])
    return Backbone(tiny(settings.pop("model_type", request.param), **settings), tokenizer, request.param)


@torch.inference_mode()
def expected_logits(backbone: Backbone, pieces: list[Any]) -> Tensor:
    answer = slot_logits if backbone.name in TAKE_NO_MASK else own_logits
    return answer(backbone.model, pieces)


@pytest.mark.parametrize(("shift", "allowed"), [(7, 5e-6), (1000, 1e-4)])  # float32; the model's own angles drift
def test_realigned_tensors_equal_those_the_model_caches_at_the_new_positions(
    backbone: Backbone, shift: int, allowed: float
) -> None:
    here = own_layers(backbone.model, random_ids(13), 0)
    there = own_layers(backbone.model, random_ids(13), shift)
    for group in backbone.plan.groups:
        for layer in group.layers:
            moved = realign(getattr(here[layer], group.name), group.rotation, shift)
            assert error(moved, getattr(there[layer], group.name)) < allowed


def test_packets_and_a_question_equal_one_forward_in_which_each_packet_sees_itself(backbone: Backbone) -> None:
    pieces = [*PACKETS, QUESTION]
    assert error(served_logits(backbone, pieces), expected_logits(backbone, pieces)) < 1e-5  # float32


def test_text_between_packets_equals_one_forward_under_the_same_mask(backbone: Backbone) -> None:
    assert backbone.report.one_pass == (backbone.name not in TAKE_NO_MASK)
    assert error(served_logits(backbone, INTERLEAVED), expected_logits(backbone, INTERLEAVED)) < 1e-5  # float32


def test_one_bare_packet_in_front_equals_plain_prefill(backbone: Backbone) -> None:
    plain = own_logits(backbone.model, [("text", PACKETS[0][1] + QUESTION[1])])
    assert error(served_logits(backbone, [PACKETS[0], QUESTION]), plain) < 5e-6  # float32


def test_a_forward_that_ends_with_the_last_keys_writes_what_a_whole_one_writes(backbone: Backbone) -> None:
    rows = [torch.tensor(tokens) for _, tokens in PACKETS]
    for whole, ended in zip(backbone.encode(rows, whole=True), backbone.encode(rows), strict=True):
        assert all(map(torch.equal, whole, ended))


def test_what_a_packet_sees_matters_to_the_answer(backbone: Backbone) -> None:
    """So that the laws above are no laws about nothing."""
    pieces = [*PACKETS, QUESTION]
    unblocked = [("text", tokens) for _, tokens in pieces]
    assert error(expected_logits(backbone, pieces), expected_logits(backbone, unblocked)) > 2e-4
