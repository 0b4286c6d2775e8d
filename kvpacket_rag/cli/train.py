"""``kvpacket train``."""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.cli.options import add_hardware, positive
from kvpacket_rag.cli.output import duration, facts, say, show
from kvpacket_rag.errors import MissingExtraError, TrainingError

if TYPE_CHECKING:
    from kvpacket_rag.adapter import Adapter
    from kvpacket_rag.backbone import Backbone
    from kvpacket_rag.training.mixture import Mixture
    from kvpacket_rag.training.recipe import Recipe
    from kvpacket_rag.training.trainer import Report, Trainer

SUMMARY = "train the adapter of a model"
DESCRIPTION = (
    "Trains soft tokens and a low-rank update of the encoder by self-distillation on a mixture of data sets; the model "
    "is frozen. Stop it at any time: the same command goes on where it was. On several GPUs: "
    'accelerate launch "$(command -v kvpacket)" train ...'
)
_LINE_STEPS = 5  # between two lines of progress where no bar can be drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, data, recipe."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="smollm2-135m-instruct",
        help="short name, folder or hub name (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of state, log and adapter")
    parser.add_argument(
        "--data",
        metavar="NAME[=WEIGHT]",
        nargs="+",
        default=["niah", "biography"],
        help="'niah' and 'biography' are generated (default: both), 'niah:FOLDER' hides needles in texts of yours; or "
        "a .jsonl file, a folder with train.jsonl, or a data set of the hub. Weights are relative",
    )
    parser.add_argument(
        "--teacher",
        metavar="DIR",
        type=Path,
        help="folder of the teacher's answers, which runs may share (default: in the folder of --out)",
    )
    parser.add_argument(
        "--samples", metavar="N", type=positive, default=600, help="samples of each generator (default: %(default)s)"
    )
    parser.add_argument(
        "--validation", metavar="N", type=positive, default=32, help="rows to validate on (default: %(default)s)"
    )
    parser.add_argument(
        "--pool",
        metavar="N",
        type=int,
        default=0,
        help="train on N different rows, over and over; 0, the default, never repeats one",
    )
    parser.add_argument(
        "--warm-start",
        metavar="FILE",
        help="go on from this adapter in a new run; 'auto' is the one that ships for the model",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting from the list that --settings prints",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an adapter that is in the folder of --out and of no run there"
    )
    parser.add_argument("--settings", action="store_true", help="list what --set takes, with its values, and stop")
    add_hardware(parser)


def run(args: argparse.Namespace) -> None:
    """Train."""
    from kvpacket_rag.training.mixture import Shape
    from kvpacket_rag.training.recipe import Recipe
    from kvpacket_rag.training.workers import Workers

    given = _parse_settings(args.set, Recipe, Shape)
    recipe, shape = Recipe(**given[Recipe]), Shape(**given[Shape])
    if args.settings:
        show(_settings(recipe) + "\n" + _settings(shape))
        return
    trainer = _trainer(args, recipe, shape)
    _follow(trainer)
    progress = trainer.progress
    gap = 1 - progress.best / progress.plain["all"]
    show(
        facts(
            [
                ("Adapter", str(trainer.best_path)),
                ("Best step", f"{progress.best_step} of {progress.step}"),
                ("Validation KL", f"{_figures(progress.figures)} nats a token"),
                ("Plain concatenation", f"{_figures(progress.plain)}; of this gap {gap:.2f} is recovered"),
            ]
        )
    )
    if gap <= 0:
        say("this adapter is no better than none; train for more steps, or on more data")
    _draw(args.out)
    Workers().close()


def _trainer(args: argparse.Namespace, recipe: Recipe, shape: Any) -> Trainer:
    say("loading the model")
    from kvpacket_rag.backbone import Backbone
    from kvpacket_rag.encode import PacketEncoder
    from kvpacket_rag.hardware import pick_device, pick_dtype
    from kvpacket_rag.models import load_model
    from kvpacket_rag.training.trainer import Trainer, default_teacher
    from kvpacket_rag.training.workers import Workers

    place = pick_device(Workers().device or args.device)
    model, tokenizer = load_model(args.model, place, pick_dtype(args.dtype, place))
    backbone = Backbone(model, tokenizer, args.model)
    encoder = PacketEncoder(backbone, recipe.build(backbone))
    rows, held_out = _mixtures(args, encoder, shape, recipe.seed)
    validation = [held_out.row(number) for number in range(args.validation)]
    teacher = default_teacher(backbone, recipe, args.teacher or args.out / "teacher")
    trained = _warm_start(args, backbone) if args.warm_start else None
    return Trainer(
        backbone,
        rows.row,
        validation,
        recipe,
        args.out,
        rows.describe(),
        teacher,
        warm_start=trained,
        force=args.force,
    )


def _warm_start(args: argparse.Namespace, backbone: Backbone) -> Adapter | dict[str, str]:
    """The adapter to go on from; where its file is gone, what the run that is there began from.

    Raises:
        TrainingError: that which ships is wanted, and there is none.
    """
    from kvpacket_rag.adapter import Adapter
    from kvpacket_rag.shipped import find_adapter
    from kvpacket_rag.training.checkpoint import started_from
    from kvpacket_rag.training.trainer import STATE

    if args.warm_start != "auto":
        if not Path(args.warm_start).exists() and (began := started_from(args.out / STATE)):
            say(f"{args.warm_start} is gone and not needed: the run began from adapter {began['warm_start'][:12]}…")
            return began
        return Adapter.load(args.warm_start)
    found = find_adapter(backbone)
    if found is None:
        raise TrainingError(
            f"no adapter ships for {backbone.name} to go on from; name a file, or leave --warm-start out"
        )
    return found


def _mixtures(args: argparse.Namespace, encoder: Any, shape: Any, seed: int) -> tuple[Mixture, Mixture]:
    """Rows to train on, and rows of held-out samples."""
    from kvpacket_rag.datasets.catalogue import GENERATED, names_apart, open_dataset
    from kvpacket_rag.training.mixture import Domain, Mixture, hold_out

    opened, weights = [], []
    for entry in args.data:
        name, weight = _weighted(entry)
        generated = name.partition(":")[0] in GENERATED
        opened.append((name, open_dataset(name, "train", seed=seed, limit=args.samples if generated else None)))
        weights.append(weight)
    named = zip(names_apart(opened), opened, weights, strict=True)
    train, held_out = hold_out([Domain(name, samples, weight) for name, (_, samples), weight in named], seed=seed)
    return Mixture(encoder, train, shape, seed, args.pool), Mixture(encoder, held_out, shape, seed + 1)


def _follow(trainer: Trainer) -> None:
    from tqdm import tqdm

    drawn = sys.stderr.isatty()
    with tqdm(total=trainer.recipe.steps, initial=trainer.progress.step, disable=not drawn, unit="step") as bar:
        for report in trainer.run():
            bar.update(report.step - bar.n)
            best = f"{trainer.progress.best:.4f}"
            bar.set_postfix_str(f"loss {report.loss:.4f}, validation KL {best}", refresh=False)
            if not report.step:
                say("plain concatenation: KL " + _figures(trainer.progress.plain))
            if report.validation or (not drawn and report.step % _LINE_STEPS == 0):
                say(_line(report))


def _draw(folder: Path) -> None:
    """A picture of the curves beside the log, where matplotlib is installed."""
    from kvpacket_rag.evaluation.plots import plot_training

    try:
        plot_training({folder.name: folder / "log.jsonl"}, folder / "curves.png")
    except MissingExtraError as error:
        say(f"no picture of the curves: {error}")


def _line(report: Report) -> str:
    parts = [f"step {report.step}"]
    if not math.isnan(report.loss):
        parts.append(f"loss {report.loss:.4f}, {duration(report.seconds_left)} left")
    if report.validation:
        parts.append(f"validation KL {_figures(report.validation)}")
    return "; ".join(parts)


def _figures(by_name: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in by_name.items())


def _parse_settings(entries: list[str], *kinds: type) -> dict[type, dict[str, Any]]:
    """``NAME=VALUE`` entries, as keywords of the dataclasses that have such a field.

    Raises:
        TrainingError: none has it, or the value is of another type.
    """
    given: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    known = {field.name: (kind, field) for kind in kinds for field in fields(kind)}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name not in known:
            raise TrainingError(f"there is no setting {name!r}; 'kvpacket train --out DIR --settings' lists them")
        kind, field = known[name]
        given[kind][name] = _typed(value, type(field.default), entry)
    return given


def _typed(value: str, kind: type, entry: str) -> Any:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        if kind is not bool:
            return kind(value)
    except ValueError:
        pass
    raise TrainingError(f"--set {entry}: expected a value of type {kind.__name__}")


def _weighted(entry: str) -> tuple[str, float]:
    """``NAME=WEIGHT`` apart; the weight is 1 where there is none, and a path may hold a ``=`` of its own."""
    name, _, weight = entry.rpartition("=")
    if not name or Path(entry).exists():
        return entry, 1.0
    try:
        return name, float(weight)
    except ValueError:
        raise TrainingError(f"--data {entry}: expected a number behind '='") from None


def _settings(chosen: Any) -> str:
    """Names, values and what they mean, the latter from the docstring."""
    text = inspect.getdoc(type(chosen)) or ""
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", text, re.MULTILINE))
    pairs = [(f"{f.name}={getattr(chosen, f.name)}", " ".join(meanings[f.name].split())) for f in fields(chosen)]
    return facts(pairs)
