"""The training loop: self-distillation, the model frozen (Chen et al., arXiv 2604.13226, section 3.2)."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.attach import checkpointed
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.training.checkpoint import Progress, load_state, save_state, warm_up
from kvpacket_rag.training.hidden import captured, middle_layer
from kvpacket_rag.training.objective import Targets, hidden_error, join, loss_per_token
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.row import Row
from kvpacket_rag.training.student import packed, student_logits
from kvpacket_rag.training.teacher import Teacher
from kvpacket_rag.training.validation import validate
from kvpacket_rag.training.workers import Workers

STATE = "state.safetensors"  # of a run, in its folder
_SAVE_SECONDS = 120.0
_BETAS = (0.9, 0.99)  # runs are short, and the usual 0.999 would remember their first steps throughout


@dataclass(frozen=True, slots=True)
class Report:
    """What a step or a validation found.

    Attributes:
        step: steps done.
        loss: of the last step, per answer token.
        validation: KL in nats a token on the held-out rows, overall ("all") and by domain; empty between validations.
        seconds_left: until the last step, at the pace so far.
    """

    step: int
    loss: float
    validation: dict[str, float]
    seconds_left: float


class Trainer:
    """Trains one adapter in one folder, and goes on where it was stopped.

    Args:
        backbone: the frozen model, the one that will serve.
        rows: number to row; the same number gives the same row every time.
        validation: held-out rows.
        recipe: what to do.
        folder: of state, log and best adapter.
        data: describes the rows, for the adapter's metadata and so that no run goes on with others.
        teacher: answers the rows.
        warm_start: the adapter to go on from, built alike; a new run starts with its numbers. A run that is there
            takes what :func:`started_from` gives instead.
        force: a new run may replace an adapter that is in the folder.

    Raises:
        TrainingError: the folder holds another run or an adapter that is of none, there is nothing to validate on,
            or the adapter to go on from is built otherwise.
        AdapterError: the adapter to go on from is of another model.
    """

    def __init__(
        self,
        backbone: Backbone,
        rows: Callable[[int], Row],
        validation: Sequence[Row],
        recipe: Recipe,
        folder: Path,
        data: str,
        teacher: Teacher | None = None,
        warm_start: Adapter | Mapping[str, str] | None = None,
        force: bool = False,
    ) -> None:
        if not validation:
            raise TrainingError("there are no rows to validate on; hold out at least one")
        self.backbone, self.recipe, self.folder = backbone, recipe, folder
        self._rows, self._validation, self._data = rows, validation, data
        self._workers, self._force = Workers(), force
        self._teacher = teacher or default_teacher(backbone, recipe, folder / "teacher")
        self.adapter = recipe.build(backbone)
        self._about = warm_up(self.adapter, warm_start, backbone)
        folder.mkdir(parents=True, exist_ok=True)
        groups = recipe.parameter_groups(self.adapter, backbone)
        self._optimiser = torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, weight_decay=0.0)
        about = {"data": data, "validation": _digest(validation), "weights": backbone.weights_fingerprint}
        self._identity = json.dumps(recipe.to_dict() | about | self._about | {"dtype": str(backbone.dtype)})
        self.progress = Progress()
        self._load()
        self._saved_at = time.monotonic()
        self._is_whole = False  # nothing is saved before the first step is done

    @property
    def best_path(self) -> Path:
        """The adapter with the lowest validation KL so far."""
        return self.folder / "adapter.safetensors"

    def run(self) -> Iterator[Report]:
        """Train to the last step, or until validation stops improving; a report after every step.

        Raises:
            TrainingError: the loss is not a number any more, and the last good state is kept; or another run is
                at work in the folder.
        """
        with self._alone():
            self._load()  # again, for another run may have been at work until now
            yield from self._run()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other runs out of the folder."""
        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            with nullcontext() if self._workers.number else lock:
                yield
        except Timeout as error:
            raise TrainingError(
                f"another run is at work in {self.folder}; wait for it, or name another folder"
            ) from error

    def _run(self) -> Iterator[Report]:
        started, first = time.monotonic(), self.progress.step
        if not first:
            self._save()  # the folder is this run's from now on
            bare = Adapter.empty(self.backbone.hidden_size)
            self.progress.plain = validate(self.backbone, bare, self._validation, self._teacher, self._workers)
            report = Report(0, math.nan, self._validate(), math.nan)
            self._log(report)
            yield report
        try:
            while self.progress.step < self.recipe.steps and self.progress.stale < self.recipe.patience:
                loss = self._step()
                done = self.progress.step
                validation = {}
                if done % self.recipe.validate_every == 0 or done == self.recipe.steps:
                    validation = self._validate()
                self._is_whole = True
                pace = (time.monotonic() - started) / (done - first)
                report = Report(done, loss, validation, pace * (self.recipe.steps - done))
                self._log(report)
                if validation or time.monotonic() - self._saved_at > _SAVE_SECONDS:
                    self._save()
                yield report
        finally:
            if self._is_whole:
                self._save()

    def _step(self) -> float:
        recipe, step = self.recipe, self.progress.step
        first = step * recipe.batch_rows
        batch = [self._rows(number) for number in self._workers.mine(range(first, first + recipe.batch_rows))]
        targets = [self._teacher.answer(row) for row in batch]
        device = self.backbone.device
        count = self._workers.sum(torch.tensor(float(sum(len(t.answer) for ts in targets for t in ts)), device=device))
        self._optimiser.zero_grad()
        total = torch.zeros((), device=device)
        for rows, wanted in packed(batch, targets, recipe.forward_tokens):
            total += self._backward(rows, wanted, count)
        loss_value = float(self._workers.sum(total))
        if not math.isfinite(loss_value + self._gather()):
            self._stop_on_nan(step, batch)
        self._is_whole = False  # what is stopped from here to the end of a validation goes on from the last state
        for group in self._optimiser.param_groups:
            group["lr"] = group["full_lr"] * recipe.rate(step)
        self._optimiser.step()
        self.progress.step += 1
        return loss_value

    def _backward(self, rows: Sequence[Row], targets: Sequence[Sequence[Targets]], count: Tensor) -> Tensor:
        """Add the gradients of some rows; gives their share of the loss."""
        recipe, model = self.recipe, self.backbone.model
        answers = [[target.answer.tolist() for target in row] for row in targets]
        wanted = join([target for row in targets for target in row], self.backbone.device)
        with ExitStack() as stack:
            seen = stack.enter_context(captured(model, middle_layer(model))) if recipe.hidden_weight else []
            if recipe.checkpointing:
                stack.enter_context(checkpointed(model))
            logits, places = stack.enter_context(student_logits(self.backbone, self.adapter, rows, answers))
            loss = loss_per_token(logits, wanted, recipe.objective, recipe.ce_weight)
            if seen:
                loss = loss + recipe.hidden_weight * hidden_error(seen[0][0, places], wanted)
            total = loss.sum() / count
            total.backward()
        return total.detach()

    def _gather(self) -> float:
        """Sum gradients over the processes and clip them, each part by itself; the sum of their norms."""
        norms = torch.zeros((), device=self.backbone.device)
        for group in self._optimiser.param_groups:
            for parameter in group["params"]:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._workers.sum(gradient)
            norms += torch.nn.utils.clip_grad_norm_(group["params"], self.recipe.clip)
        return float(norms)

    def _stop_on_nan(self, step: int, batch: Sequence[Row]) -> None:
        domains = ", ".join(sorted({row.domain for row in batch}))
        raise TrainingError(
            f"the loss or its gradient is not a number in step {step + 1} (data: {domains}); the state before that "
            f"step is kept in {self.folder}. Start again in another folder with lower rates, or the model in float32"
        )

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        found = validate(self.backbone, self.adapter, self._validation, self._teacher, self._workers)
        progress = self.progress
        if found["all"] < progress.best:
            if not self._workers.number:
                self._save_best(found)
            progress.best, progress.best_step, progress.stale = found["all"], progress.step, 0
            progress.figures = found
        else:
            progress.stale += 1
        return found

    def _save_best(self, figures: dict[str, float]) -> None:
        backbone, progress = self.backbone, self.progress
        about = {
            "model": backbone.name,
            "weights": backbone.values_fingerprint,
            "tokenizer": backbone.tokenizer_fingerprint,
            "architecture": backbone.architecture,
            "recipe": json.dumps(self.recipe.to_dict()),
            "data": self._data,
            "step": str(progress.step),
            "validation_kl": json.dumps(figures),
            "plain_kl": json.dumps(progress.plain),
        } | self._about
        about |= self.adapter.metadata
        parts = Adapter(
            self.adapter.header, self.adapter.trailer, about, deep=self.adapter.deep, low_rank=self.adapter.low_rank
        )
        parts.save(self.best_path)

    def _load(self) -> None:
        """Go on from the saved state, if there is one.

        Raises:
            TrainingError: it belongs to another run, the best adapter is not beside it any more, or there is none and
                an adapter all the same.
        """
        found = load_state(self.folder / STATE, self._identity, self.adapter, self._optimiser)
        if found is None and self.best_path.exists() and not self._force:
            raise TrainingError(
                f"{self.best_path} exists, and no state of a run is beside it; name another folder, or have the "
                "adapter replaced with --force"
            )
        self.progress = found or self.progress
        if not self.progress.figures:
            return  # nothing was kept yet
        best = Adapter.load(self.best_path).metadata.get("step") if self.best_path.is_file() else "no file"
        if best != "no file" and int(best or 0) >= self.progress.best_step:
            return  # it may be of a later step than the state, which then comes to it again
        raise TrainingError(
            f"{self.best_path} should be the adapter of step {self.progress.best_step} and is {best}; put it back, or "
            f"remove {self.folder / STATE} to train anew, with --force if an adapter is there"
        )

    def _save(self) -> None:
        if not self._workers.number:
            save_state(self.folder / STATE, self._identity, self.progress, self.adapter, self._optimiser)
        self._saved_at = time.monotonic()

    def _log(self, report: Report) -> None:
        if self._workers.number:
            return
        line: dict[str, Any] = {"step": report.step, "loss": report.loss if report.step else None, "time": time.time()}
        if report.validation:
            line |= {"validation_kl": report.validation["all"], "domains": report.validation}
            line["plain_kl"] = self.progress.plain["all"]
        path = self.folder / "log.jsonl"
        cut_short = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
        try:
            with path.open("a") as file:
                file.write("\n" * cut_short + json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(f"cannot write to {path}: {error}; make room, and the run goes on from here") from error


def default_teacher(backbone: Backbone, recipe: Recipe, folder: Path | None) -> Teacher:
    """A teacher that keeps what the recipe needs."""
    return Teacher(backbone, folder, hidden_layer=middle_layer(backbone.model) if recipe.hidden_weight else None)


def _digest(rows: Sequence[Row]) -> str:  # SHA-256 over what they read, in hex
    return hashlib.sha256(json.dumps([[row.context_ids, row.suffixes] for row in rows]).encode()).hexdigest()
