"""What a constructor or a call asks for: unknown names are refused, the rest becomes the engine's settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from kvpacket_rag import GenerationSettings, KVPacketError, PromptError

DECODING = frozenset(field.name for field in dataclasses.fields(GenerationSettings))
_OTHER_NAMES = {"max_tokens": "max_new_tokens", "stop_strings": "stop"}


def require_known(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse constructor arguments that would have no effect.

    Raises:
        KVPacketError: naming each unknown argument and the likeliest one meant.
    """
    if unknown := sorted(set(given) - set(known)):
        raise KVPacketError(f"{owner} takes no {_with_guesses(unknown, known)}; it takes {', '.join(sorted(known))}")


def generation_settings(*layers: Mapping[str, Any]) -> GenerationSettings:
    """The settings that several layers of names and values amount to; later layers win, None leaves what was there.

    Besides the names of ``GenerationSettings`` it takes ``max_tokens`` and ``stop_strings`` as other words for two
    of them, and transformers' ``do_sample``: False decodes greedily, True draws, at temperature 1 if none is set.

    Raises:
        PromptError: an unknown name, or a value out of its range.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values |= {_OTHER_NAMES.get(name, name): value for name, value in layer.items() if value is not None}
    sample = values.pop("do_sample", None)
    if sample is not None:
        values["temperature"] = (values.get("temperature") or 1.0) if sample else 0.0
    known = DECODING | _OTHER_NAMES.keys() | {"do_sample"}
    if unknown := sorted(values.keys() - DECODING):
        raise PromptError(
            f"generation takes no {_with_guesses(unknown, known)}; it takes {', '.join(sorted(known))}, and a chat "
            "model chat_template_kwargs"
        )
    stop = values.get("stop", ())
    return GenerationSettings(**{**values, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def _with_guesses(unknown: Iterable[str], known: Iterable[str]) -> str:
    guesses = {name: difflib.get_close_matches(name, [*known, *_OTHER_NAMES], 1) for name in unknown}
    meant = {name: _OTHER_NAMES.get(near[0], near[0]) if near else "" for name, near in guesses.items()}
    return ", ".join(f"{name!r}" + (f" (meant {guess!r}?)" if guess else "") for name, guess in meant.items())
