"""LlamaIndex's chat messages as the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import CachePoint, ChatMessage, MessageRole, TextBlock, ThinkingBlock

from kvpacket_rag import Message, PromptError

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
_TEXT = (TextBlock, ThinkingBlock, CachePoint)  # the latter two hold nothing that a model should read again


def with_system_prompt(system_prompt: str | None, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages led by the system prompt, once: ``predict`` and chat engines may have put it there already."""
    messages = list(messages)
    first = messages[0] if messages else None
    led = first is not None and first.role == MessageRole.SYSTEM and first.content == system_prompt
    if not system_prompt or led:
        return messages
    return [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]


def to_message(message: ChatMessage) -> Message:
    """One message; several text blocks are joined as ``ChatMessage.content`` joins them.

    Raises:
        PromptError: it holds an image or anything else that is no text.
    """
    foreign = sorted({type(block).__name__ for block in message.blocks if not isinstance(block, _TEXT)})
    if foreign:
        raise PromptError(
            f"a message of role {message.role.value!r} holds {', '.join(foreign)}; this model reads text only, so "
            "pass TextBlock"
        )
    return Message(_ROLES[message.role], message.content or "")
