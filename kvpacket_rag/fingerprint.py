"""What a model and a tokenizer are known by: their content, never a name or a path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COSMETIC = frozenset(  # of a model's config
    "_name_or_path architectures attn_implementation bos_token_id dtype eos_token_id id2label label2id pad_token_id "
    "tokenizer_class torch_dtype transformers_version use_cache".split()
)
_PEFT_COSMETIC = frozenset("auto_mapping base_model_name_or_path inference_mode peft_version revision".split())


def fingerprint_weights(model: PreTrainedModel) -> str:
    """SHA-256 over every parameter and buffer and over what decides how they are used, in hex: the config, and PEFT.

    Names and paths play no part, and neither does what leaves keys and values as they are.
    """
    seen: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor))
    with ThreadPoolExecutor() as workers:
        digests = list(workers.map(lambda entry: _digest_tensor(entry[1]), seen.values()))
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _COSMETIC}
    whole = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for (name, tensor), digest in zip(seen.values(), digests, strict=True):
        whole.update(json.dumps([name, str(tensor.dtype), list(tensor.shape), digest]).encode())
    whole.update(_peft_settings(model).encode())
    return whole.hexdigest()


def fingerprint_values(model: PreTrainedModel) -> str:
    """SHA-256 over the parameters as bfloat16, in hex; one for a model loaded in float32 and in bfloat16.

    PEFT's settings count as for :func:`fingerprint_weights`.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {_digest_tensor(parameter.bfloat16())}\n".encode())
    digest.update(_peft_settings(model).encode())
    return digest.hexdigest()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules within, shared ones each time; several times as fast as :meth:`torch.nn.Module.modules`."""
    found = [model]
    for module in found:  # grows meanwhile
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
    return found


def peft_switches(modules: Iterable[nn.Module]) -> list[str]:
    """Which adapters of PEFT are active, merged and disabled, and how they are scaled, module by module.

    Empty for a model without any, and for one whose adapters were merged and unloaded.
    """
    names = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
    return [str([vars(m).get(name) for name in names]) for m in modules if names[0] in vars(m)]


def _peft_settings(model: nn.Module) -> str:
    """The switches and configs of PEFT's adapters; nothing for a model without any."""
    switches = peft_switches(modules_of(model))
    if not switches:
        return ""
    configs = {
        name: {key: value for key, value in config.to_dict().items() if key not in _PEFT_COSMETIC}
        for name, config in (getattr(model, "peft_config", None) or {}).items()
    }
    return json.dumps(
        [configs, switches], sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v)
    )


def _digest_tensor(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over vocabulary, merges and added tokens, in hex."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)  # set by the last call, not part of how text becomes tokens
        state.pop("truncation", None)
    else:
        state = {"vocabulary": tokenizer.get_vocab(), "added": sorted(map(str, tokenizer.added_tokens_encoder.items()))}
    text = json.dumps(state, sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer).__name__}\n{text}".encode()).hexdigest()
