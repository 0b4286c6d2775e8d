from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

import kvpacket_rag.gguf
from kvpacket_rag.errors import ModelNotFoundError, UnsupportedModelError
from kvpacket_rag.gguf import convert, converted

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_model(vocab_size=8, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def tiny_gguf(tiny: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny)
    return path


def write_gguf(path: Path, model: LlamaForCausalLM, pre: str = "smollm") -> None:
    """The model as llama.cpp's converter writes it, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "</s>", "a", "b", "1", "2", "Ċ", "ĊĊ"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in model.named_parameters():
        writer.add_tensor(gguf_name(name), side_by_side(name, weight.detach(), model).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    parts = name.split(".")
    block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{block}{GGUF_NAMES['.'.join(parts[3:-1] if block else parts[:-1])]}.weight"


def side_by_side(name: str, weight: Tensor, model: LlamaForCausalLM) -> Tensor:
    """Row by row: what is half a head apart becomes neighbours."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    width = model.config.head_dim
    rows = [
        head + half + pair
        for head in range(0, len(weight), width)
        for pair in range(width // 2)
        for half in (0, width // 2)
    ]
    return weight[rows]


def logits_of(folder: Path) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        return model(torch.arange(8)[None]).logits


def test_a_converted_gguf_answers_as_the_model_it_was_made_from(
    tiny: LlamaForCausalLM, tiny_gguf: Path, tmp_path: Path
):
    convert(tiny_gguf, tmp_path)
    with torch.inference_mode():
        expected = tiny(torch.arange(8)[None]).logits
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=0, rtol=0)  # float32, the same weights


def test_digits_are_split_off_before_line_breaks_are_merged(tiny_gguf: Path, tmp_path: Path):
    convert(tiny_gguf, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a\n\n12").tokens == ["a", "ĊĊ", "1", "2"]


def test_a_gguf_of_another_family_is_refused_by_name(tiny: LlamaForCausalLM, tmp_path: Path):
    write_gguf(tmp_path / "other.gguf", tiny, pre="qwen2")
    with pytest.raises(UnsupportedModelError, match="qwen2"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(UnsupportedModelError, match=r"broken\.gguf"):
        converted(tmp_path / "broken.gguf", tmp_path / "cache")


def test_conversion_is_done_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = converted(tiny_gguf, tmp_path)
    monkeypatch.setattr(kvpacket_rag.gguf, "convert", lambda path, folder: pytest.fail("converted again"))
    assert converted(tiny_gguf, tmp_path) == first


def test_another_content_under_the_same_name_is_converted_anew(
    make_model: Callable[..., LlamaForCausalLM], tiny_gguf: Path, tmp_path: Path
):
    first = converted(tiny_gguf, tmp_path / "cache")
    write_gguf(tmp_path / tiny_gguf.name, make_model(seed=1, vocab_size=8, tie_word_embeddings=True))
    assert converted(tmp_path / tiny_gguf.name, tmp_path / "cache") != first


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_failed_conversion_leaves_nothing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def half_way(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(kvpacket_rag.gguf, "convert", half_way)
    with pytest.raises(ModelNotFoundError, match="KVPACKET_CACHE"):
        converted(tiny_gguf, tmp_path)
    assert [entry for entry in tmp_path.iterdir() if entry.suffix != ".lock"] == []


def test_what_a_killed_conversion_left_is_replaced(tiny_gguf: Path, tmp_path: Path):
    folder = converted(tiny_gguf, tmp_path)
    killed = folder.rename(f"{folder}.partial")
    (killed / "model.safetensors").write_bytes(b"half")
    assert logits_of(converted(tiny_gguf, tmp_path)).isfinite().all()
    assert not killed.exists()


def test_two_at_once_convert_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[Path] = []
    start = threading.Barrier(2)

    def slow(path: Path, folder: Path) -> None:
        calls.append(folder)
        convert(path, folder)

    def work() -> None:
        start.wait()
        results.append(converted(tiny_gguf, tmp_path))

    results: list[Path] = []
    monkeypatch.setattr(kvpacket_rag.gguf, "convert", slow)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results[0] == results[1]


def test_a_cache_folder_that_cannot_be_made_is_told(tiny_gguf: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="KVPACKET_CACHE"):
        converted(tiny_gguf, tmp_path / "file" / "models")
