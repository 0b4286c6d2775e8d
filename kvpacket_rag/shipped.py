"""Adapters that ship with the package, found by the weights they were trained for, and the check of any other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.adapter_file import load
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import AdapterError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "adapters"
# float16 rounds weights otherwise than bfloat16 does, so what they are there cannot be computed from what they are in
# the other formats: fingerprint in float32 and bfloat16 -> fingerprint of the float32 weights in float16.
_IN_FLOAT16 = {
    "07cf963b0e32e1d329ed595bf07796b771ff1a83a790c3a4b837713b98bb5bb9": (
        "92bb4beb1f61edc992d1efd1b9a7371f5293bfe0b9e2c44342902948e138bb60"
    ),
}
_said: set[str] = set()


def shipped_adapters() -> Iterator[tuple[Path, dict[str, str]]]:
    """File and metadata of every adapter that ships."""
    for path in sorted(_FOLDER.glob("*.safetensors")):
        yield path, load(path)[1]


def is_shipped(adapter: Adapter) -> bool:
    """Whether an adapter was read from one of these files."""
    return adapter.file is not None and adapter.file.parent == _FOLDER


def find_adapter(backbone: Backbone) -> Adapter | None:
    """The adapter that ships for these very weights; None, with one warning a model, if there is none."""
    near = [entry for entry in shipped_adapters() if entry[1].get("architecture") == backbone.architecture]
    for path, about in near:
        if _has_weights(backbone, about.get("weights")):
            logger.info("using the adapter %s, which was trained for %s", path.name, about.get("model"))
            return Adapter.load(path)
    bare = "so its packets are bare chunks and answers stray further from full prefill"
    if near and _is_rounded(backbone):
        _warn_once(
            f"none {backbone.values_fingerprint}",
            f"it cannot be told in float16, which rounds weights otherwise, whether the adapter that ships for "
            f"{near[0][1].get('model')} is of the weights of {backbone.name}, {bare}; load the model in bfloat16 or "
            f"float32, or pass adapter='{near[0][0]}' to use it all the same",
        )
        return None
    _warn_once(
        f"none {backbone.values_fingerprint}",
        f"no adapter ships for {backbone.name}, {bare}; 'kvpacket verify {backbone.name}' measures how far, "
        "'kvpacket train' makes an adapter, and adapter=None says that bare chunks are wanted",
    )
    return None


def _has_weights(backbone: Backbone, fingerprint: str | None) -> bool:
    return backbone.values_fingerprint in (fingerprint, _IN_FLOAT16.get(fingerprint or "", fingerprint))


def _is_rounded(backbone: Backbone) -> bool:
    """Whether the weights may be known ones that cannot be told from others, for they are rounded otherwise."""
    return backbone.dtype is torch.float16


def check_adapter(adapter: Adapter, backbone: Backbone) -> None:
    """Refuse an adapter of another model; warn of one trained for other weights or another tokenizer.

    An adapter that does not say where it comes from is only held to its sizes, by the encoder.

    Raises:
        AdapterError: it was trained for another architecture or other sizes.
    """
    about = adapter.metadata
    trained_for = about.get("architecture")
    if trained_for and trained_for != backbone.architecture:
        raise AdapterError(
            f"the adapter was trained for {about.get('model', 'another model')} ({trained_for}), and "
            f"{backbone.name} is {backbone.architecture}; use an adapter of this model, or adapter='auto'"
        )
    differ = []
    if about.get("weights") and not _has_weights(backbone, about["weights"]):
        differ.append("weights, as far as can be told in float16," if _is_rounded(backbone) else "weights")
    if about.get("tokenizer") and about["tokenizer"] != backbone.tokenizer_fingerprint:
        differ.append("tokenizer")
    if differ:
        _warn_once(
            f"{adapter.digest} {backbone.name}",
            f"the adapter was trained for {about.get('model')}, whose {' and '.join(differ)} are not those of "
            f"{backbone.name}; it may fit all the same (a quantised copy, a fine-tune): "
            f"'kvpacket verify {backbone.name} --adapter FILE' measures it",
        )


def _warn_once(key: str, message: str) -> None:
    if key not in _said:
        _said.add(key)
        logger.warning(message)
