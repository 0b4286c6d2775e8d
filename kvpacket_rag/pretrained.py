"""Arguments of transformers' ``from_pretrained``: which of them count for a model that is loaded by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpacket_rag.errors import KVPacketError

# What says which files are meant.
_FILES = {"cache_dir", "local_files_only", "revision", "subfolder", "token"}
_MODEL_KWARGS = {*_FILES, "attn_implementation", "variant"}
# What makes no difference: no code of a model's folder is ever run, and prompts are neither padded nor cut.
_IDLE = {"trust_remote_code"}
_IDLE_MODEL_KWARGS = {*_IDLE, "low_cpu_mem_usage", "use_cache", "use_safetensors"}
_IDLE_TOKENIZER_KWARGS = {*_IDLE, "max_length", "model_max_length", "padding_side", "truncation_side"}
_ATTENTION = ("sdpa", "eager")  # others take no mask that hides packets from the text before them


def passed_on(
    model_kwargs: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of transformers' ``from_pretrained`` that count here: for the weights, and for the tokenizer.

    Both take ``cache_dir``, ``local_files_only``, ``revision``, ``subfolder`` and ``token``, the tokenizer those of the
    weights unless it is given its own; the weights also ``variant``, and ``attn_implementation`` of ``"sdpa"`` or
    ``"eager"``. What makes no difference here is left out.

    Raises:
        KVPacketError: one cannot have its effect on a model that is loaded by name.
    """
    for owner, given, known in (
        ("model_kwargs", model_kwargs, _MODEL_KWARGS | _IDLE_MODEL_KWARGS),
        ("tokenizer_kwargs", tokenizer_kwargs, _FILES | _IDLE_TOKENIZER_KWARGS),
    ):
        if strange := sorted(given.keys() - known):
            raise KVPacketError(
                f"{owner} holds {', '.join(map(repr, strange))}, which a model that is loaded by name cannot take; "
                "load model and tokenizer yourself, by from_pretrained, and hand them over"
            )
    attention = model_kwargs.get("attn_implementation")
    if attention not in (None, *_ATTENTION):
        raise KVPacketError(
            f"attn_implementation is {attention!r}, which cannot hide packets from each other; use "
            f"{' or '.join(map(repr, _ATTENTION))}, or leave it out"
        )
    weights = {name: value for name, value in model_kwargs.items() if name in _MODEL_KWARGS and value is not None}
    files = {**model_kwargs, **tokenizer_kwargs}
    return weights, {name: value for name, value in files.items() if name in _FILES and value is not None}
