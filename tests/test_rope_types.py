"""The two laws for every way of scaling rotary frequencies, and where a model changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import tiny
from reference import error, own_layers, own_logits, random_ids, served_logits
from transformers import PreTrainedTokenizerFast

from kvpacket_rag import GenerationSettings, KVPacketEngine
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import ContextTooLongError
from kvpacket_rag.probe import probe
from kvpacket_rag.rope import Rotation, realign
from kvpacket_rag.runner import ModelRunner

THETA = {"rope_theta": 10000.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
        "original_max_position_embeddings": 1500,
    },
    "dynamic": {"factor": 2.0},
}
ARCHITECTURES = ("llama", "cohere", "deepseek_v3")  # halves, interleaved pairs, a latent with the rotary part aside


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": THETA | {"rope_type": kind} | TYPES[kind] | settings}


@pytest.fixture(scope="module", params=[(a, t) for a in ARCHITECTURES for t in TYPES], ids="-".join)
def backbone(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Backbone:
    architecture, kind = request.param
    return Backbone(tiny(architecture, **rope(kind)), tokenizer, kind)


def rotations(backbone: Backbone) -> list[Rotation]:
    return [group.rotation for group in backbone.plan.groups if group.rotation]


@pytest.mark.parametrize(("shift", "allowed"), [(7, 5e-6), (1000, 1e-4)])  # float32; the model's own angles drift
@torch.inference_mode()
def test_realigned_tensors_equal_those_the_model_caches_at_the_new_positions(
    backbone: Backbone, shift: int, allowed: float
) -> None:
    here, there = (own_layers(backbone.model, random_ids(30), start) for start in (0, shift))
    for group in backbone.plan.groups:
        for layer in group.layers:
            moved = realign(getattr(here[layer], group.name), group.rotation, shift)
            assert error(moved, getattr(there[layer], group.name)) < allowed


@torch.inference_mode()
def test_packets_and_a_question_equal_one_forward_in_which_each_packet_sees_itself(backbone: Backbone) -> None:
    pieces = [("packet", random_ids(21, 1)), ("packet", random_ids(19, 2)), ("text", random_ids(6, 3))]
    assert error(served_logits(backbone, pieces), own_logits(backbone.model, pieces)) < 1e-5  # float32


def test_realignment_changes_no_length(backbone: Backbone) -> None:
    (rotation,) = rotations(backbone)
    keys = torch.randn(2, 3, 10, 16)
    lengths = realign(keys, rotation, 1234).norm(dim=-1)
    torch.testing.assert_close(lengths, keys.norm(dim=-1), rtol=1e-5, atol=0)  # float32


def test_every_scaling_has_frequencies_of_its_own() -> None:
    plans = {kind: probe(ModelRunner(tiny("llama", **rope(kind)))).plan for kind in TYPES}
    found = {kind: plan.groups[0].rotation for kind, plan in plans.items()}
    assert found["dynamic"] == found["default"]  # until the model's own window is exceeded
    assert len({rotation.frequencies for rotation in found.values()}) == len(TYPES) - 1


def test_a_scaled_length_of_keys_drops_out(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("llama", **rope("yarn", attention_factor=1.5))
    backbone = Backbone(model, tokenizer, "yarn")
    assert model.model.rotary_emb.attention_scaling == 1.5
    pieces = [("packet", random_ids(21, 1)), ("packet", random_ids(19, 2)), ("text", random_ids(6, 3))]
    assert error(served_logits(backbone, pieces), own_logits(model, pieces)) < 1e-5  # float32


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "phi3"])
def test_the_window_ends_where_longrope_changes_its_frequencies(architecture: str) -> None:
    model = tiny(architecture, original_max_position_embeddings=1500, **rope("longrope"))
    assert 1490 < probe(ModelRunner(model)).plan.max_positions <= 1500


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_the_window_is_the_models_own_where_nothing_changes(kind: str) -> None:
    assert probe(ModelRunner(tiny("llama", **rope(kind)))).plan.max_positions == 4096


def test_probing_leaves_dynamic_frequencies_as_they_were() -> None:
    model = tiny("llama", **rope("dynamic"))
    before = model.model.rotary_emb.inv_freq.clone()
    probe(ModelRunner(model))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_prompt_beyond_the_change_of_frequencies_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = KVPacketEngine(Backbone(tiny("llama", vocab_size=512, **rope("longrope")), tokenizer, "long"))
    with pytest.raises(ContextTooLongError, match=r"1[45][0-9][0-9] of long"):
        engine.generate("cold " * 1600, GenerationSettings(max_new_tokens=1))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("ministral3", rope("yarn", original_max_position_embeddings=1500, llama_4_scaling_beta=0.1)),
        ("mistral4", rope("yarn", original_max_position_embeddings=1500, llama_4_scaling_beta=0.1)),
        ("llama4_text", {"floor_scale": 1500, "attn_temperature_tuning": True, "rope_parameters": THETA}),
        ("llama4_text", {"attention_chunk_size": 1500, "rope_parameters": THETA}),
    ],
    ids=["ministral3", "mistral4", "llama4 temperature", "llama4 chunks"],
)
def test_the_window_ends_where_queries_change_by_absolute_position(architecture: str, settings: dict[str, Any]) -> None:
    model = tiny(architecture, **settings)
    assert 1490 < probe(ModelRunner(model)).plan.max_positions <= 1500
