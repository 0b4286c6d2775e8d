"""``kvpacket bench``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvpacket_rag.cli.options import add_hardware, positive
from kvpacket_rag.cli.output import say, show

SUMMARY = "measure speed, memory and the cost of small packets on this machine"
DESCRIPTION = (
    "Measures the first token from packets beside the question alone and full prefill, realignment beside a memory "
    "copy, ingest beside bare prefill, decoding beside a plain loop of transformers, what a request holds in memory, "
    "and what packets in fewer bits or with fewer tokens cost. Each ratio is of two things measured in turns in this "
    "run. All parts take several minutes on a CPU; one that cannot be measured is passed over, unless --parts names it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, on what, and how often."""
    parser.add_argument(
        "--model", metavar="NAME", default="smollm2-135m-instruct", help="short name, folder or hub name"
    )
    add_hardware(parser)
    parser.add_argument(
        "--parts", metavar="NAME,…", default="", help="only these (default: all; a wrong name lists them)"
    )
    parser.add_argument("--chunks", metavar="N", type=positive, default=8, help="of 512 tokens (default: 8)")
    parser.add_argument("--repeats", metavar="N", type=positive, default=7, help="of each side (default: 7)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there, as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print, part by part."""
    from kvpacket_rag.bench.run import BenchOptions, run_bench
    from kvpacket_rag.engine import KVPacketEngine

    parts = tuple(part for part in args.parts.split(",") if part)
    options = BenchOptions(parts, args.chunks, args.repeats)
    say("loading the model")
    found: dict[str, float | str] = {}
    for name, figures in run_bench(
        lambda folder: KVPacketEngine.load(args.model, store=folder, device=args.device, dtype=args.dtype), options
    ):
        say(f"measured: {name}")
        for key, value in figures.items():
            show(f"{key:32} {value:.4g}" if isinstance(value, float) else f"{key:32} {value}")
        found |= figures
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0
