"""Chat messages, and the model's own template applied to them, whatever roles it is willing to take."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kvpacket_rag.errors import PromptError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a turn of the assistant asked of a tool.

    Attributes:
        name: of the tool.
        arguments: by name; anything JSON can hold.
        id: by which the tool's answer refers to it.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: "system", "user", "assistant" or "tool" (what a tool answered).
        content: text; it may be empty.
        tool_calls: the assistant's; a template without a place for them gets them as lines of JSON in the content.
        tool_call_id: of the call that a message of a tool answers.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


Render = Callable[[Sequence[Message]], str]


def renderer(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Render:
    """The tokenizer's chat template as a function from messages to text that ends where the model has to speak.

    A last message of the assistant is left open for the model to go on with; ``template_kwargs`` with
    ``add_generation_prompt=True`` closes it and begins a new one. Without a template each message is a line
    ``role: content``, and ``assistant:`` ends the text. The function raises PromptError, with the template's own
    words, when the template refuses the messages.
    """
    if not (tokenizer.chat_template or template_kwargs.get("chat_template")):
        return _as_lines

    def render(messages: Sequence[Message]) -> str:
        last = messages[-1]
        is_open = last.role == "assistant" and not last.tool_calls and not template_kwargs.get("add_generation_prompt")
        end = f"{secrets.token_hex(8)} " if is_open else ""
        conversation = [_as_dict(message) for message in messages]
        conversation[-1]["content"] += end
        options = {"add_generation_prompt": not is_open, **template_kwargs, "tokenize": False}
        try:
            rendered = str(tokenizer.apply_chat_template(conversation, **options))
        except Exception as error:  # a template is a program of its own and may raise anything
            raise PromptError(
                f"the model's chat template does not take these messages: {error}; change the messages, or pass "
                "another template as template_kwargs={'chat_template': ...}"
            ) from error
        return _cut(rendered, end)

    return render


def fit_roles(messages: Sequence[Message], render: Render) -> list[Message]:
    """The messages in roles and order that the template takes whole.

    Tried in turn: as they are; neighbours of one role merged, with an empty line between them; and merged, with calls
    written out in the content, tool answers handed to the user, later system text as well, then all system text.
    Each is tried on a word a message, so that a template which silently leaves a message out is found too. Raises
    PromptError if messages are malformed or none of these is taken.
    """
    check_messages(messages)
    tried: list[list[Message]] = []
    refusal = PromptError("")
    for candidate in _arrangements(messages):
        if candidate in tried:
            continue
        try:
            _try_roles(candidate, render)
        except PromptError as error:
            tried.append(candidate)
            refusal = error
        else:
            return candidate
    raise refusal


def _arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """From the messages as they are to what any template takes: text of the user and the assistant in turns."""
    yield list(messages)
    for system_stays in (len(messages), 1, 0):  # messages among which system text is left as it is
        for calls_stay, answers_stay in ((True, True), (False, True), (False, False)):
            moved = []
            for number, message in enumerate(messages):
                stays = {"system": number < system_stays, "tool": answers_stay}.get(message.role, True)
                placed = message if stays else replace(message, role="user", tool_call_id=None)
                moved.append(placed if calls_stay else _written_out(placed))
            yield _merge(moved)


def _written_out(message: Message) -> Message:
    """The message with its tool calls as lines of its content."""
    calls = [
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=str)
        for call in message.tool_calls
    ]
    return replace(message, content="\n".join(filter(None, [message.content, *calls])), tool_calls=())


def _merge(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message; answers of tools stay apart, for each belongs to one call."""
    runs = groupby(enumerate(messages), key=lambda item: (item[1].role, item[0] if item[1].role == "tool" else None))
    merged = []
    for _, run in runs:
        first, *rest = (message for _, message in run)
        content = "\n\n".join(filter(None, [first.content, *(message.content for message in rest)]))
        calls = (*first.tool_calls, *(call for message in rest for call in message.tool_calls))
        merged.append(replace(first, content=content, tool_calls=calls))
    return merged


def _try_roles(messages: Sequence[Message], render: Render) -> None:
    """Raise PromptError if the template refuses these roles or leaves out a message or a call."""
    trial = [
        replace(
            message,
            content=message.content and secrets.token_hex(8),
            tool_calls=tuple(replace(call, arguments={"value": secrets.token_hex(8)}) for call in message.tool_calls),
        )
        for message in messages
    ]
    rendered = render(trial)
    for message in trial:
        words = [message.content, *(call.arguments["value"] for call in message.tool_calls)]
        if not all(word in rendered for word in words):
            raise PromptError(
                f"the model's chat template leaves out a message of role {message.role!r}; pass its text in a message "
                "of the user, or another template as template_kwargs={'chat_template': ...}"
            )


def check_messages(messages: Sequence[Message]) -> None:
    """See that a chat is a list of messages whose parts are of the types they should be.

    Raises:
        PromptError: it is not; the message and what is wrong with it are named.
    """
    if isinstance(messages, str) or not messages:
        found = "a string" if isinstance(messages, str) else "no messages"
        raise PromptError(f"the chat is {found}; pass a list with at least one Message(role, content)")
    for number, message in enumerate(messages):
        if not isinstance(message, Message):
            raise PromptError(f"message {number} is a {type(message).__name__}; pass Message(role, content)")
        if message.role not in ROLES:
            raise PromptError(f"message {number} has the role {message.role!r}; the roles are {', '.join(ROLES)}")
        if not isinstance(message.content, str):
            raise PromptError(
                f"the content of message {number} is a {type(message.content).__name__}; only text can be answered "
                "from packets, so pass a string"
            )
        _check_calls(number, message)


def _check_calls(number: int, message: Message) -> None:
    calls = message.tool_calls
    if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall) for call in calls):
        raise PromptError(
            f"the tool_calls of message {number} are {calls!r}; pass a tuple of ToolCall(name, arguments)"
        )
    if calls and message.role != "assistant":
        raise PromptError(f"message {number} calls tools as {message.role!r}; only the assistant calls tools")
    for call in calls:
        if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
            raise PromptError(f"message {number} makes the call {call!r}; expected a name and arguments by name")


def _as_dict(message: Message) -> dict[str, Any]:
    """As templates read it; what is not there must not be named, for many templates ask for the name alone."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_call_as_dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _call_as_dict(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _cut(rendered: str, end: str) -> str:
    """The text before ``end``, which is a word and a space; a template that trims the space trims what is before."""
    if not end:
        return rendered
    before, found, after = rendered.rpartition(end.strip())
    if not found:
        raise PromptError(
            "the model's chat template leaves out the end of the last message, which the model should go on with; "
            "pass template_kwargs={'add_generation_prompt': True} for a new turn of the assistant"
        )
    return before if after.startswith(" ") else before.rstrip()


def _as_lines(messages: Sequence[Message]) -> str:
    lines = [f"{message.role}: {message.content}" for message in messages]
    return "\n".join(lines if messages[-1].role == "assistant" else [*lines, "assistant:"])
