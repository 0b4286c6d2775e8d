"""A run: what it moves, that it learns, and what it keeps."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_samples import SMALL, VARIANTS, make_trainer, row, touched, values

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.attach import checkpointed
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.training import trainer as trainer_module
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.student import student_logits
from kvpacket_rag.training.teacher import Teacher
from kvpacket_rag.training.trainer import Trainer, validate


@pytest.mark.parametrize("name", VARIANTS)
def test_training_moves_every_part_of_the_adapter_and_nothing_else(
    name: str, backbone: Backbone, tmp_path: Path
) -> None:
    trainer = make_trainer(backbone, tmp_path, steps=2, **VARIANTS[name])
    before, weights = values(trainer.adapter), [p.clone() for p in backbone.model.parameters()]
    list(trainer.run())
    after = values(trainer.adapter)
    names = trainer.adapter.low_rank.names if trainer.adapter.low_rank else ()
    dead = {n for n, module in enumerate(names) if module.startswith("model.layers.2.") and module[-6:-5] not in "kv"}
    still = {
        n for n in before if before[n].numel() and torch.equal(before[n], after[n])
    }  # what leaves the last layer is cached nowhere
    assert still == {f"low_rank.{part}.{n}" for n in dead for part in ("down", "up")}
    assert all(torch.equal(a, b) for a, b in zip(weights, backbone.model.parameters(), strict=True))


def test_training_brings_packets_nearer_to_full_prefill(backbone: Backbone, tmp_path: Path) -> None:
    trainer = make_trainer(backbone, tmp_path, steps=30, validate_every=5)
    reports = list(trainer.run())
    validations = [report.validation["all"] for report in reports if report.validation]
    assert min(validations) < 0.9 * validations[0]
    found = validate(backbone, Adapter.load(trainer.best_path), trainer._validation, Teacher(backbone))
    assert found["all"] == pytest.approx(min(validations), rel=1e-4)
    assert set(found) == {"all", "domain 0", "domain 1"}


def test_rows_read_together_give_the_gradients_of_rows_read_apart(backbone: Backbone, tmp_path: Path) -> None:
    found = []
    for number, settings in enumerate([{"forward_tokens": 1}, {"forward_tokens": 4096}, {"checkpointing": True}]):
        trainer = make_trainer(backbone, tmp_path / str(number), steps=1, deep=True, **settings)
        trainer._step()
        found.append({name: p.grad for name, p in trainer.adapter.named_parameters()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("settings", [{"objective": "ce"}, {"objective": "kl+ce"}, {"hidden_weight": 0.5}])
def test_other_objectives_train_too(settings: dict[str, Any], backbone: Backbone, tmp_path: Path) -> None:
    reports = list(make_trainer(backbone, tmp_path, steps=20, validate_every=10, **settings).run())
    assert reports[-1].loss < reports[1].loss


def test_the_best_adapter_is_kept_and_a_run_without_progress_stops(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([{"all": v, "domain": v} for v in (0.9, 0.5, 0.4, 0.6, 0.7, 0.1)])
    monkeypatch.setattr(trainer_module, "validate", lambda *_: next(figures))
    trainer = make_trainer(backbone, tmp_path, steps=100, patience=2)
    reports = list(trainer.run())
    assert reports[-1].step == 6 and trainer.progress.best_step == 2
    assert json.loads(Adapter.load(trainer.best_path).metadata["validation_kl"])["all"] == 0.4


def test_checkpoints_are_computed_again_in_the_thread_of_the_backward_pass(backbone: Backbone) -> None:
    adapter = touched(Recipe(**SMALL), backbone)
    errors: list[BaseException] = []

    def backward(logits: torch.Tensor) -> None:
        try:
            logits.square().mean().backward()
        except BaseException as error:
            errors.append(error)

    with checkpointed(backbone.model), student_logits(backbone, adapter, [row(backbone)], [[[5], [6]]]) as (logits, _):
        worker = threading.Thread(target=backward, args=(logits,))  # as autograd does for a GPU
        worker.start()
        worker.join()
    assert not errors and adapter.header.grad is not None


def test_the_adapter_says_where_it_comes_from(backbone: Backbone, tmp_path: Path) -> None:
    trainer = make_trainer(backbone, tmp_path)
    list(trainer.run())
    about = Adapter.load(trainer.best_path).metadata
    assert about["weights"] == backbone.values_fingerprint and about["tokenizer"] == backbone.tokenizer_fingerprint
    assert Recipe(**json.loads(about["recipe"])) == trainer.recipe and about["data"] == "four chunks"


def test_the_log_has_a_line_a_step(backbone: Backbone, tmp_path: Path) -> None:
    list(make_trainer(backbone, tmp_path).run())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines if "validation_kl" in line] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"objective": "mse"},
        {"header": -1},
        {"separators": "kept"},
        {"header": 0, "trailer": 0, "rank": 0},
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        Recipe(**settings)


def test_the_rate_rises_and_then_falls_to_zero() -> None:
    recipe = Recipe(steps=100, warmup=0.1)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[-1] < 0.02
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_nothing_to_validate_on_is_an_error(backbone: Backbone, tmp_path: Path) -> None:
    numbered: Callable[[int], Any] = lambda number: row(backbone, number)  # noqa: E731
    with pytest.raises(TrainingError, match="hold out at least one"):
        Trainer(backbone, numbered, [], Recipe(**SMALL), tmp_path, "")


def test_a_tokenizer_without_pad_token_and_tied_weights_are_no_obstacle(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    tied = Backbone(make_model(tie_word_embeddings=True, pad_token_id=None), bare, "tied")
    reports = list(make_trainer(tied, tmp_path, steps=2).run())
    assert reports[-1].step == 2 and reports[-1].loss > 0
