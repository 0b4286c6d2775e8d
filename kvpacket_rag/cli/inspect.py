"""``kvpacket inspect``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpacket_rag.cli.options import INDEX_FILE, require_index
from kvpacket_rag.cli.output import facts, show, show_json, size
from kvpacket_rag.errors import KVPacketError, PacketCorruptError, StoreError

SUMMARY = "show what an index, a packet or an adapter holds"
DESCRIPTION = "Shows the contents of an index folder, of a packet's file or of an adapter's file. Loads no model."
_SETTINGS = ("model", "dtype", "adapter", "embedder", "chunk_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at."""
    parser.add_argument("path", metavar="PATH", type=Path, help="folder of an index, packet or adapter (.safetensors)")
    parser.add_argument("--documents", action="store_true", help="list the documents of an index, with their chunks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Look."""
    found = _file(args.path) if args.path.is_file() else _index(args.path, args.documents)
    if args.json:
        show_json(found)
        return
    documents = found.pop("documents_listed", {})
    show(facts((name.replace("_", " "), _shown(name, value)) for name, value in found.items()))
    for document_id, chunks in documents.items():
        show(f"{chunks:6,}  {document_id}")


def _index(folder: Path, list_documents: bool) -> dict[str, Any]:
    require_index(folder)
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.store import DiskStore

    index = PacketIndex.open(folder)
    store = DiskStore(folder)
    try:
        packet_ids = {packet_id for _, packet_id in index.rows()}
        found: dict[str, Any] = {
            "kind": "index",
            "documents": len(index.documents()),
            "chunks": len(index),
            "packets": len(store),
            "bytes_of_packets": store.size_bytes,
            "bytes_of_index": (folder / INDEX_FILE).stat().st_size,
            "chunks_without_packet": sum(name not in store for name in packet_ids),
            "packets_set_aside_as_damaged": len(list((folder / "quarantine").glob("*.safetensors"))),
            "dimensions": index.dim,
            **{name: index.get_setting(name) for name in _SETTINGS},
            "signatures": [{**json.loads(text), "packets": count} for text, count in store.signatures().items()],
        }
        if list_documents:
            found["documents_listed"] = {name: len(index.chunk_ids(name)) for name in index.documents()}
        return found
    finally:
        store.close()
        index.close()


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
        return _adapter(path)
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


def _adapter(path: Path) -> dict[str, Any]:
    from kvpacket_rag.adapter import Adapter

    adapter = Adapter.load(path)
    return {
        "kind": "adapter",
        "parts": adapter.summary,
        "header_tokens": adapter.header.shape[0],
        "trailer_tokens": adapter.trailer.shape[0],
        "tokens_added_to_a_packet": adapter.stored_tokens,
        "hidden_size": adapter.hidden_size,
        "digest": adapter.digest,
        "bytes": path.stat().st_size,
        "about": {name: _parsed(text) for name, text in adapter.metadata.items()},
    }


def _parsed(text: str) -> Any:
    """Recipe, data and figures are JSON within the metadata; the rest is text."""
    return json.loads(text) if text.startswith("{") else text


def _shown(name: str, value: Any) -> str:
    """A value for a person; what has parts takes a line for each."""
    if name.startswith("bytes"):
        return size(value)
    if isinstance(value, list):
        return "\n".join(_shown("", entry) for entry in value) or "none"
    if isinstance(value, Mapping) and name == "about":
        return "\n".join(f"{key}: {_shown('', part)}" for key, part in value.items()) or "nothing"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_brief(part)}" for key, part in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value or "none")


def _brief(value: Any) -> str:
    """Digests by their first twelve characters."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
