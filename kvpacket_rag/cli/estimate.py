"""``kvpacket estimate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpacket_rag.cli.options import add_hardware, positive
from kvpacket_rag.cli.output import count, counted, duration, facts, say, show, show_json, size, table
from kvpacket_rag.errors import DocumentError

if TYPE_CHECKING:
    from kvpacket_rag.documents import Document
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.estimate import Estimate

SUMMARY = "say what packets of documents would take and save"
DESCRIPTION = (
    "Cuts documents into chunks, encodes a sample of them, and says what all would take: hours to encode, bytes on "
    "disk in every setting, and the number of questions after which the time has paid. Stores nothing."
)
_DEFAULT_MODEL = "smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Documents, model and how they would be used."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="file or folder")
    parser.add_argument("--chunk-tokens", metavar="N", type=positive, default=256, help="most (default: %(default)s)")
    parser.add_argument(
        "--hits", metavar="N", type=positive, default=4, help="chunks of a question (default: %(default)s)"
    )
    parser.add_argument(
        "--sample", metavar="N", type=positive, default=16, help="chunks to encode (default: %(default)s)"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", default=_DEFAULT_MODEL, help="default: %(default)s")
    model.add_argument("--adapter", metavar="FILE", default="auto", help="'auto' (default), 'none', or a file")
    add_hardware(model)
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object")


def run(args: argparse.Namespace) -> None:
    """Read, cut, measure, tell."""
    documents = _read(args.paths)
    say(f"loading {args.model} (the first time takes longer)")
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.estimate import estimate
    from kvpacket_rag.split import Splitter

    adapter = None if args.adapter == "none" else args.adapter
    engine = KVPacketEngine.load(args.model, adapter=adapter, device=args.device, dtype=args.dtype)
    splitter = Splitter(engine.count_tokens)
    chunks = [chunk.text for document in documents for chunk in splitter.split(document, args.chunk_tokens)]
    say(f"measuring on a sample of {count(min(args.sample, len(chunks)), 'chunk')}")
    found = estimate(engine, chunks, args.hits, args.sample)
    if args.json:
        show_json({"model": args.model, "documents": len(documents), **found.to_dict()})
    else:
        show(_report(args, engine, found, len(documents)))


def _read(paths: Sequence[str]) -> list[Document]:
    """The documents below the paths.

    Raises:
        DocumentError: there are none. Found out before a model is loaded.
    """
    from kvpacket_rag.documents import read_documents

    def skip(path: Path, reason: str) -> None:
        say(f"skipped {path}: {reason}")

    documents = list(counted(read_documents(paths, skip), "documents"))
    if not documents:
        raise DocumentError(f"no document can be read from {', '.join(paths)}")
    return documents


def _report(args: argparse.Namespace, engine: KVPacketEngine, found: Estimate, documents: int) -> str:
    from kvpacket_rag.bench.clock import describe

    questions = found.break_even_questions
    pays = "never: prompts of this size are read faster than packets are loaded"
    if questions is not None:
        pays = f"after {count(max(1, round(questions)), 'question')}"
    rate = f"{found.tokens_per_second:,.0f} tokens/s, measured on {count(found.sample_chunks, 'chunk')}"
    times = (
        f"{1000 * found.packet_seconds:,.0f} ms from packets, {1000 * found.prefill_seconds:,.0f} ms by full prefill"
    )
    about = [
        ("Model", f"{args.model}, {describe(engine.backbone.dtype, engine.backbone.device)}"),
        ("Documents", f"{documents:,}"),
        ("Chunks", f"{found.chunks:,} of at most {args.chunk_tokens} tokens"),
        ("Tokens", f"{found.tokens:,}"),
        ("Encoding", f"{duration(found.encode_seconds)} ({rate})"),
        ("First token", f"{times}, {count(found.hits, 'chunk')} a question"),
        ("Pays", pays),
    ]
    return f"{facts(about)}\n\nBytes on disk\n{_sizes(found)}"


def _sizes(found: Estimate) -> str:
    removed = list(dict.fromkeys(entry.removed for entry in found.sizes))
    schemes = list(dict.fromkeys(entry.quantize for entry in found.sizes))
    header = ["--quantize", *(f"{share:.0%} removed" if share else "all tokens" for share in removed), "bytes a token"]
    lines = []
    for scheme in schemes:
        entries = [entry for entry in found.sizes if entry.quantize == scheme]
        lines.append([scheme, *(size(entry.num_bytes) for entry in entries), f"{entries[0].bytes_per_token:,.0f}"])
    if schemes == ["none"]:
        say("other ways to store them need compressed-tensors; pip install 'kvpacket-rag[compress]'")
    return table(header, lines)
