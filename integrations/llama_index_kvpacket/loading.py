"""From constructor arguments to an engine: loaded by name, around a model that is loaded, or handed over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpacket_rag import Backbone, KVPacketEngine, KVPacketError, PacketStore
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.hardware import pick_device, pick_dtype
from kvpacket_rag.models import load_model, load_tokenizer, resolve_model
from kvpacket_rag.namespace import local_path
from kvpacket_rag.pretrained import passed_on
from kvpacket_rag.store import is_url

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"
# What only matters while an engine is loaded, and what it is if nothing is said.
_LOADING = {
    "store": None,
    "adapter": "auto",
    "device_map": "auto",
    "dtype": "auto",
    "min_match_tokens": MIN_MATCH_TOKENS,
    "tokenizer_name": None,
}
_DTYPE_WORDS = ("dtype", "torch_dtype")
_PATHS = ("store", "adapter")
REDUCTION = ("compress", "quantize")


def load(model_name: str, fields: Mapping[str, Any], model: Any = None, tokenizer: Any = None) -> KVPacketEngine:
    """The engine that a class's fields describe.

    Args:
        model_name: as for ``KVPacketEngine.load``; only a name if ``model`` is given.
        fields: of the constructor, resolved.
        model: a transformers model that is loaded already.
        tokenizer: of the model; by default the one of ``tokenizer_name``, or of the model's name.

    Raises:
        KVPacketError: what ``KVPacketEngine.load`` raises, or ``dtype`` or ``device_map`` contradict ``model``.
    """
    device, dtype = fields.get("device_map") or "auto", fields.get("dtype") or "auto"
    for_model, for_tokenizer = for_transformers(fields)
    tokenizer_name = fields.get("tokenizer_name")
    if model is None and tokenizer is None and _is_own_tokenizer(tokenizer_name, model_name):
        return KVPacketEngine.load(
            model_name,
            store=fields.get("store"),
            adapter=fields.get("adapter", "auto"),
            device=device,
            dtype=dtype,
            min_match_tokens=fields.get("min_match_tokens", MIN_MATCH_TOKENS),
            model_kwargs=for_model,
            tokenizer_kwargs=for_tokenizer,
            **{name: fields[name] for name in REDUCTION if fields.get(name)},
        )
    if model is None:
        place = pick_device(device)
        model, _ = load_model(model_name, place, pick_dtype(dtype, place), for_model)
    else:
        _require_as_loaded(model, device, dtype)
    if tokenizer is None:
        name = tokenizer_name or getattr(model, "name_or_path", "") or model_name
        tokenizer = load_tokenizer(name, for_tokenizer)
    return KVPacketEngine.around(
        Backbone(model, tokenizer, model_name),
        fields.get("store"),
        fields.get("adapter", "auto"),
        min_match_tokens=fields.get("min_match_tokens", MIN_MATCH_TOKENS),
    )


def _is_own_tokenizer(tokenizer_name: str | None, model_name: str) -> bool:
    if not tokenizer_name or tokenizer_name == model_name:
        return True
    return not Path(tokenizer_name).is_dir() and resolve_model(tokenizer_name) == resolve_model(model_name)


def for_transformers(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``model_kwargs`` and ``tokenizer_kwargs`` for the core, which has words of its own for dtype and device."""
    given = fields.get("model_kwargs") or {}
    own = {name: value for name, value in given.items() if name not in (*_DTYPE_WORDS, "device_map")}
    return own, dict(fields.get("tokenizer_kwargs") or {})


def _require_as_loaded(model: Any, device: str, dtype: str) -> None:
    wrong = []
    if dtype != "auto" and pick_dtype(dtype, model.device) != model.dtype:
        wrong.append(f"dtype={dtype!r}")
    if device != "auto" and pick_device(device).type != model.device.type:
        wrong.append(f"device_map={device!r}")
    if wrong:
        raise KVPacketError(
            f"got a model that is loaded in {model.dtype} on {model.device}, and {', '.join(wrong)} besides; leave "
            "these out, or load the model as you want it"
        )


def resolve(fields: Mapping[str, Any], has_model: bool, has_tokenizer: bool) -> dict[str, Any]:
    """Constructor fields in this package's words: transformers' ``model_kwargs`` and ``device_map`` are understood.

    Raises:
        KVPacketError: a loading argument that cannot have its effect, or two that contradict each other.
    """
    model_kwargs = dict(fields.get("model_kwargs") or {})
    given = [fields.get("dtype"), *(model_kwargs[word] for word in _DTYPE_WORDS if word in model_kwargs)]
    places = [fields.get("device"), fields.get("device_map"), model_kwargs.get("device_map")]
    resolved = {name: _path(value) if name in _PATHS else value for name, value in fields.items() if name != "device"}
    resolved["dtype"] = _only("dtype", [str(word).removeprefix("torch.") for word in given if word is not None])
    resolved["device_map"] = _only("device_map", [_one_device(place) for place in places if place is not None])
    words = {**dict.fromkeys(_DTYPE_WORDS, resolved["dtype"]), "device_map": resolved["device_map"]}
    model_kwargs |= {word: value for word, value in words.items() if word in model_kwargs}
    if model_kwargs:
        resolved["model_kwargs"] = model_kwargs
    for_model, for_tokenizer = for_transformers(resolved)
    passed_on({} if has_model else for_model, {} if has_tokenizer else for_tokenizer)  # refuses what it does not know
    return resolved


def _path(value: Any) -> Any:
    """A path from anywhere: another process that loads the same, or this one later, may work in another folder."""
    is_path = isinstance(value, str | Path) and str(value) != "auto" and not is_url(value)
    return str(local_path(value).expanduser().absolute()) if is_path else value


def from_anywhere(model_name: str, tokenizer_name: str | None) -> tuple[str, str | None]:
    """Names that mean the same model and tokenizer in whatever folder a process works."""
    folder = Path(model_name).expanduser()
    model = str(folder.absolute()) if folder.is_dir() and resolve_model(model_name) == folder else model_name
    if not tokenizer_name or tokenizer_name == model_name:
        return model, tokenizer_name and model
    own = Path(tokenizer_name).expanduser()
    return model, str(own.absolute()) if own.is_dir() else tokenizer_name


def _only(name: str, values: list[str]) -> str:
    wanted = sorted({value for value in values if value != "auto"})
    if len(wanted) > 1:
        raise KVPacketError(f"{name} is {' and '.join(map(repr, wanted))} at once; leave out all but one")
    return wanted[0] if wanted else "auto"


def _one_device(device: Any) -> str:
    if isinstance(device, Mapping) and list(device) == [""]:
        device = f"cuda:{device['']}" if isinstance(device[""], int) else str(device[""])
    if not isinstance(device, str):
        raise KVPacketError(f"device_map is {device!r}; packets need the model on one device, such as 'cuda' or 'cpu'")
    return device


def as_text(value: Any) -> str | None:
    """A path as text; None for objects, which cannot be loaded again from a field."""
    return str(value) if isinstance(value, str | Path) else None


def is_reloadable(fields: Mapping[str, Any]) -> bool:
    """Whether another process can load the same engine from text alone."""
    return all(fields.get(name) is None or as_text(fields[name]) is not None for name in _PATHS)


def require_objects(fields: Mapping[str, Any]) -> None:
    """Refuse a name where a loaded object is meant, and what is neither.

    Raises:
        KVPacketError: saying which argument takes it.
    """
    for word in ("model", "tokenizer"):
        if isinstance(fields.get(word), str):
            raise KVPacketError(
                f"{word} is {fields[word]!r}, a name; pass it as {word}_name, or a {word} that is loaded already"
            )
    for word in ("model_kwargs", "tokenizer_kwargs", "generate_kwargs", "chat_template_kwargs"):
        if not isinstance(fields.get(word) or {}, Mapping):
            raise KVPacketError(f"{word} is {fields[word]!r}; pass a dictionary of arguments by name")
    if not isinstance(fields.get("store"), str | Path | PacketStore | None):
        raise KVPacketError(f"store is a {type(fields['store']).__name__}; pass a folder or a packet store")


def require_no_loading(engine: KVPacketEngine, model_name: str | None, fields: Mapping[str, Any]) -> None:
    """Refuse to be told how to load an engine that is loaded already.

    Raises:
        KVPacketError: naming what is too much.
    """
    given = [name for name, default in _LOADING.items() if fields.get(name, default) not in (None, default)]
    given += [name for name in ("model", "tokenizer", "model_kwargs", "tokenizer_kwargs") if fields.get(name)]
    if fields.get("adapter", "auto") is None and not engine.encoder.adapter.is_empty:
        given.append("adapter=None")
    if model_name not in (None, engine.model_name):
        given.append(f"model_name={model_name!r}")
    if given:
        raise KVPacketError(
            f"got an engine, which has loaded {engine.model_name!r}, and {', '.join(given)} besides; leave out either"
        )


def window(engine: KVPacketEngine, asked: int, max_new_tokens: int) -> int:
    """Tokens to plan prompts for: what was asked, but no more than the model has, which is warned of.

    Raises:
        KVPacketError: the answer alone would fill it.
    """
    if asked > engine.context_window:
        logger.warning(
            "context_window is %d, and %s has %d; prompts are planned for the latter",
            asked,
            engine.model_name,
            engine.context_window,
        )
    size = min(asked or engine.context_window, engine.context_window)
    if not max_new_tokens < size:
        raise KVPacketError(
            f"context_window is {size} and max_new_tokens {max_new_tokens}; expected less for the answer than for "
            f"the window, which is at most {engine.context_window} with {engine.model_name}"
        )
    return size
