"""What the probe finds on a live model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import tiny
from reference import error, random_ids

from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.probe import ProbeReport, probe
from kvpacket_rag.rope import RotaryPlan, TensorGroup
from kvpacket_rag.runner import ModelRunner


def probe_tiny(model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> ProbeReport:
    return probe(ModelRunner(tiny(model_type, dtype, **settings)))


def rotated(plan: RotaryPlan) -> list[TensorGroup]:
    return [group for group in plan.groups if group.rotation]


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "qwen3_next", "jamba", "lfm2", "bamba", "minimax"])
def test_models_with_recurrent_layers_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="a state without a token axis"):
        probe_tiny(model_type)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gpt_neo", "xglm", "bert", "roberta"])
def test_models_with_learned_positions_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="keys of layer 0 change with position, but not by a rotation"):
        probe_tiny(model_type)


@pytest.mark.parametrize("model_type", ["trocr", "bart", "roformer"])
def test_models_that_count_cache_slots_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="places tokens by their cache slot"):
        probe_tiny(model_type)


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "dory", "beam"])
def test_models_that_scale_channels_or_queries_behind_the_rotation_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not by a rotation"):
        probe_tiny(model_type)


def test_it_is_the_weight_of_a_norm_behind_the_rotation_that_decides() -> None:
    model = tiny("hunyuan_v1_dense")
    for layer in model.model.layers:
        layer.self_attn.key_layernorm.weight.data.fill_(1.5)
        layer.self_attn.query_layernorm.weight.data.fill_(1.5)
    assert probe(ModelRunner(model)).error_shift < 1e-5  # float32


@pytest.mark.parametrize("model_type", ["rwkv", "xlm"])
def test_models_without_a_cache_by_layer_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="returns no cache with layers"):
        probe_tiny(model_type)


def test_a_cache_layer_of_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="UnlimitedOcrDynamicReferenceSlidingWindowLayer"):
        probe_tiny("unlimited_ocr_text")


def test_a_query_temperature_within_the_first_tokens_is_refused_by_the_logits() -> None:
    with pytest.raises(UnsupportedModelError, match="its attention depends on the absolute position"):
        probe_tiny("llama4_text", floor_scale=16, attn_temperature_tuning=True)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_of_a_latent_cache_the_values_turn_and_the_keys_do_not(model_type: str) -> None:
    plan = probe_tiny(model_type).plan
    assert [(g.name, g.rotation is not None) for g in plan.groups] == [("keys", False), ("values", True)]


@pytest.mark.parametrize(("model_type", "first_channel"), [("deepseek_v32", 0), ("hy_v4", 16)])
def test_an_indexers_tensor_is_found_with_a_layout_of_its_own(model_type: str, first_channel: int) -> None:
    (group,) = [g for g in probe_tiny(model_type).plan.groups if g.name == "indexer_keys"]
    assert (group.heads, group.width, group.has_heads) == (1, 32, False)
    assert group.rotation is not None
    assert group.rotation.start == first_channel


def test_layers_with_frequencies_of_their_own_form_groups_of_their_own() -> None:
    sliding, full = rotated(probe_tiny("gemma3_text").plan)
    assert (sliding.layers, full.layers) == ((0, 2), (1, 3))
    assert sliding.rotation != full.rotation


def test_layers_with_wider_heads_form_groups_of_their_own() -> None:
    assert [(g.width, g.layers) for g in rotated(probe_tiny("gemma4_unified_text", num_kv_shared_layers=0).plan)] == [
        (16, (0, 2)),
        (32, (1, 3)),
    ]


def test_layers_without_positions_and_layers_that_share_are_told_apart() -> None:
    kept = {g.name: g.layers for g in probe_tiny("gemma3n_text").plan.groups if g.name == "values"}
    assert kept == {"values": (0, 1)}  # layers 2 and 3 read what 0 and 1 have cached
    assert {(g.rotation is None, g.layers) for g in probe_tiny("smollm3").plan.groups if g.name == "keys"} == {
        (False, (0, 2)),
        (True, (1, 3)),
    }


def test_layout_part_and_sign_are_measured() -> None:
    found = {name: rotated(probe_tiny(name).plan)[0].rotation for name in ("llama", "glm", "stablelm", "nanochat")}
    assert {name: (r.layout, r.stop, r.frequencies[0]) for name, r in found.items()} == {
        "llama": ("half", 16, 1.0),
        "glm": ("interleaved", 8, 1.0),
        "stablelm": ("half", 4, 1.0),
        "nanochat": ("half", 16, -1.0),
    }


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "phi", "glm", "qwen3_moe"])
def test_every_precision_gives_the_same_plan(model_type: str) -> None:
    plans = [probe_tiny(model_type, dtype).plan for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].digest == plans[1].digest


def test_frequencies_are_those_of_the_live_buffer_bit_by_bit() -> None:
    model = tiny("llama")
    exact = probe(ModelRunner(model)).plan
    assert rotated(exact)[0].rotation.frequencies == tuple(model.model.rotary_emb.inv_freq.double().tolist())
    cast = model.to(torch.bfloat16)  # casts the frequencies as well
    assert rotated(probe(ModelRunner(cast)).plan)[0].rotation.frequencies == tuple(
        cast.model.rotary_emb.inv_freq.double().tolist()
    )
    assert probe(ModelRunner(cast)).plan.digest != exact.digest


def test_another_draw_of_tokens_gives_the_same_plan() -> None:
    runner = ModelRunner(tiny("mistral"))
    assert probe(runner, seed=0).plan == probe(runner, seed=1).plan


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_distances_taken_from_the_slots_leave_nothing_to_turn(model_type: str) -> None:
    assert rotated(probe_tiny(model_type).plan) == []


@pytest.mark.parametrize(("model_type", "takes"), [("gemma", True), ("gemma3_text", True), ("gemma3n_text", False)])
@torch.inference_mode()
def test_whether_embeddings_stand_for_their_ids_is_measured(model_type: str, takes: bool) -> None:
    model = tiny(model_type)
    ids = torch.tensor([random_ids(20)])
    by_embeddings = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert (error(by_embeddings, model(input_ids=ids).logits) < 1e-5) == takes  # float32
    assert probe(ModelRunner(model)).takes_embeddings == takes


def test_a_model_that_refuses_embeddings_of_no_token_takes_none() -> None:
    assert not probe_tiny("gemma4_text").takes_embeddings


def test_a_window_shorter_than_the_usual_offsets_is_proved_to_its_end() -> None:
    assert probe_tiny("llama", max_position_embeddings=300).plan.max_positions == 300
