"""How a run is stopped, by whom, and how it goes on."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_samples import make_trainer, same, values

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import AdapterError, TrainingError
from kvpacket_rag.training import checkpoint
from kvpacket_rag.training import trainer as trainer_module
from kvpacket_rag.training.checkpoint import _difference
from kvpacket_rag.training.trainer import Trainer, validate


@pytest.fixture(scope="module")
def unbroken(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run from beginning to end, which the runs that were stopped have to equal."""
    trainer = make_trainer(backbone, tmp_path_factory.mktemp("unbroken"))
    list(trainer.run())
    return trainer


@pytest.mark.parametrize("killed_after", [1, 3, 4])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    killed_after: int, unbroken: Trainer, backbone: Backbone, tmp_path: Path
) -> None:
    broken = make_trainer(backbone, tmp_path / "broken")
    for report in broken.run():
        if report.step == killed_after:
            break
    again = make_trainer(backbone, tmp_path / "broken")
    assert again.progress.step == killed_after
    list(again.run())
    assert same(values(again.adapter), values(unbroken.adapter))
    assert again.progress == unbroken.progress
    assert Adapter.load(again.best_path).digest == Adapter.load(unbroken.best_path).digest


def test_a_run_killed_without_a_word_goes_on_from_its_last_state(
    unbroken: Trainer, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_trainer(backbone, tmp_path / "broken")
    steps = broken.run()
    while next(steps).step < 3:
        pass
    monkeypatch.setattr(broken, "_save", lambda: None)  # as after a kill -9: nothing more is written
    steps.close()
    again = make_trainer(backbone, tmp_path / "broken")
    assert again.progress.step == 2
    list(again.run())
    assert same(values(again.adapter), values(unbroken.adapter))


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(backbone, tmp_path)
    steps = trainer.run()
    while next(steps).step < 3:
        pass
    good = values(trainer.adapter)
    monkeypatch.setattr(trainer_module, "loss_per_token", lambda logits, *_: logits.sum(-1) * float("nan"))
    with pytest.raises(TrainingError, match=r"step 4 .*domain 0, domain 1.*lower rates"):
        next(steps)
    monkeypatch.undo()
    again = make_trainer(backbone, tmp_path)
    assert again.progress.step == 3 and same(values(again.adapter), good)


def test_a_gradient_that_is_no_number_never_reaches_the_adapter(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return (logits * 0).sum(-1).sqrt()  # finite, and of infinite slope

    trainer = make_trainer(backbone, tmp_path, header=0, trailer=0)
    good = values(trainer.adapter)
    monkeypatch.setattr(trainer_module, "loss_per_token", odd)
    with pytest.raises(TrainingError, match="its gradient is not a number in step 1"):
        list(trainer.run())
    assert same(values(trainer.adapter), good)


@pytest.mark.parametrize("call", [2, 3, 4, 5])
def test_a_run_stopped_within_a_validation_makes_up_for_it(
    call: int, unbroken: Trainer, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1, 100))

    def stopped(*arguments: Any) -> dict[str, float]:
        if next(calls) == call:
            raise KeyboardInterrupt
        return validate(*arguments)

    monkeypatch.setattr(trainer_module, "validate", stopped)
    with pytest.raises(KeyboardInterrupt):
        list(make_trainer(backbone, tmp_path / "broken").run())
    monkeypatch.undo()
    again = make_trainer(backbone, tmp_path / "broken")
    list(again.run())
    assert again.progress == unbroken.progress
    assert Adapter.load(again.best_path).digest == Adapter.load(unbroken.best_path).digest


def test_a_best_adapter_that_could_not_be_written_is_not_counted(
    unbroken: Trainer, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_trainer(backbone, tmp_path / "broken")
    steps = broken.run()
    next(steps)

    def full(*_: Any) -> None:
        raise AdapterError("cannot write the adapter: no space left")

    monkeypatch.setattr(Adapter, "save", full)
    with pytest.raises(AdapterError, match="no space left"):
        list(steps)
    monkeypatch.undo()
    again = make_trainer(backbone, tmp_path / "broken")
    list(again.run())
    assert again.progress == unbroken.progress
    assert Adapter.load(again.best_path).digest == Adapter.load(unbroken.best_path).digest


def test_a_lost_adapter_is_noticed(backbone: Backbone, tmp_path: Path) -> None:
    trainer = make_trainer(backbone, tmp_path, steps=2)
    list(trainer.run())
    trainer.best_path.unlink()
    with pytest.raises(TrainingError, match="is no file; put it back, or remove"):
        make_trainer(backbone, tmp_path, steps=2)


def test_a_line_of_the_log_that_was_cut_short_stays_alone(backbone: Backbone, tmp_path: Path) -> None:
    steps = make_trainer(backbone, tmp_path).run()
    while next(steps).step < 2:
        pass
    steps.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    list(make_trainer(backbone, tmp_path).run())
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if line.endswith("}")] == list(range(7))


def test_two_runs_do_not_share_a_folder(backbone: Backbone, tmp_path: Path) -> None:
    first = make_trainer(backbone, tmp_path).run()
    next(first)
    with pytest.raises(TrainingError, match="another run is at work"):
        next(make_trainer(backbone, tmp_path).run())
    first.close()
    assert len(list(make_trainer(backbone, tmp_path).run())) >= 6


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"rank": 3}, {"seed": 1}])
def test_a_folder_with_another_run_is_refused(change: dict[str, Any], backbone: Backbone, tmp_path: Path) -> None:
    list(make_trainer(backbone, tmp_path, steps=1).run())
    (name,) = change
    with pytest.raises(TrainingError, match=f"another run: {name} was .* and is {change[name]}"):
        make_trainer(backbone, tmp_path, steps=1, **change)


def test_what_differs_between_two_runs_is_named_by_its_place_in_what_they_are_made_of() -> None:
    data = {"domains": [{"name": "niah", "samples": 9, "content": "a" * 64}], "shape": {"max_chunks": 3}}
    before = json.dumps({"rank": 2, "data": json.dumps(data)})
    data["domains"] += [{"name": "biography", "samples": 5}]
    data["shape"] = {"max_chunks": 4}
    found = _difference(before, json.dumps({"rank": 2, "data": json.dumps(data)}))
    assert "data.domains.biography.samples was None and is 5" in found
    assert "data.shape.max_chunks was 3 and is 4" in found and "{" not in found and "rank" not in found


def test_what_runs_of_data_sets_in_another_order_or_with_one_name_differ_in_is_named() -> None:
    def about(*samples: tuple[str, int]) -> str:
        return json.dumps({"domains": [{"name": name, "samples": count} for name, count in samples]})

    assert _difference(about(("a", 1), ("b", 2)), about(("b", 2), ("a", 1))) == (
        "it has the same data sets in another order"
    )
    assert _difference(about(("a", 1), ("a", 2)), about(("a", 5), ("a", 2))) == "domains.0.samples was 1 and is 5"


def test_a_state_that_cannot_be_written_is_an_error_that_names_it(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer(backbone, tmp_path, steps=2)
    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(TrainingError, match=r"cannot write the state of the training to .*make room"):
        list(trainer.run())
    monkeypatch.undo()
    assert list(make_trainer(backbone, tmp_path, steps=2).run())[-1].step == 2


def test_a_damaged_state_is_refused_by_name(backbone: Backbone, tmp_path: Path) -> None:
    list(make_trainer(backbone, tmp_path, steps=1).run())
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(TrainingError, match=r"state\.safetensors is no state of a training run"):
        make_trainer(backbone, tmp_path, steps=1)
