"""A request's body as a checked call: every parameter is taken, without effect here, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.errors import PromptError
from kvpacket_rag.reading import Policy
from kvpacket_rag.serving.server.errors import ApiError, invalid
from kvpacket_rag.serving.server.fields import Fields
from kvpacket_rag.serving.server.messages import to_messages

Kind = Literal["chat", "text"]

_MOST_STOPS = 16
_MOST_STOP_CHARACTERS = 256  # what could become a stop text is compared token by token
_MOST_HITS = 100
_TEXT_TOKENS = 16  # of an answer in /v1/completions, as OpenAI has it


@dataclass(frozen=True, slots=True)
class Retrieve:
    """Documents to answer from.

    Attributes:
        k: how many chunks.
        query: what to look for; the last message by default.
    """

    k: int = 4
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was checked.

    Attributes:
        kind: of a chat, or of a text to go on with.
        prompt: messages or the text.
        settings: how to decode.
        body: as it came, for a server behind this one.
        is_limited: the client said how long the answer may be.
        stream: send the answer as it is written.
        include_usage: a stream ends with the usage.
        retrieve: documents to look for first.
        policy: from packets, by full prefill, or the quicker.
        template_kwargs: for the chat template.
    """

    kind: Kind
    prompt: str | tuple[Message, ...]
    settings: GenerationSettings
    body: Mapping[str, Any] = field(repr=False)
    is_limited: bool = False
    stream: bool = False
    include_usage: bool = False
    retrieve: Retrieve | None = None
    policy: Policy = "packets"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def param(self) -> str:
        """Where the prompt stands in the body."""
        return "messages" if self.kind == "chat" else "prompt"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may ask for, and what it gets when it asks for nothing.

    Attributes:
        models: names the model answers to.
        messages: most of them in a chat.
        max_tokens: of a chat's answer where the client sets no limit.
        policy: where the client names none.
    """

    models: tuple[str, ...]
    messages: int = 1024
    max_tokens: int = 512
    policy: Policy = "packets"


def parse(raw: bytes, kind: Kind, limits: Limits) -> Call:
    """Check a body.

    Raises:
        ApiError: it is no JSON object, or a parameter is missing, malformed or not supported.
    """
    body = _decode(raw)
    fields = Fields(body)
    _check_model(fields, limits)
    prompt: str | tuple[Message, ...]
    prompt = to_messages(fields, limits.messages) if kind == "chat" else _prompt(fields)
    limit = _max_tokens(fields, kind)
    default = limits.max_tokens if kind == "chat" else _TEXT_TOKENS
    stream = fields.boolean("stream")
    call = Call(
        kind=kind,
        prompt=prompt,
        settings=_settings(fields, limit or default),
        body=body,
        is_limited=limit is not None,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        retrieve=_retrieve(fields) if kind == "chat" else None,
        policy=fields.one_of("policy", ("packets", "prefill", "auto"), limits.policy),
        template_kwargs=_template_kwargs(fields, prompt) if kind == "chat" else {},
    )
    fields.refuse_rest(kind)
    return call


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or a number or a nesting without end
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(
            400, f"the body is not valid JSON{place}; send one JSON object in UTF-8", "invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; send one JSON object", "invalid_json")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_model(fields: Fields, limits: Limits) -> None:
    model = fields.text("model")
    if model is None:
        raise invalid("model", f"the request names no model; this server has {limits.models[0]!r}", "missing_parameter")
    check_model(model, limits)


def check_model(model: str, limits: Limits) -> None:
    """Raises ApiError if there is no such model here."""
    if model not in limits.models:
        found = f"the model {model[:200]!r} does not exist; this server has {limits.models[0]!r}"
        raise ApiError(404, found, "model_not_found", "model")


def _prompt(fields: Fields) -> str:
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]  # as LangChain sends one prompt
    if isinstance(prompt, str):
        return prompt
    if prompt is None:
        raise invalid("prompt", "the request has no prompt; pass a string", "missing_parameter")
    if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
        raise invalid("prompt", f"there are {len(prompt)} prompts; send one a request")
    raise invalid("prompt", "the prompt is no string; tokens are not taken, pass the text", "invalid_type")


def _max_tokens(fields: Fields, kind: Kind) -> int | None:
    old = fields.integer("max_tokens", least=1)
    new = fields.integer("max_completion_tokens", least=1) if kind == "chat" else None
    if None not in (old, new) and old != new:
        raise invalid("max_tokens", f"max_tokens is {old} and max_completion_tokens {new}; send one of them")
    return old if new is None else new


def _settings(fields: Fields, max_new_tokens: int) -> GenerationSettings:
    stop, top_k = _stop(fields), fields.integer("top_k", least=-1)
    try:
        return GenerationSettings(
            max_new_tokens=max_new_tokens,
            temperature=fields.number("temperature", 0.0, 0.0, 2.0),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            top_k=max(top_k or 0, 0),  # -1 is all in vLLM
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 10.0),
            stop=stop,
            seed=fields.integer("seed"),
        )
    except PromptError as error:
        raise ApiError(400, str(error), "invalid_value") from None


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise invalid("stop", "stop is neither a string nor a list of strings", "invalid_type")
    if len(stops) > _MOST_STOPS or any(not 0 < len(text) <= _MOST_STOP_CHARACTERS for text in stops):
        raise invalid("stop", f"expected up to {_MOST_STOPS} stop texts of 1 to {_MOST_STOP_CHARACTERS} characters")
    return tuple(stops)


def _include_usage(fields: Fields, stream: bool) -> bool:
    given = fields.take("stream_options")
    if given is None:
        return False
    if not stream:
        raise invalid("stream_options", "stream_options are only for stream=true")
    inner = Fields.inside("stream_options", given)
    include = inner.boolean("include_usage")
    inner.boolean("include_obfuscation")  # pads chunks against those who watch the line; of no effect on the answer
    inner.refuse_rest()
    return include


def _retrieve(fields: Fields) -> Retrieve | None:
    given = fields.take("retrieve")
    if given is None or given is False:
        return None
    if given is True:
        return Retrieve()
    inner = Fields.inside("retrieve", given)
    k = inner.integer("k", least=1, most=_MOST_HITS)
    found = Retrieve(4 if k is None else k, inner.text("query"))
    inner.refuse_rest()
    return found


def _template_kwargs(fields: Fields, messages: Any) -> dict[str, Any]:
    """Switches of the chat template, such as ``enable_thinking``; a template of the client's own is a program."""
    given = fields.take("chat_template_kwargs")
    switches = {} if given is None else Fields.inside("chat_template_kwargs", given).rest()
    for name, value in switches.items():
        if name in _NO_SWITCHES or not isinstance(value, bool | int | float | str):
            raise invalid(
                f"chat_template_kwargs.{name}", f"{name} cannot be set here; expected a switch of the template"
            )
    if fields.boolean("continue_final_message"):
        if messages[-1].role != "assistant":
            raise invalid(
                "continue_final_message", "the last message is not the assistant's, so there is none to go on"
            )
        return switches
    return {**switches, "add_generation_prompt": True}


_NO_SWITCHES = {"chat_template", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message"}
