"""Options that several commands share, and the index opened as they say."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.cli.output import say
from kvpacket_rag.errors import PacketError, StoreError

if TYPE_CHECKING:
    from kvpacket_rag.pipeline import KVPacketRAG
    from kvpacket_rag.progress import OnProgress

INDEX_FILE = "index.sqlite"
_ENGINE_OPTIONS = ("model", "adapter", "embedder", "device", "dtype", "compress", "quantize", "remote", "cache_bytes")
ADAPTER_FILE = "adapter.safetensors"  # of an index, and of a training run
RUN_LOG = "log.jsonl"  # of a training run


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
        help="file of a trained adapter, 'auto' or 'none'. 'auto', the default, is the adapter an index was made with; "
        "for a new index, and with --reencode, the one that ships for the model",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or mps (default: the best there is)")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: that of the index)")


def add_reduction(parser: argparse._ActionsContainer) -> None:
    """``--compress`` and ``--quantize``, of commands that make packets."""
    parser.add_argument(
        "--compress",
        metavar="PRESS:RATIO",
        type=press_and_ratio,
        help="leave this share of every packet's tokens out, such as reread:0.3; needs kvpress but for random, "
        "reread, keydiff and mixkv (default: that of the index, 'none' for a new one)",
    )
    parser.add_argument(
        "--quantize",
        choices=("none", "int8", "k8v4", "int4"),
        help="store packets in fewer bits: about 0.53, 0.40 or 0.31 of 16-bit ones (default: that of the index, 'none' "
        "for a new one)",
    )


def press_and_ratio(text: str) -> str:
    """An argument that says how to compress, or ``"none"``."""
    from kvpacket_rag.compress.compression import Compression

    try:
        return text if text == "none" else str(Compression.parse(text))
    except PacketError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_embedder(parser: argparse._ActionsContainer) -> None:
    """``--embedder``, of commands that search or fill an index."""
    parser.add_argument(
        "--embedder",
        metavar="NAME",
        help="embedding model; needed where another framework filled the index (default: that of the index, "
        "all-MiniLM-L6-v2 for a new one)",
    )


def add_remote(parser: argparse._ActionsContainer) -> None:
    """``--remote`` and ``--cache-bytes``, of commands that may keep packets in an object store."""
    parser.add_argument(
        "--remote",
        metavar="URL",
        help="keep packets in an object store, such as s3://bucket/packets, and in the index those used last; needs "
        "obstore. Packets that lie in the index alone are uploaded; 'none' keeps them there, and has the index forget "
        "a URL to which they were never uploaded (default: that of the index, 'none' for a new one)",
    )
    parser.add_argument(
        "--cache-bytes", metavar="N", type=positive, help="cap on the packets that lie in the index (default: none)"
    )


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
    given = {name: getattr(args, name, None) for name in _ENGINE_OPTIONS}
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
        if (folder / RUN_LOG).is_file():
            raise StoreError(f"{folder} is the folder of a training run, not of an index; name an index")
        raise StoreError(f"{folder} holds no index; make one with 'kvpacket ingest PATH --index {folder}'")


def open_index(
    args: argparse.Namespace, folder: Path, progress: OnProgress | None = None, **options: Any
) -> KVPacketRAG:
    """The index with its model loaded; says so, for it takes seconds."""
    say("loading the model (the first time takes longer)")
    from kvpacket_rag.pipeline import KVPacketRAG

    return KVPacketRAG.open(folder, progress=progress, **(engine_options(args) | options))
