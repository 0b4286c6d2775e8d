"""LangChain messages to the engine's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage

from kvpacket_rag import Message, PromptError, ToolCall

_ROLES = {
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
}
_NO_ANSWER = ("reasoning", "thinking", "redacted_thinking")  # of an earlier turn; models are not shown it again
_CALLS = ("tool_call", "tool_use", "function_call", "server_tool_call")  # also among the message's tool calls


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """The same chat, in text, four roles and tool calls; oldest first.

    Raises:
        PromptError: a message holds an image or other content that is no text, or has a role of its own.
    """
    return [
        Message(_role(message), _text(message), _calls(message), getattr(message, "tool_call_id", None))
        for message in messages
    ]


def _calls(message: BaseMessage) -> tuple[ToolCall, ...]:
    found = message.tool_calls if isinstance(message, AIMessage) else []
    for call in found:
        try:
            json.dumps(call["args"], default=str)
        except (RecursionError, ValueError) as error:
            raise PromptError(
                f"the arguments of the call of {call['name']!r} nest too deeply to be shown to a model, or hold "
                "themselves; make them plainer"
            ) from error
    return tuple(ToolCall(call["name"], call["args"], call["id"]) for call in found)


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    if name not in _ROLES:
        raise PromptError(f"a message has the role {name!r}; it can be {', '.join(_ROLES)}")
    return _ROLES[name]


def _text(message: BaseMessage) -> str:
    content = message.content
    parts = [content] if isinstance(content, str) else [_part(block, message.type) for block in content]
    return "".join(parts)


def _part(block: str | dict[str, object], role: str) -> str:
    """The text of one content block."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text") or "")
    if kind in _NO_ANSWER or kind in _CALLS:
        return ""
    raise PromptError(
        f"a message of role {role!r} holds a block of type {kind!r}; only text can be answered from packets, so leave "
        "images, audio and files out, or pass what is written in them"
    )
