"""Options that several commands share, and the index opened as they say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.cli.output import say
from kvpacket_rag.errors import StoreError

if TYPE_CHECKING:
    from kvpacket_rag.pipeline import KVPacketRAG
    from kvpacket_rag.progress import OnProgress

INDEX_FILE = "index.sqlite"


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def add_index(parser: argparse.ArgumentParser) -> None:
    """``--index``, without which the command knows no folder."""
    parser.add_argument("--index", metavar="DIR", type=Path, required=True, help="folder of the index")


def add_engine(parser: argparse._ActionsContainer) -> None:
    """Model, adapter, device and dtype."""
    parser.add_argument("--model", metavar="NAME", help="short name, folder or hub name (default: that of the index)")
    parser.add_argument(
        "--adapter",
        metavar="FILE",
        help="a trained adapter, 'auto' for the one that ships for the model, or 'none' (default: that of the index, "
        "'auto' for a new one)",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or mps (default: the best there is)")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: that of the index)")


def add_hardware(parser: argparse._ActionsContainer) -> None:
    """Device and dtype of a command that knows no index."""
    parser.add_argument(
        "--device", metavar="NAME", default="auto", help="cpu, cuda or mps (default: the best there is)"
    )
    parser.add_argument(
        "--dtype", metavar="NAME", default="auto", help="of the model: float32, bfloat16 or float16 (default: as fits)"
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as :meth:`KVPacketRAG.open` takes it; the rest is left to the index."""
    given = {name: getattr(args, name, None) for name in ("model", "adapter", "device", "dtype")}
    options = {name: value for name, value in given.items() if value is not None}
    if options.get("adapter") == "none":
        options["adapter"] = None
    return options


def require_index(folder: Path) -> None:
    """Refuse a folder without an index, instead of starting one there.

    Raises:
        StoreError: there is none.
    """
    if not (folder / INDEX_FILE).is_file():
        raise StoreError(f"{folder} holds no index; make one with 'kvpacket ingest PATH --index {folder}'")


def open_index(
    args: argparse.Namespace, folder: Path, progress: OnProgress | None = None, **options: Any
) -> KVPacketRAG:
    """The index with its model loaded; says so, for it takes seconds."""
    say("loading the model (the first time takes longer)")
    from kvpacket_rag.pipeline import KVPacketRAG

    return KVPacketRAG.open(folder, progress=progress, **(engine_options(args) | options))
