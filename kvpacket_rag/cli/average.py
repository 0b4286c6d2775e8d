"""``kvpacket average``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpacket_rag.cli.output import facts, show
from kvpacket_rag.errors import AdapterError

SUMMARY = "average adapters of runs that went on from one another"
DESCRIPTION = (
    "Writes the mean of adapters that were trained one from the other by --warm-start. It is often better than each "
    "of them; measure it with 'kvpacket verify' or 'kvpacket eval'."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which, and where to."""
    parser.add_argument("adapters", metavar="FILE", nargs="+", type=Path, help="files that 'kvpacket train' wrote")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    """Read, average, write."""
    if args.out.exists() and not args.force:
        raise AdapterError(f"{args.out} exists; name another file, or replace it with --force")
    from kvpacket_rag.adapter import Adapter
    from kvpacket_rag.training.average import average

    mean = average([Adapter.load(path) for path in args.adapters])
    mean.save(args.out)
    show(facts([("Adapter", f"the mean of {len(args.adapters)} adapters: {mean.summary}"), ("Written", str(args.out))]))
    return 0
