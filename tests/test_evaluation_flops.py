from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluation_samples import make_case, prefill
from transformers import Qwen3Config

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.evaluation.flops import Flops, LayerCost, of_rotation
from kvpacket_rag.evaluation.methods import Bench
from kvpacket_rag.rope import RotaryPlan, Rotation, TensorGroup


def test_rotation_costs_what_the_paper_states_for_llama_8b():
    rotation = Rotation("half", 0, tuple(500000 ** (-i / 64) for i in range(64)))
    layers = tuple(range(32))
    plan = RotaryPlan(
        (TensorGroup("keys", layers, 8, 128, True, rotation), TensorGroup("values", layers, 8, 128, True, None)), 8192
    )
    assert of_rotation(plan, 1) == 114_688


def test_full_prefill_costs_its_matrix_products_and_little_more(backbone: Backbone):
    case = make_case(backbone)
    count, model = len(case.ids), backbone.model
    weights = sum(module.weight.numel() for module in model.model.modules() if isinstance(module, torch.nn.Linear))
    config = model.config
    attention = 4 * count * count * config.head_dim * config.num_attention_heads * config.num_hidden_layers
    products = 2 * weights * count + attention
    found = prefill("full", Bench(backbone), case).flops
    assert products < found.total < 1.03 * products
    assert found.recompute / found.query == pytest.approx(case.num_document_tokens / (count - case.num_document_tokens))


def test_normalised_queries_and_keys_cost_more(make_model: Callable[..., Any], tokenizer: Any, backbone: Backbone):
    normed = Backbone(make_model(Qwen3Config, head_dim=16), tokenizer)
    assert LayerCost.of(normed).fixed - LayerCost.of(backbone).fixed == 4 * 16 * (4 + 2)


def test_a_share_of_tokens_costs_its_share_above_the_layer_of_choice(backbone: Backbone):
    case, bench = make_case(backbone), Bench(backbone)
    states = {name: prefill(name, bench, case) for name in ("random-1", "a3-0.5", "plain")}
    chosen = int(case.num_document_tokens / 2)
    whole = states["random-1"].flops.recompute / 3  # a layer's
    expected = whole + 2 * whole * chosen / case.num_document_tokens
    assert states["a3-0.5"].flops.recompute == pytest.approx(expected)
    assert states["plain"].flops == Flops(states["a3-0.5"].flops.rotate, 0.0, states["a3-0.5"].flops.query)
