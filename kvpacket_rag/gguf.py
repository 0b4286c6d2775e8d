"""A GGUF file as a folder that transformers loads in a second instead of fifteen.

GGUF keeps weights in quantised blocks and the tokenizer as raw lists. Both are unpacked once into
a checkpoint folder of float32 safetensors, which holds exactly the values of the blocks. Knows the
one family this package's default model belongs to: Llama weights with SmolLM's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvpacket_rag.errors import ModelNotFoundError, UnsupportedModelError

FORMAT_VERSION = 1
_CONTROL_TOKEN = 3  # GGUF's token type of the control strings
_FAMILY = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

logger = logging.getLogger(__name__)


def converted(path: Path, cache: Path) -> Path:
    """The checkpoint folder of a GGUF file, made on the first call.

    Its name holds a hash of the file's content, so another version of the file gets another folder.
    The folder appears whole or not at all; a second process waits for the first and takes its result.

    Raises:
        UnsupportedModelError: the file is no GGUF, or of another family.
        ModelNotFoundError: the file cannot be read, or the folder not be written.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        folder = cache / f"{path.stem}-{digest}-v{FORMAT_VERSION}"
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{folder.name}.lock"):
                if not folder.is_dir():
                    _convert_whole(path, folder)
    except (OSError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"cannot convert {path} into {cache} ({error}); the conversion needs about six times the file's "
            "size there, and KVPACKET_CACHE names another folder to use"
        ) from error
    return folder


def _convert_whole(path: Path, folder: Path) -> None:
    """Convert beside ``folder``, then rename. The caller holds the lock, so a leftover is a dead process's."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    logger.info("converting %s to %s, once", path.name, folder)
    partial.mkdir()
    try:
        convert(path, partial)
        for file in partial.iterdir():
            _flush(file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(file: Path) -> None:
    """On disk before the rename is, so that a power cut cannot leave a whole folder of empty files."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def convert(path: Path, folder: Path) -> None:
    """Write config, tokenizer and float32 weights of a GGUF file into an existing folder.

    Raises:
        UnsupportedModelError: the file is no GGUF, or of another family.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise UnsupportedModelError(
            f"{path} is not a readable GGUF file ({error}); install or fetch it anew"
        ) from error
    found = {key: field.contents() for key, field in reader.fields.items()}
    wrong = {key: found.get(key) for key, expected in _FAMILY.items() if found.get(key) != expected}
    if wrong:
        raise UnsupportedModelError(
            f"{path} has {wrong}, expected {_FAMILY}; pass a folder or hub name of the model in safetensors instead"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _config(found, tied))
    _write_json(folder / "generation_config.json", _token_ids(found))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(found))
    _tokenizer(found).save(str(folder / "tokenizer.json"))
    save_file(_weights(reader, found), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token_ids(found: dict[str, Any]) -> dict[str, int]:
    """Generation stops at the end-of-turn token, which GGUF names as its end of sequence."""
    return {
        f"{ours}_token_id": found[f"tokenizer.ggml.{_SPECIAL_TOKENS[ours]}_token_id"] for ours in ("bos", "eos", "pad")
    }


def _config(found: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = found["llama.attention.head_count"]
    # GGUF stores 1e-5 as the nearest float32; its shortest decimal is the number that was meant.
    epsilon = float(str(np.float32(found["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "hidden_size": found["llama.embedding_length"],
        "intermediate_size": found["llama.feed_forward_length"],
        "max_position_embeddings": found["llama.context_length"],
        "num_hidden_layers": found["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": found.get("llama.attention.head_count_kv", heads),
        "head_dim": found["llama.rope.dimension_count"],
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(found["llama.rope.freq_base"])},
        "tie_word_embeddings": tied,
        "vocab_size": len(found["tokenizer.ggml.tokens"]),
        **_token_ids(found),
    }


def _weights(reader: gguf.GGUFReader, found: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = found["llama.attention.head_count"]
    rows = {"attn_q": heads, "attn_k": found.get("llama.attention.head_count_kv", heads)}
    weights = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.split(".")  # "blk.7.attn_q.weight" or "output_norm.weight"
        if kind not in _TENSORS:
            raise UnsupportedModelError(f"GGUF tensor {tensor.name!r} is unknown, expected one of {sorted(_TENSORS)}")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind in rows:
            values = _half_layout(values, rows[kind])
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{_TENSORS[kind]}.weight"] = np.ascontiguousarray(values)
    return weights


def _half_layout(values: np.ndarray, heads: int) -> np.ndarray:
    """GGUF lays the two numbers that one angle turns side by side; transformers keeps them half a head apart."""
    pairs = values.reshape(heads, -1, 2, values.shape[1])  # (heads, head_dim / 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(values.shape)  # (heads x head_dim, hidden)


def _tokenizer(found: dict[str, Any]) -> Tokenizer:
    tokens = found["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # "smollm" means digits one by one, split off before anything else: "\n\n1" keeps "\n\n" in one token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = found["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _tokenizer_config(found: dict[str, Any]) -> dict[str, Any]:
    tokens = found["tokenizer.ggml.tokens"]
    special = {
        f"{ours}_token": tokens[found[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in _SPECIAL_TOKENS.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": found["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": found["tokenizer.chat_template"],
        **special,
    }
