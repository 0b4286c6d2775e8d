"""Adapters that ship with the package, found by the weights they were trained for, and the check of any other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.adapter_file import load
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import AdapterError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "adapters"
_said: set[str] = set()


def shipped_adapters() -> Iterator[tuple[Path, dict[str, str]]]:
    """File and metadata of every adapter that ships."""
    for path in sorted(_FOLDER.glob("*.safetensors")):
        yield path, load(path)[1]


def find_adapter(backbone: Backbone) -> Adapter | None:
    """The adapter that ships for these very weights; None, with one warning a model, if there is none."""
    for path, about in shipped_adapters():
        if about.get("architecture") == backbone.architecture and about.get("weights") == backbone.values_fingerprint:
            logger.info("using the adapter %s, which was trained for %s", path.name, about.get("model"))
            return Adapter.load(path)
    _warn_once(
        f"none {backbone.values_fingerprint}",
        f"no adapter ships for {backbone.name}, so its packets are bare chunks and answers stray further from full "
        f"prefill; 'kvpacket verify {backbone.name}' measures how far, 'kvpacket train' makes an adapter, and "
        "adapter=None says that bare chunks are wanted",
    )
    return None


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
    if about.get("weights") and about["weights"] != backbone.values_fingerprint:
        differ.append("weights")
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
