"""Arguments of transformers' ``from_pretrained``: passed on where they count, refused by name where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpacket_rag.errors import KVPacketError, ModelNotFoundError
from kvpacket_rag.models import load_model, load_tokenizer
from kvpacket_rag.pretrained import passed_on

FILES = {"cache_dir": "/files", "revision": "v2", "token": "hf_x", "subfolder": "sub", "local_files_only": True}


@pytest.fixture
def folder(make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hub and transformers were asked for; neither is reached."""
    seen: dict[str, Any] = {}

    def tokenizer(source: str, **given: Any) -> None:
        seen["tokenizer"] = given
        raise OSError("nothing is downloaded here")

    monkeypatch.setattr("kvpacket_rag.models.HfApi.model_info", lambda _, name, **given: seen.update(hub=given))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    return seen


def test_what_says_which_files_are_meant_counts_for_weights_and_tokenizer():
    weights, tokenizer = passed_on({**FILES, "variant": "fp16", "use_cache": True}, {"revision": "v3"})
    assert weights == {**FILES, "variant": "fp16"} and tokenizer == {**FILES, "revision": "v3"}
    assert passed_on({"trust_remote_code": True, "token": None}, {"max_length": 9}) == ({}, {})


@pytest.mark.parametrize(
    ("model_kwargs", "tokenizer_kwargs", "message"),
    [
        ({"quantization_config": 1, "max_memory": {}}, {}, "model_kwargs holds 'max_memory', 'quantization_config'"),
        ({}, {"add_bos_token": True}, "tokenizer_kwargs holds 'add_bos_token', .* load model and tokenizer yourself"),
        ({"attn_implementation": "flash_attention_2"}, {}, "'flash_attention_2'.*use 'sdpa' or 'eager'"),
    ],
)
def test_what_cannot_have_its_effect_is_refused_by_name(
    model_kwargs: dict[str, Any], tokenizer_kwargs: dict[str, Any], message: str
):
    with pytest.raises(KVPacketError, match=message):
        load_model("anything", model_kwargs=model_kwargs, tokenizer_kwargs=tokenizer_kwargs)


@pytest.mark.parametrize(("word", "class_name"), [("eager", "eager"), (None, "sdpa")])
def test_the_attention_asked_for_is_used(folder: Path, word: str | None, class_name: str):
    model, _ = load_model(str(folder), model_kwargs={"attn_implementation": word, "cache_dir": "/nowhere"})
    assert model.config._attn_implementation == class_name


def test_a_folder_has_no_revisions(folder: Path):
    for model_kwargs, tokenizer_kwargs in (({"revision": "v2"}, {}), ({}, {"revision": "v2"})):
        with pytest.raises(KVPacketError, match=r"revision is 'v2'.* has no revisions; leave revision out"):
            load_model(str(folder), model_kwargs=model_kwargs, tokenizer_kwargs=tokenizer_kwargs)
    load_model(str(folder), model_kwargs={"revision": "main"})


def test_the_hub_is_asked_once_with_the_token_and_not_for_local_files(asked: dict[str, Any]):
    with pytest.raises(ModelNotFoundError, match="nothing is downloaded"):
        load_model("somebody/model", model_kwargs={"token": "hf_x", "revision": "v2"})
    assert asked.pop("hub")["token"] == "hf_x"
    expected = {"token": "hf_x", "revision": "v2", "trust_remote_code": False, "local_files_only": False}
    assert asked.pop("tokenizer") == expected
    with pytest.raises(ModelNotFoundError):
        load_model("somebody/model", model_kwargs={"local_files_only": True})
    assert "hub" not in asked and asked["tokenizer"]["local_files_only"] is True


def test_a_folder_of_a_tokenizer_need_not_hold_a_model(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), {"max_length": 7})("lease").input_ids == tokenizer("lease").input_ids
