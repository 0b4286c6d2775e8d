"""Attention by blocks against the mask that says the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.blocks import attends_by_blocks, text_tokens

KINDS = {
    "llama": (LlamaConfig, {}),
    "no grouped heads": (LlamaConfig, {"num_key_value_heads": 4}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "window": (MistralConfig, {"sliding_window": 9}),
    "windows in some layers": (Gemma3TextConfig, {"sliding_window": 9, "head_dim": 16, "query_pre_attn_scalar": 16}),
}
PACKETS = [slice(4, 20), slice(20, 33), slice(40, 46)]


def _mask(length: int) -> torch.Tensor:
    mask = torch.ones(length, length).tril().bool()
    for packet in PACKETS:
        mask[packet, : packet.start] = False
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_the_logits_and_gradients_of_the_mask(
    kind: str, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    config, settings = KINDS[kind]
    backbone = Backbone(make_model(config, attn_implementation="sdpa", **settings), tokenizer, kind)
    found = []
    for packets in ([], PACKETS):
        torch.manual_seed(0)
        inputs = torch.randn(1, 60, 64, requires_grad=True)
        with backbone.reading(inputs, _mask(60), torch.arange(60), None, packets) as logits:
            logits[0, -5:].square().mean().backward()
        found.append((logits.detach(), inputs.grad))
    assert_close(found[1][0], found[0][0], atol=1e-3, rtol=1e-3)
    assert_close(found[1][1], found[0][1], atol=1e-3, rtol=1e-2)


def test_the_model_attends_as_before_afterwards_even_after_an_error(backbone: Backbone) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        backbone.reading(torch.randn(1, 60, 64), _mask(60), torch.arange(60), None, PACKETS),
    ):
        raise ZeroDivisionError
    assert attends_by_blocks(backbone.model) and backbone.model.config._attn_implementation == "sdpa"


def test_a_model_with_its_own_attention_keeps_it(make_model: Callable[..., Any]) -> None:
    assert not attends_by_blocks(make_model(attn_implementation="eager"))


def test_text_is_what_lies_in_no_packet() -> None:
    assert text_tokens(8, [slice(1, 3), slice(5, 8)], torch.device("cpu")).tolist() == [0, 3, 4]
