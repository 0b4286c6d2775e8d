"""What an adapter's file says of itself, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def adapter_facts(path: Path) -> dict[str, Any]:
    """Parts, sizes and origin of an adapter, by name.

    Raises:
        AdapterError: the file is none.
    """
    from kvpacket_rag.adapter import Adapter

    adapter = Adapter.load(path)
    return {
        "kind": "adapter",
        "file": str(path),
        "parts": adapter.summary,
        "header_tokens": adapter.header.shape[0],
        "trailer_tokens": adapter.trailer.shape[0],
        "tokens_added_to_a_packet": adapter.stored_tokens,
        "hidden_size": adapter.hidden_size,
        "digest": adapter.digest,
        "bytes": path.stat().st_size,
        "about": origin_of(adapter.metadata),
    }


def origin_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """An adapter's metadata with the JSON in it as values: recipe, data and figures, its ancestors' among them."""
    return {name: _parsed(text) for name, text in metadata.items()}


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return {name: _parsed(part) for name, part in value.items()} if isinstance(value, dict) else value


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Rows of a name and plain text: what has parts with parts of their own takes a row for each."""
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        for entry in value:
            yield from flat(name, entry)
    elif isinstance(value, Mapping) and any(isinstance(part, Mapping | list) for part in value.values()):
        for key, part in value.items():
            yield from flat(f"{name} {key}", part)
    elif isinstance(value, Mapping):
        yield name, ", ".join(f"{key} {brief(part)}" for key, part in value.items()) or "nothing"
    else:
        yield name, brief(value)


def brief(value: Any) -> str:
    """A value in few characters: digests by their first twelve, other numbers than whole ones to four places."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text
