"""A run that goes on from a trained adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.testing import assert_close
from training_samples import VARIANTS, make_trainer

from kvpacket_rag import shipped
from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import AdapterError, TrainingError


@pytest.mark.parametrize("name", VARIANTS)
def test_a_warm_start_begins_where_the_trained_adapter_was(name: str, backbone: Backbone, tmp_path: Path) -> None:
    first = make_trainer(backbone, tmp_path / "first", steps=2, **VARIANTS[name])
    list(first.run())
    trained = Adapter.load(first.best_path)
    second = make_trainer(backbone, tmp_path / "second", warm_start=trained, steps=1, **VARIANTS[name])
    assert second.adapter.digest == trained.digest
    start, *_ = second.run()
    assert_close(start.validation["all"], first.progress.best, rtol=1e-4, atol=1e-6)


def test_a_higher_rank_begins_without_effect(backbone: Backbone, tmp_path: Path) -> None:
    first = make_trainer(backbone, tmp_path / "first", rank=2)
    list(first.run())
    wider = make_trainer(backbone, tmp_path / "second", rank=5, warm_start=Adapter.load(first.best_path))
    start, *_ = wider.run()
    assert_close(start.validation["all"], first.progress.best, rtol=1e-4, atol=1e-6)
    assert wider.adapter.low_rank is not None and {up.shape[1] for up in wider.adapter.low_rank.up} == {5}


def test_a_lower_rank_cannot_hold_a_higher_one(backbone: Backbone, tmp_path: Path) -> None:
    first = make_trainer(backbone, tmp_path / "first", rank=3)
    with pytest.raises(TrainingError, match=r"rank 3, the recipe makes .*rank 2"):
        make_trainer(backbone, tmp_path / "second", rank=2, warm_start=first.adapter)


def test_what_comes_of_a_warm_start_says_so_and_goes_on_as_itself(backbone: Backbone, tmp_path: Path) -> None:
    first = make_trainer(backbone, tmp_path / "first", steps=2)
    list(first.run())
    trained = Adapter.load(first.best_path)
    second = make_trainer(backbone, tmp_path / "second", warm_start=trained, steps=4)
    for report in second.run():
        if report.step == 2:
            break
    metadata = Adapter.load(second.best_path).metadata
    assert metadata["warm_start"] == trained.digest
    assert json.loads(metadata["warm_start_training"])["recipe"] == trained.metadata["recipe"]
    again = make_trainer(backbone, tmp_path / "second", warm_start=trained, steps=4)
    assert again.progress.step == 2
    with pytest.raises(
        TrainingError, match=r"another run: that one started from [0-9a-f]{12}…, this one starts from nothing\. Go on"
    ):
        make_trainer(backbone, tmp_path / "second", steps=4)


def test_an_adapter_that_is_built_otherwise_is_no_start(backbone: Backbone, tmp_path: Path) -> None:
    other = make_trainer(backbone, tmp_path / "a", rank=3, keep_header=False).adapter
    with pytest.raises(TrainingError, match=r"header is 'left out' and would be 'kept'; it has 3 \(left out.*rank 3"):
        make_trainer(backbone, tmp_path / "b", warm_start=other)
    assert not (tmp_path / "b" / "state.safetensors").exists()


def test_an_adapter_of_another_model_is_no_start(backbone: Backbone, tmp_path: Path) -> None:
    given = make_trainer(backbone, tmp_path / "a").adapter
    given.metadata |= {"architecture": "QwenForCausalLM/64", "model": "another one"}
    with pytest.raises(AdapterError, match=r"trained for another one \(QwenForCausalLM/64\), and tiny is "):
        make_trainer(backbone, tmp_path / "b", warm_start=given)
    assert not (tmp_path / "b").exists()


def test_an_adapter_of_near_weights_is_a_start_and_that_is_said(
    backbone: Backbone, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "_said", set())
    given = make_trainer(backbone, tmp_path / "a").adapter
    given.metadata |= {"architecture": backbone.architecture, "model": "its ancestor", "weights": "0" * 64}
    make_trainer(backbone, tmp_path / "b", warm_start=given)
    assert "trained for its ancestor, whose weights are not those of tiny" in caplog.text
