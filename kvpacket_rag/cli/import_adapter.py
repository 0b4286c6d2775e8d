"""``kvpacket import-adapter``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpacket_rag.cli.output import facts, show
from kvpacket_rag.errors import AdapterError

SUMMARY = "turn a .pt adapter of the KV Packet paper into a safetensors file"
DESCRIPTION = SUMMARY[0].upper() + SUMMARY[1:] + ". Reads tensors and plain values only; no code in the file is run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where to where."""
    parser.add_argument("source", metavar="IN.pt", type=Path)
    parser.add_argument("target", metavar="OUT.safetensors", type=Path)
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> None:
    """Convert."""
    if args.target.exists() and not args.force:
        raise AdapterError(f"{args.target} exists; name another file, or replace it with --force")
    from kvpacket_rag.adapter import import_paper_adapter

    adapter = import_paper_adapter(args.source)
    adapter.save(args.target)
    lengths = f"{adapter.header.shape[0]} header and {adapter.trailer.shape[0]} trailer tokens"
    show(facts([("Adapter", f"{lengths}, hidden size {adapter.hidden_size}"), ("Written", str(args.target))]))
