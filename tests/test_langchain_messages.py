from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_kvpacket.messages import to_messages

from kvpacket_rag import Message, PromptError, ToolCall


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (SystemMessage("x"), "system"),
        (HumanMessage("x", name="ada"), "user"),
        (AIMessage("x"), "assistant"),
        (AIMessageChunk(content="x"), "assistant"),
        (ToolMessage("x", tool_call_id="1"), "tool"),
        (FunctionMessage("x", name="look"), "tool"),
        (ChatMessage("x", role="user"), "user"),
        (ChatMessage("x", role="developer"), "system"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseMessage) else value,
)
def test_every_kind_of_message_has_its_role(message: BaseMessage, role: str):
    (found,) = to_messages([message])
    assert (found.role, found.content) == (role, "x")


def test_blocks_of_text_are_joined_and_thoughts_left_out():
    blocks: list[Any] = ["a ", {"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "b"}]
    assert to_messages([AIMessage(blocks)]) == [Message("assistant", "a b")]


def test_what_a_turn_asked_of_a_tool_is_not_lost():
    asked = AIMessage("", tool_calls=[{"name": "look", "args": {"at": "lease"}, "id": "1"}])
    assert to_messages([asked])[0].tool_calls == (ToolCall("look", {"at": "lease"}, "1"),)


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file", "input_audio", None])
def test_what_is_no_text_is_refused_by_name(kind: str | None):
    with pytest.raises(PromptError, match=f"'human' holds a block of type {kind!r}"):
        to_messages([HumanMessage(["look:", {"type": kind, "url": "http://x"}])])


@pytest.mark.parametrize("message", [ChatMessage("x", role="moderator"), RemoveMessage(id="1")])
def test_a_role_of_its_own_is_refused(message: BaseMessage):
    with pytest.raises(PromptError, match=r"has the role '(moderator|remove)'"):
        to_messages([message])
