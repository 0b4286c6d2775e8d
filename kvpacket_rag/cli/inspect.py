"""``kvpacket inspect``."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpacket_rag.cli.adapter_facts import adapter_facts, brief, flat
from kvpacket_rag.cli.options import ADAPTER_FILE, INDEX_FILE, RUN_LOG, require_index
from kvpacket_rag.cli.output import facts, show, show_json, size
from kvpacket_rag.errors import KVPacketError, PacketCorruptError, StoreError

SUMMARY = "show what an index, a packet or an adapter holds"
DESCRIPTION = (
    "Shows the contents of an index folder, of a packet's file, or of an adapter: its file, or the folder of the run "
    "that trained it. Loads no model."
)
_COLUMNS = 100
_SETTINGS = ("model", "dtype", "adapter", "embedder", "chunk_tokens", "remote")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at."""
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="folder of an index or of a training run, or the .safetensors file of a packet or an adapter",
    )
    parser.add_argument("--documents", action="store_true", help="list the documents of an index, with their chunks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Look."""
    found = _file(args.path) if args.path.is_file() else _folder(args.path, args.documents)
    if args.json:
        show_json(found)
        return
    documents = found.pop("documents_listed", {})
    rows = [row for name, value in found.items() for row in _rows(name, value)]
    width = max(len(name) for name, _ in rows) + 2
    wrap = textwrap.TextWrapper(_COLUMNS, subsequent_indent=" " * width, break_long_words=False, break_on_hyphens=False)
    show(facts((name, wrap.fill(text)) for name, text in rows))
    for document_id, chunks in documents.items():
        show(f"{chunks:6,}  {document_id}")


def _folder(folder: Path, list_documents: bool) -> dict[str, Any]:
    """An index, or the adapter of a training run.

    Raises:
        StoreError: it is neither.
    """
    if (folder / INDEX_FILE).is_file() or not (folder / RUN_LOG).is_file():
        return _index(folder, list_documents)
    adapter = folder / ADAPTER_FILE
    if not adapter.is_file():
        raise StoreError(
            f"{folder} is the folder of a training run that has no adapter yet; let 'kvpacket train' go on"
        )
    return adapter_facts(adapter)


def _index(folder: Path, list_documents: bool) -> dict[str, Any]:
    require_index(folder)
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.store import DiskStore

    index = PacketIndex.open(folder)
    store = DiskStore(folder, sweep=False)
    try:
        state = store.state()
        packet_ids = {packet_id for _, packet_id in index.rows()}
        found: dict[str, Any] = {
            "kind": "index",
            "documents": len(index.documents()),
            "chunks": len(index),
            "packets": len(store),
            "bytes_by_tier": {name: tier.size_bytes for name, tier in store.tiers.items()},
            "bytes_of_packets_in_quarantine": _bytes_in(folder / "quarantine"),
            "bytes_of_index": _bytes_of(folder / INDEX_FILE),
            "bytes_of_catalogue": _bytes_of(folder / "packets.sqlite"),
            "bytes_free_on_disk": shutil.disk_usage(folder).free,
            "packets_evicted": state.evicted,
            "chunks_without_packet": sum(name not in store for name in packet_ids),
            "packets_set_aside_as_damaged": state.quarantined,
            "files_without_row": state.disorder.orphans + state.disorder.quarantined_orphans + state.disorder.strays,
            "rows_without_file": state.disorder.missing,
            "last_sweep": _moment(state.last_sweep),
            "namespaces": _namespaces(folder),
            "dimensions": index.dim,
            **{name: index.get_setting(name) for name in _SETTINGS},
            "signatures": [_signature(text) | {"packets": count} for text, count in store.signatures().items()],
        }
        if list_documents:
            found["documents_listed"] = {name: len(index.chunk_ids(name)) for name in index.documents()}
        return found
    finally:
        store.close()
        index.close()


def _signature(text: Any) -> dict[str, Any]:
    """The fields of a signature, or what stands in its place."""
    try:
        fields = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else {"damaged": str(text)[:80]}


def _bytes_of(path: Path) -> int:
    """Of a database, with the log beside it."""
    return sum(found.stat().st_size for found in (path, Path(f"{path}-wal")) if found.is_file())


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _moment(seconds: int | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _namespaces(folder: Path) -> int:
    return sum((path / INDEX_FILE).is_file() for path in (folder / "namespaces").glob("*"))


def _file(path: Path) -> dict[str, Any]:
    """A packet or an adapter.

    Raises:
        StoreError: it is neither.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{path} is no safetensors file ({error}); name an index folder, a packet or an adapter"
        ) from error
    if {"packet_id", "signature"} <= about.keys():
        return _packet(path, about, shapes)
    if {"header", "trailer"} <= shapes.keys():
        return adapter_facts(path)
    raise StoreError(f"{path} holds neither a packet nor an adapter; 'kvpacket ingest' makes packets")


def _packet(path: Path, about: Mapping[str, str], shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    from kvpacket_rag.packet import PacketSignature
    from kvpacket_rag.store.packet_file import read_packet

    signature = PacketSignature.from_json(about["signature"])
    try:
        read_packet(path, about["packet_id"], signature, verify=True)
        damage = "" if path.stem == about["packet_id"] else "whole, but its file should be named after the packet"
    except (PacketCorruptError, KVPacketError) as error:
        damage = str(error)
    return {
        "kind": "packet",
        "packet_id": about["packet_id"],
        "verified": not damage,
        **({"damage": damage} if damage else {}),
        "tokens": int(about["num_tokens"]),
        "span": int(about["span"]),
        "tensors": shapes,
        "bytes": path.stat().st_size,
        "signature": asdict(signature),
    }


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A fact for a person; what has parts takes a row for each."""
    name = name.replace("_", " ")
    if name == "about":
        for key, part in value.items():
            yield from flat(key.replace("_", " "), part)
    elif name.startswith("bytes") and isinstance(value, Mapping):
        yield name, ", ".join(f"{tier} {size(amount)}" for tier, amount in value.items())
    elif name.startswith("bytes"):
        yield name, size(value)
    elif isinstance(value, list):
        yield from ((name, _shown(entry)) for entry in value or ["none"])
    else:
        yield name, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {brief(part)}" for key, part in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value or "none")
