"""Every decoder that transformers knows, built tiny and random from its config class in a moment.

The default config of an architecture is taken and every size in it shrunk, so that what makes the
architecture what it is (layouts, layer types, latents, experts, shared layers) stays as it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_LAYERS, _HEADS, _HEAD_DIM = 4, 4, 16
WINDOW = 16  # of sliding layers: shorter than the packets of the tests
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_FIELDS: list[tuple[int, str]] = [
    (_LAYERS, " ".join((*_NUM_LAYERS, "encoder_layers num_encoder_layers num_blocks"))),
    (_HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    (_HEADS, "encoder_attention_heads decoder_attention_heads num_sliding_attention_heads"),
    (_HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads num_kv_shared_layers"),
    (_HEAD_DIM, "head_dim kv_channels swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim d_head dim_head"),
    (_HEAD_DIM, "attention_head_size query_pre_attn_scalar"),
    (2 * _HEAD_DIM, "qk_head_dim"),
    (8, "rotary_dim"),
    (64, "hidden_size n_embd d_model embedding_size word_embed_proj_dim emb_dim embedding_dim lru_width"),
    (64, "input_embedding_size output_embedding_size attention_hidden_size"),
    (96, "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dim_ff dff n_inner"),
    (96, "intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size moe_hidden_size"),
    (32, "moe_shared_expert_intermediate_size shared_intermediate_size share_expert_dim expert_ffn_hidden_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts num_dense_layers first_k_dense_replace"),
    (1, "n_group topk_group num_expert_group num_codebooks"),
    (32, "kv_lora_rank q_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input"),
    (32, "index_head_dim index_n_heads"),  # with few heads scores tie at zero, and ties are broken at random
    (24, "index_topk keep_window_size"),
    (256, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (WINDOW, "sliding_window sliding_window_size local_attention window_size"),
    (4096, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length"),
]
_SIZES = {name: size for size, names in _FIELDS for name in names.split()}
_UNSET = ("head_dim", "num_key_value_heads", "n_group", "topk_group", "num_experts_per_tok", "n_routed_experts")
_KEEP: Any = object()
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
_HALF_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
_OVERRIDES: dict[str, dict[str, Any]] = {  # where shrinking field by field builds nothing, or another architecture
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "cohere_compass_text": _SLIDING | {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": None}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32},
    "dory": _SLIDING | {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"] * 2}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32}
    | {"swa_head_dim": 80, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]}
    | {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_text": _HALF_MROPE,
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "glm5_next_text": {"index_topk": 32, "qk_rope_head_dim": 0},
    "granitemoehybrid": _RECURRENT | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "hunyuan_vl_text": _MROPE,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 2 * _HEAD_DIM},
    "moshi": {"sliding_window": 4096},  # of the whole context: its cache slides, its mask does not
    "paddleocr_vl_text": _MROPE,
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_budget": 32, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 16},
    "step3p5": _SLIDING
    | {"sliding_window": WINDOW}
    | {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 1000.0}}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The config of ``model_type`` with every size shrunk; ``overrides`` win."""
    config_class = CONFIG_MAPPING[model_type]
    defaults = config_class().to_dict()
    layers = next((defaults[name] for name in _NUM_LAYERS if isinstance(defaults.get(name), int)), 0)
    small = {name: _shrink(name, value, layers) for name, value in defaults.items()}
    small = {name: value for name, value in small.items() if value is not _KEEP}
    small |= {"is_decoder": True} if "is_decoder" in defaults else {}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:  # a latent serves all heads
        small["num_key_value_heads"] = _HEADS
    if "mrope_section" in (defaults.get("rope_parameters") or {}):
        small["rope_parameters"] = _shrink_sections(defaults)
    return config_class(**(small | _OVERRIDES.get(model_type, {}) | overrides))


def _shrink(name: str, value: Any, layers: int) -> Any:
    """The small value of a config field, or ``_KEEP``."""
    if isinstance(value, list) and layers > 1 and len(value) == layers:  # one entry a layer
        kinds = sorted(set(value), key=value.index)
        return [_SIZES.get(name, kinds[i % len(kinds)]) for i in range(_LAYERS)]
    if name.endswith(("token_id", "token_index")) and value is not None:
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)
    known = type(value) is int or (value is None and name in _UNSET)
    if name in _SIZES and known:
        return _SIZES[name]
    return _KEEP


def _shrink_sections(defaults: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters whose three sections (time, height, width) add up to the pairs of a small head."""
    parameters: dict[str, Any] = dict(defaults["rope_parameters"])
    width = defaults.get("qk_rope_head_dim") or defaults.get("head_dim")
    width = width or defaults["hidden_size"] // defaults["num_attention_heads"]
    pairs = sum(parameters["mrope_section"]) * _HEAD_DIM // width
    return parameters | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}


def tiny(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """A random model of ``model_type`` in evaluation mode; the same seed gives the same weights.

    Architectures that are only a part of a larger model get a random output layer.
    """
    config = tiny_config(model_type, **overrides)
    torch.manual_seed(seed)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        decoder = _decoder_class(config)
        if not {"cache", "past_key_values"} & set(inspect.signature(decoder.forward).parameters):
            raise NotADecoderError(f"{decoder.__name__} keeps no cache")
        model = decoder._from_config(config, dtype=dtype)
        if not type(model).__name__.endswith("ForCausalLM"):
            model = type(type(model).__name__, (_WithHead,), {})(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # wider than the default draw, so that positions and order matter
            parameter.data.mul_(3)
        else:  # trained norms and biases are not all alike
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().requires_grad_(False)


class NotADecoderError(Exception):
    """The architecture encodes only."""


class _WithHead(nn.Module):
    """The text decoder of a multimodal model with an output layer, as a language model has."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        weight = inner.get_input_embeddings().weight
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, cache: Any = None, logits_to_keep: int | Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
        name = "cache" if "cache" in inspect.signature(self.inner.forward).parameters else "past_key_values"
        if cache is None and inputs.get("use_cache"):  # a part leaves it to the whole to make one
            cache = DynamicCache(config=self.config)
        output = self.inner(**inputs, **{name: cache})
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Tensor = self.head(output.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.get("cache", output.get("past_key_values")))


def _decoder_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    found = [
        member
        for name, member in vars(module).items()
        if inspect.isclass(member)
        and issubclass(member, PreTrainedModel)
        and member.config_class is type(config)
        and name.endswith(("Model", "ForCausalLM"))
        and not name.endswith("PreTrainedModel")
    ]
    return max(
        found, key=lambda member: (member.__name__.endswith("ForCausalLM"), member.__name__.endswith("TextModel"))
    )


def model_types() -> Iterator[str]:
    """Every architecture that may be a decoder: all causal language models, and text parts of larger models."""
    for name in sorted(CONFIG_MAPPING_NAMES):
        part = name.endswith(("_text", "_text_model")) or name in ("mistral4", "step3p5")
        if (name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or part) and not _is_composite(name):
            yield name


def _is_composite(model_type: str) -> bool:
    """Whether the text decoder is a part with a config of its own, listed under its own name."""
    parts = CONFIG_MAPPING[model_type].sub_configs
    return any("text" in name or "decoder" in name for name in parts) and model_type != "moshi"
