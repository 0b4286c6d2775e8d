"""What a model and a tokenizer are known by: their content, never a name or a path."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COSMETIC = frozenset(  # of a model's config
    "_name_or_path architectures attn_implementation bos_token_id dtype eos_token_id id2label label2id pad_token_id "
    "tokenizer_class torch_dtype transformers_version use_cache".split()
)


def fingerprint_weights(model: PreTrainedModel) -> str:
    """SHA-256 over every parameter and buffer and over what the config changes in how they are used, in hex.

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
    return whole.hexdigest()


def fingerprint_values(model: PreTrainedModel) -> str:
    """SHA-256 over the parameters as bfloat16, in hex; one for a model loaded in float32 and in bfloat16."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {_digest_tensor(parameter.bfloat16())}\n".encode())
    return digest.hexdigest()


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
