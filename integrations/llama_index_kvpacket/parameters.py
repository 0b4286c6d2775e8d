"""What a constructor or a call asks for: unknown names are refused, the rest becomes the engine's settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from kvpacket_rag import Backbone, GenerationSettings, KVPacketEngine, KVPacketError, PromptError

DECODING = frozenset(field.name for field in dataclasses.fields(GenerationSettings))
_OTHER_NAMES = {"max_tokens": "max_new_tokens", "stop_strings": "stop"}
_OTHER_WORDS = {"do_sample", "eos_token_id"}
# Of transformers' generate(), what makes no difference here, with the values of which that is true; None for any.
_IDLE: dict[str, tuple[Any, ...] | None] = {
    "pad_token_id": None,
    "use_cache": None,
    "num_beams": (1,),
    "num_return_sequences": (1,),
}


def require_known(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse constructor arguments that would have no effect.

    Raises:
        KVPacketError: naming each unknown argument and the likeliest one meant.
    """
    if unknown := sorted(set(given) - set(known)):
        raise KVPacketError(f"{owner} takes no {_with_guesses(unknown, known)}; it takes {', '.join(sorted(known))}")


def require_engine(owner: str, given: object) -> None:
    """Refuse what is no engine, such as a name or a model over one.

    Raises:
        KVPacketError: saying what to pass.
    """
    if not isinstance(given, KVPacketEngine):
        raise KVPacketError(
            f"{owner} needs a KVPacketEngine as engine, and got a {type(given).__name__}; pass the engine of a "
            "KVPacketLLM, as in engine=llm.engine, or KVPacketEngine.load(...)"
        )


def require_names(what: str, given: object) -> list[str]:
    """Texts that are given one by one: a single one would be taken for its letters.

    Raises:
        KVPacketError: they are not.
    """
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise KVPacketError(f"{what} is {given!r}; pass a list of strings")
    return names


def generation_settings(
    backbone: Backbone, stopping_ids: Iterable[int], *layers: Mapping[str, Any]
) -> GenerationSettings:
    """The settings that several layers of names and values amount to; later layers win, None leaves what was there.

    Besides the names of ``GenerationSettings`` it takes ``max_tokens`` and ``stop_strings`` as other words for two
    of them, and transformers' ``do_sample`` (False decodes greedily, True draws, at temperature 1 if none is set)
    and ``eos_token_id`` (more tokens that end an answer, besides the model's own).

    Args:
        backbone: whose tokens are meant.
        stopping_ids: tokens that end every answer, whatever the layers say.
        layers: names and values.

    Raises:
        PromptError: an unknown name, or a value out of its range.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values |= {_OTHER_NAMES.get(name, name): value for name, value in layer.items() if value is not None}
    values = {name: value for name, value in values.items() if not _is_idle(name, value)}
    sample, ends = values.pop("do_sample", None), values.pop("eos_token_id", ())
    if sample is not None:
        values["temperature"] = (values.get("temperature") or 1.0) if sample else 0.0
    known = DECODING | _OTHER_NAMES.keys() | _OTHER_WORDS
    if unknown := sorted(values.keys() - DECODING):
        raise PromptError(
            f"generation takes no {_with_guesses(unknown, known)}; it takes {', '.join(sorted(known))}, and a chat "
            "model chat_template_kwargs"
        )
    stop = values.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(require_names("stop", stop))
    ids = [*stopping_ids, *(ends if isinstance(ends, Iterable) else [ends])]
    return GenerationSettings(**{**values, "stop": (*stop, *_texts_of(backbone, ids))})


def _is_idle(name: str, value: Any) -> bool:
    allowed = _IDLE.get(name, ())
    return allowed is None or value in allowed


def _texts_of(backbone: Backbone, ids: Iterable[int]) -> list[str]:
    """Stop texts that end an answer where these tokens do; those at which the model ends anyway are left out."""
    tokenizer = backbone.tokenizer
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    texts = []
    for token in ids:
        if token in backbone.eos_ids:
            continue
        is_known = isinstance(token, int) and 0 <= token < len(tokenizer)
        text = special.get(token) or (backbone.decode([token]) if is_known else "")
        if not text or "\ufffd" in text:
            raise PromptError(
                f"token {token!r} cannot end an answer of {backbone.name}, which has {len(tokenizer)} tokens: it "
                "stands for no text of its own; leave it out of stopping_ids and eos_token_id, or pass a stop text"
            )
        texts.append(text)
    return texts


def _with_guesses(unknown: Iterable[str], known: Iterable[str]) -> str:
    guesses = {name: difflib.get_close_matches(name, [*known, *_OTHER_NAMES], 1) for name in unknown}
    meant = {name: _OTHER_NAMES.get(near[0], near[0]) if near else "" for name, near in guesses.items()}
    return ", ".join(f"{name!r}" + (f" (meant {guess!r}?)" if guess else "") for name, guess in meant.items())
