"""OpenAI's messages to the engine's."""

from __future__ import annotations

import json
from typing import Any

from kvpacket_rag.chat import Message, ToolCall
from kvpacket_rag.serving.server.errors import ApiError, invalid
from kvpacket_rag.serving.server.fields import Fields, kind_of

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_EMPTY: tuple[Any, ...] = ("", [], {}, False)


def to_messages(fields: Fields, most: int) -> tuple[Message, ...]:
    """The chat, in text and four roles.

    Raises:
        ApiError: there is none, it is too long, or a message is malformed or holds what is no text.
    """
    given = fields.take("messages")
    if given is None:
        raise invalid("messages", "the request has no messages", "missing_parameter")
    if not isinstance(given, list):
        raise invalid("messages", f"messages is a {kind_of(given)}, expected an array", "invalid_type")
    if not given:
        raise invalid("messages", "messages is empty; send at least one")
    if len(given) > most:
        raise invalid(
            "messages", f"there are {len(given)} messages; this server takes up to {most}", "too_many_messages"
        )
    return tuple(_message(f"messages[{number}]", value) for number, value in enumerate(given))


def _message(path: str, value: Any) -> Message:
    fields = Fields.inside(path, value)
    role = fields.text("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"the role is {str(role)[:100]!r}, expected one of {', '.join(_ROLES)}")
    message = Message(
        _ROLES[role],
        _content(f"{path}.content", fields.take("content")),
        _calls(f"{path}.tool_calls", fields.take("tool_calls")),
        fields.text("tool_call_id"),
    )
    fields.text("name")  # chat templates show no names
    for name, left in fields.rest().items():
        if left not in _EMPTY:  # an answer that a client sends back holds fields it did not fill
            raise invalid(f"{path}.{name}", f"{name[:100]!r} of a message is not shown to the model; leave it out")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", "only the assistant calls tools")
    return message


def _content(path: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(path, f"the content is a {kind_of(value)}, expected a string or an array of text", "invalid_type")
    return "".join(_part(f"{path}[{number}]", part) for number, part in enumerate(value))


def _part(path: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") in ("text", "refusal"):
        text = value.get(value["type"])
        if isinstance(text, str):
            return text
    raise invalid(path, "only text can be answered here: expected {'type': 'text', 'text': ...}", "invalid_type")


def _calls(path: str, value: Any) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(path, f"tool_calls is a {kind_of(value)}, expected an array", "invalid_type")
    return tuple(_call(f"{path}[{number}]", call) for number, call in enumerate(value))


def _call(path: str, value: Any) -> ToolCall:
    wrong: ApiError = invalid(
        path, "expected {'id', 'type': 'function', 'function': {'name', 'arguments': JSON text}}", "invalid_type"
    )
    try:
        function, name = value["function"], value.get("id")
        arguments = json.loads(function["arguments"] or "{}")
        call = ToolCall(function["name"], arguments, name)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise wrong from None
    if not isinstance(arguments, dict) or not isinstance(call.name, str) or not isinstance(name, str | None):
        raise wrong
    return call
