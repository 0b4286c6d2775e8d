"""From constructor arguments to an engine: loaded by name, or handed over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpacket_rag import KVPacketEngine, KVPacketError

DEFAULT_MODEL = "smollm2-135m-instruct"
# What only matters while an engine is loaded, and what it is if nothing is said.
_LOADING = {"store": None, "adapter": None, "device_map": "auto", "dtype": "auto", "min_match_tokens": 16}


def load(model_name: str, fields: Mapping[str, Any]) -> KVPacketEngine:
    """The engine that a class's fields describe."""
    device = fields.get("device_map") or "auto"
    if not isinstance(device, str):
        raise KVPacketError(f"device_map is {device!r}; packets need the model on one device, such as 'cuda' or 'cpu'")
    dtype = str(fields.get("dtype") or "auto").removeprefix("torch.")
    return KVPacketEngine.load(
        model_name,
        store=fields.get("store"),
        adapter=fields.get("adapter"),
        device=device,
        dtype=dtype,
        min_match_tokens=fields.get("min_match_tokens", _LOADING["min_match_tokens"]),
    )


def as_text(value: Any) -> str | None:
    """A path as text; None for objects, which cannot be loaded again from a field."""
    return str(value) if isinstance(value, str | Path) else None


def is_reloadable(fields: Mapping[str, Any]) -> bool:
    """Whether another process can load the same engine from text alone."""
    return all(fields.get(name) is None or as_text(fields[name]) is not None for name in ("store", "adapter"))


def require_no_loading(engine: KVPacketEngine, model_name: str | None, fields: Mapping[str, Any]) -> None:
    """Refuse to be told how to load an engine that is loaded already.

    Raises:
        KVPacketError: naming what is too much.
    """
    given = [name for name, default in _LOADING.items() if fields.get(name, default) not in (None, default)]
    if model_name not in (None, engine.model_name):
        given.append(f"model_name={model_name!r}")
    if given:
        raise KVPacketError(
            f"got an engine, which has loaded {engine.model_name!r}, and {', '.join(given)} besides; leave out either"
        )


def window(engine: KVPacketEngine, asked: int, max_new_tokens: int) -> int:
    """Tokens to plan prompts for: what was asked, or the model's own.

    Raises:
        KVPacketError: the model has fewer, or the answer alone would fill it.
    """
    size = asked or engine.context_window
    if not max_new_tokens < size <= engine.context_window:
        raise KVPacketError(
            f"context_window is {size} and max_new_tokens {max_new_tokens}; expected less for the answer than for "
            f"the window, and a window of at most {engine.context_window}, which is what {engine.model_name} has"
        )
    return size
