"""``kvpacket ingest``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.cli.options import (
    add_embedder,
    add_engine,
    add_index,
    add_reduction,
    add_remote,
    open_index,
    positive,
)
from kvpacket_rag.cli.output import Bar, count, counted, duration, facts, say, show, size
from kvpacket_rag.errors import DocumentError, KVPacketError

if TYPE_CHECKING:
    from kvpacket_rag.documents import Document
    from kvpacket_rag.ingest_ray import RayWorkers
    from kvpacket_rag.pipeline import KVPacketRAG
    from kvpacket_rag.progress import IngestReport

SUMMARY = "put documents into an index: cut, encode, embed"
DESCRIPTION = (
    "Reads .txt, .md, .html and .pdf files, and folders of them. What is stored already is not encoded again, so "
    "an interrupted run is taken up by running the same command again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths, index, and how to build it."""
    parser.add_argument("paths", metavar="PATH", nargs="*", help="file or folder")
    add_index(parser)
    parser.add_argument(
        "--chunk-tokens", metavar="N", type=positive, help="most tokens of a chunk (default: that of the index, or 256)"
    )
    parser.add_argument("--delete-missing", action="store_true", help="delete documents below PATH whose file is gone")
    add_remote(parser)
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="what makes the packets: this process, or Ray workers on this machine or the cluster of RAY_ADDRESS",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=positive,
        help="Ray workers, each with a model of its own (default: one a GPU, or else one a machine)",
    )
    model = parser.add_argument_group("model")
    add_engine(model)
    add_embedder(model)
    add_reduction(model)
    model.add_argument(
        "--reencode",
        action="store_true",
        help="make all packets of the index anew where they are not of the model, adapter and dtype asked for",
    )


def run(args: argparse.Namespace) -> None:
    """Ingest."""
    if not args.paths and not args.reencode:
        args.usage("name a file or folder to ingest (none is needed with --reencode only)")
    workers = _workers(args)
    skips = _Skips(args.index)
    documents = _read(args, skips)
    with Bar() as bar, open_index(args, args.index, bar, **_options(args)) as rag:
        try:
            report = rag.add(counted(documents, "documents"), bar, workers)
        except (KeyboardInterrupt, KVPacketError):
            say(
                f"kept: {count(len(rag.index.documents()), 'document')} in the index and "
                f"{count(len(rag.engine.store), 'packet')}; run the same command again to go on from there"
            )
            raise
        for document_id, reason in report.skipped.items():
            skips(Path(document_id), reason)
        skips.tell_kept(set(rag.index.documents()))
        _tell_missing(rag, args)
        show(_summary(report, len(skips.paths), rag, args))


def _workers(args: argparse.Namespace) -> RayWorkers | None:
    if args.engine == "local":
        if args.workers:
            args.usage("--workers needs --engine ray")
        return None
    from kvpacket_rag.ingest_ray import RayWorkers

    return RayWorkers(args.workers)


def _read(args: argparse.Namespace, skips: _Skips) -> Iterable[Document]:
    """The documents below the paths.

    Raises:
        DocumentError: there are none. Found out before a model is loaded.
    """
    if not args.paths:
        return []
    from kvpacket_rag.documents import read_documents

    documents = read_documents(args.paths, skips, exclude=[args.index])
    first = next(documents, None)
    if first is None:
        raise DocumentError(f"no document can be read from {', '.join(args.paths)}")
    return chain([first], documents)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    if args.chunk_tokens is not None and args.chunk_tokens < MIN_MATCH_TOKENS:
        say(f"chunks under {MIN_MATCH_TOKENS} tokens are read as text in every prompt, so their packets are not used")
    return {"chunk_tokens": args.chunk_tokens, "reencode": args.reencode}


class _Skips:
    """Says which files are left out, and why."""

    def __init__(self, index: Path) -> None:
        self._index = os.path.realpath(index)
        self.paths: list[Path] = []

    def __call__(self, path: Path, reason: str) -> None:
        if os.path.realpath(path) != self._index:  # the index among its documents is nobody's mistake
            self.paths.append(path)
            say(f"skipped {path}: {reason}")

    def tell_kept(self, document_ids: set[str]) -> None:
        """Which of them are in the index as they were when they could be read."""
        for path in self.paths:
            if (document_id := Path(os.path.realpath(path)).as_posix()) in document_ids:
                say(f"kept {path} as it was read before; 'kvpacket delete {document_id}' removes it")


def _summary(report: IngestReport, skipped: int, rag: KVPacketRAG, args: argparse.Namespace) -> str:
    lines = []
    if args.reencode:
        again = rag.reencoded
        lines.append(("Encoded again", encoded(again) if again else "nothing: all packets are of these already"))
    if args.paths:
        told = (
            f"{report.added:,} added, {report.updated:,} updated, {report.unchanged:,} unchanged, {skipped:,} skipped"
        )
        chunks = f"{report.chunks:,} of at most {rag.chunk_tokens} tokens"
        lines += [("Documents", told), ("Chunks", chunks), ("Encoded", encoded(report))]
    return facts([*lines, ("Index", contents(rag))])


def encoded(report: IngestReport) -> str:
    """What had to be encoded, in one line."""
    if not report.packets_encoded:
        return "nothing: 0 packets encoded, all that is needed was stored"
    rate = report.tokens_encoded / report.seconds
    return (
        f"{count(report.packets_encoded, 'packet')}, {count(report.tokens_encoded, 'token')} in "
        f"{duration(report.seconds)} ({rate:,.0f} tokens/s)"
    )


def contents(rag: KVPacketRAG) -> str:
    """What an index holds, in one line."""
    return (
        f"{count(len(rag.index.documents()), 'document')}, {count(len(rag.index), 'chunk')}, "
        f"{count(len(rag.engine.store), 'packet')}, {size(rag.engine.store.size_bytes)}"
    )


def _tell_missing(rag: KVPacketRAG, args: argparse.Namespace) -> None:
    """Documents below the paths whose file is gone: deleted if that was asked for, else only named."""
    gone = list(missing(rag.index.documents(), args.paths))
    for document_id in gone:
        if args.delete_missing:
            rag.delete(document_id)
            show(f"deleted {document_id}: its file is gone")
        else:
            say(f"kept {document_id}, whose file is gone")
    if gone and not args.delete_missing:
        say(f"--delete-missing removes {count(len(gone), 'such document')} from the index")


def missing(document_ids: Iterable[str], paths: Iterable[str]) -> Iterator[str]:
    """Those of the documents that lay below the paths and are no longer there."""
    roots = [Path(os.path.realpath(path)) for path in paths]
    for document_id in document_ids:
        path = Path(document_id)
        if path.is_absolute() and not path.exists() and any(root in path.parents for root in roots):
            yield document_id
