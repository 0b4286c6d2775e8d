"""``kvpacket eval``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpacket_rag.cli.eval_about import about
from kvpacket_rag.cli.options import add_hardware, positive
from kvpacket_rag.cli.output import ProgressLine, count, facts, say, show, table
from kvpacket_rag.errors import (
    AdapterError,
    ContextTooLongError,
    DatasetError,
    MissingExtraError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from kvpacket_rag.datasets import QASample
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.evaluation.questions import PromptSettings
    from kvpacket_rag.evaluation.records import Record
    from kvpacket_rag.evaluation.results import Row
    from kvpacket_rag.evaluation.run import Variant

SUMMARY = "measure packets beside full prefill and other methods"
DESCRIPTION = (
    "Measures methods on data sets: answers, distance from full prefill, time, work and memory, each with its 95 % "
    "interval. Writes results.json, results.md and pictures. Stopped at any time, the same command goes on from there."
)
_DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_METHODS = ("full", "packet", "plain", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Data, methods, prompts and model."""
    parser.add_argument(
        "--data",
        metavar="FILE_OR_NAME",
        nargs="+",
        required=True,
        help=".jsonl files, folders with dev.jsonl, or names: niah and biography are generated, niah:FOLDER hides "
        "needles in texts of yours, hotpotqa, musique and others come from the hub",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of records, tables and pictures")
    parser.add_argument(
        "--methods",
        metavar="LIST",
        type=_names,
        help="any of full, prefix, packet, plain, none, legolink-0, epic-N, random-R, cacheblend-R, a3-R, sam-kv, "
        "sam-kv-large, and packet@SIZE, plain@SIZE, single@SIZE with a press, a way to quantise or both, such as "
        f"packet@reread-0.3+k8v4; separated by commas (default: {','.join(_DEFAULT_METHODS)})",
    )
    parser.add_argument("--limit", metavar="N", type=positive, help="the first N questions of each data set")
    parser.add_argument("--split", choices=("train", "dev"), default="dev", help="default: %(default)s")
    parser.add_argument(
        "--seed",
        metavar="S",
        type=int,
        nargs="+",
        default=[0],
        help="of chunks, order and intervals (default: 0); several ask again",
    )
    _add_prompts(parser.add_argument_group("prompts"))
    _add_model(parser.add_argument_group("model"))


def _add_prompts(prompt: argparse._ArgumentGroup) -> None:
    prompt.add_argument(
        "--max-chunks", type=positive, default=10, metavar="N", help="most chunks of a prompt (default: %(default)s)"
    )
    prompt.add_argument(
        "--chunk-tokens", type=positive, default=256, metavar="N", help="cut chunks to N tokens (default: %(default)s)"
    )
    prompt.add_argument(
        "--max-new-tokens", type=positive, default=32, metavar="N", help="of an answer, at most (default: %(default)s)"
    )
    prompt.add_argument(
        "--style",
        default="pipeline",
        metavar="NAME",
        help="layout of the prompt; a wrong name lists all (default: %(default)s)",
    )
    prompt.add_argument(
        "--gold-positions",
        metavar="P",
        type=_place,
        nargs="+",
        default=[],
        help="put the first supporting chunk at place P, counted from 0; one prompt for each P (default: anywhere)",
    )


def _add_model(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--model", metavar="NAME", default=_DEFAULT_MODEL, help="short name, folder or hub name (default: %(default)s)"
    )
    model.add_argument(
        "--adapter", metavar="FILE", default="auto", help="its file, 'none', or 'auto' for the one that ships (default)"
    )
    model.add_argument(
        "--adapters",
        metavar="NAME=FILE",
        type=_named_file,
        nargs="+",
        default=[],
        help="further adapters, each a method packet:NAME, and a table of them against the data sets",
    )
    add_hardware(model)


def run(args: argparse.Namespace) -> None:
    """Measure, sum up, draw."""
    from kvpacket_rag.evaluation.records import RecordFile
    from kvpacket_rag.evaluation.results import summarise
    from kvpacket_rag.evaluation.run import Evaluation
    from kvpacket_rag.evaluation.tables import write_results

    settings = _settings(args)
    sets = {setting.seed: _open_sets(args, setting.seed) for setting in settings}
    engine = _load(args)
    _warn_of_training_data(args, engine)
    evaluation = Evaluation(engine.backbone, _variants(args, engine), RecordFile(args.out / "records.jsonl"))
    records: list[Record] = []
    skipped: dict[str, str] = {}
    short = 0
    line = ProgressLine()
    for setting in settings:
        for data, samples in sets[setting.seed].items():
            found = evaluation.run(data, samples, setting, line)
            records += found.records
            short += found.short_documents
            seed = f", seed {setting.seed}" if len(settings) > 1 else ""
            skipped |= {f"{data} {name}{seed}": reason for name, reason in found.skipped.items()}
    line.end()
    if not records:
        raise DatasetError(f"nothing was measured: {next(iter(skipped.values()), 'no question fits the settings')}")
    rows = summarise(records, args.seed[0])
    write_results(rows, args.out, about(args, engine, skipped, short))
    show(_summary(rows))
    for name, reason in skipped.items():
        say(f"left out {name}: {reason}")
    if short:
        say(f"{count(short, 'document')} too short for a packet were read as text by every method but 'none'")
    pictures = _draw(args.out, rows)
    if not engine.encoder.adapter.is_empty:
        pictures += _draw_attention(args.out, engine, next(iter(sets.values())), settings[0])
    show("\n" + facts([("Written", str(args.out / "results.md")), *(("Drawn", str(path)) for path in pictures)]))


def _settings(args: argparse.Namespace) -> list[PromptSettings]:
    """One for each seed."""
    from kvpacket_rag.evaluation.questions import PromptSettings

    return [
        PromptSettings(
            max_chunks=args.max_chunks,
            chunk_tokens=args.chunk_tokens,
            max_new_tokens=args.max_new_tokens,
            style=args.style,
            seed=seed,
            gold_positions=tuple(dict.fromkeys(args.gold_positions)),
        )
        for seed in dict.fromkeys(args.seed)
    ]


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _place(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _named_file(text: str) -> tuple[str, Path]:
    name, _, file = text.partition("=")
    if not name or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=FILE")
    return name, Path(file)


def _open_sets(args: argparse.Namespace, seed: int) -> dict[str, list[QASample]]:
    """Samples by the name of their data set; where two would have one name, what was typed is the name."""
    from kvpacket_rag.datasets.catalogue import names_apart, open_dataset

    typed = dict.fromkeys(args.data)
    opened = [(name, open_dataset(name, args.split, seed=seed, limit=args.limit)) for name in typed]
    return {name: samples for name, (_, samples) in zip(names_apart(opened), opened, strict=True)}


def _load(args: argparse.Namespace) -> KVPacketEngine:
    say(f"loading {args.model} (the first time takes longer)")
    from kvpacket_rag.engine import KVPacketEngine

    adapter = None if args.adapter == "none" else args.adapter
    return KVPacketEngine.load(args.model, adapter=adapter, device=args.device, dtype=args.dtype)


def _warn_of_training_data(args: argparse.Namespace, engine: KVPacketEngine) -> None:
    from kvpacket_rag.datasets import open_dataset
    from kvpacket_rag.training.mixture import was_trained_on

    for name in args.data:
        if name.endswith(".jsonl") and was_trained_on(engine.encoder.adapter.metadata, open_dataset(name)):
            say(f"the adapter was trained on {name}, so figures on it say little; measure on other data")


def _variants(args: argparse.Namespace, engine: KVPacketEngine) -> list[Variant]:
    """The methods that were asked for, and one for every further adapter."""
    from kvpacket_rag.adapter import Adapter
    from kvpacket_rag.evaluation.cross_domain import adapter_variants
    from kvpacket_rag.evaluation.run import Variant
    from kvpacket_rag.shipped import check_adapter

    own = None if engine.encoder.adapter.is_empty else engine.encoder.adapter
    methods = args.methods or _DEFAULT_METHODS
    further = {name: Adapter.load(file) for name, file in args.adapters}
    if len(further) < len(args.adapters):
        raise AdapterError("two of --adapters have one name; give each its own")
    for adapter in further.values():
        check_adapter(adapter, engine.backbone)
    return [*(Variant(name, name, own) for name in methods), *adapter_variants(further)]


def _summary(rows: Sequence[Row]) -> str:
    header = ["data", "method", "n", "F1", "contains", "KL", "recovered gap", "first token, ms"]
    figures = (("f1", 3, 1), ("contains", 3, 1), ("kl", 4, 1), ("recovered_gap", 2, 1), ("ttft_seconds", 1, 1000))
    lines = [
        [row["data"], row["method"], str(row["n"]), *(_figure(row, *figure) for figure in figures)] for row in rows
    ]
    no_gap = any(row["recovered_gap"] is None for row in rows)
    return table(header, lines) + (
        "\n–: a gap can only be told where 'plain' was measured and differs from full prefill" if no_gap else ""
    )


def _figure(row: Row, name: str, digits: int, scale: int) -> str:
    return "–" if row[name] is None else f"{scale * row[name]:.{digits}f}"


def _draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw what the rows allow, and say so where matplotlib is missing; the pictures drawn."""
    from kvpacket_rag.evaluation.cross_domain import cross_domain
    from kvpacket_rag.evaluation.plots import plot_f1_against_ttft, plot_heat_map, plot_kl_against_recompute_ratio

    drawn = [folder / "f1_ttft.png", folder / "kl_recompute.png", folder / "cross_domain.png"]
    try:
        plot_f1_against_ttft(rows, drawn[0])
        plot_kl_against_recompute_ratio(rows, drawn[1])
        if not (across := cross_domain(rows)):
            return drawn[:2]
        plot_heat_map(across, drawn[2])
    except MissingExtraError as error:
        say(str(error))
        return []
    return drawn


def _draw_attention(
    folder: Path, engine: KVPacketEngine, sets: Mapping[str, Sequence[QASample]], settings: PromptSettings
) -> list[Path]:
    """Draw where the first question looks; nothing where the model does not show it."""
    from kvpacket_rag.evaluation.attention import draw_attention
    from kvpacket_rag.evaluation.questions import make_questions

    questions = make_questions(engine.backbone, [samples[0] for samples in sets.values()], settings)
    path = folder / "attention.png"
    try:
        draw_attention(engine.backbone, next(questions).case, engine.encoder.adapter, path)
    except (MissingExtraError, UnsupportedModelError, ContextTooLongError, StopIteration):
        return []
    return [path]
