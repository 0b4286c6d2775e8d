"""Chat messages, and the model's own template applied to them, whatever roles it is willing to take."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kvpacket_rag.errors import PromptError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: "system", "user", "assistant" or "tool" (what a tool answered).
        content: text; it may be empty.
    """

    role: str
    content: str


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
        is_open = messages[-1].role == "assistant" and not template_kwargs.get("add_generation_prompt")
        options = {"add_generation_prompt": not is_open, "continue_final_message": is_open, **template_kwargs}
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(tokenizer.apply_chat_template(conversation, **{**options, "tokenize": False}))
        except Exception as error:  # a template is a program of its own and may raise anything
            raise PromptError(
                f"the model's chat template does not take these messages: {error}; change the messages, or pass "
                "another template as template_kwargs={'chat_template': ...}"
            ) from error

    return render


def fit_roles(messages: Sequence[Message], render: Render) -> list[Message]:
    """The messages in roles and order that the template takes whole.

    Tried in turn: as they are; neighbours of one role merged, with an empty line between them; system and tool text
    handed to the user as well, then merged. Each is tried on a word a message, so that a template which silently
    leaves a message out is found too. Raises PromptError if messages are malformed or none of the three is taken.
    """
    _check(messages)
    as_user = [replace(m, role="user") if m.role in ("system", "tool") else m for m in messages]
    for candidate in (list(messages), _merge(messages)):
        try:
            _try_roles(candidate, render)
        except PromptError:
            continue
        return candidate
    rearranged = _merge(as_user)
    _try_roles(rearranged, render)
    return rearranged


def _try_roles(messages: Sequence[Message], render: Render) -> None:
    """Raise PromptError if the template refuses these roles or leaves a message out."""
    words = [Message(message.role, secrets.token_hex(8)) for message in messages]
    rendered = render(words)
    for word in words:
        if word.content not in rendered:
            raise PromptError(
                f"the model's chat template leaves out a message of role {word.role!r}; pass its text in a message of "
                "the user, or another template as template_kwargs={'chat_template': ...}"
            )


def _check(messages: Sequence[Message]) -> None:
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


def _merge(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message."""
    runs = [(role, [m.content for m in run]) for role, run in groupby(messages, key=lambda m: m.role)]
    return [Message(role, "\n\n".join(filter(None, contents))) for role, contents in runs]


def _as_lines(messages: Sequence[Message]) -> str:
    lines = [f"{message.role}: {message.content}" for message in messages]
    return "\n".join(lines if messages[-1].role == "assistant" else [*lines, "assistant:"])
