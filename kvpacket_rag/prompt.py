"""Cuts a prompt or a chat into the chunks that packets stand for and the text between them.

A chat goes through the model's own template. Templates trim, escape and rewrite what they are given, so chunks are
found in the messages first and one-time words put in their place; the rendered text is then cut at those words.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvpacket_rag.chat import ROLES, Message, fit_roles, renderer
from kvpacket_rag.errors import PromptError
from kvpacket_rag.finder import ChunkFinder

__all__ = ["ChunkFinder", "ChunkPiece", "Message", "Piece", "TextPiece", "segment_chat", "segment_text"]

_NO_CHUNKS = ChunkFinder()
_TURNS = frozenset((*ROLES, "ipython", "model"))  # Llama's word for a tool, Gemma's for the assistant


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text to prefill.

    Attributes:
        text: never empty.
        plain: control strings in it are words somebody wrote, not control tokens; tokenise it with
            ``split_special_tokens=True``.
    """

    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """A chunk that a packet stands for: exactly the prompt's characters, white space around it left outside."""

    text: str
    packet_id: str


Piece = TextPiece | ChunkPiece


def segment_text(prompt: str, finder: ChunkFinder) -> list[Piece]:
    """Cut a final prompt, with the template already applied, at the chunks that ``finder`` knows.

    The texts of all pieces, joined, are the prompt again. Control strings between chunks are control tokens, as in
    any final prompt. Raises PromptError if the prompt is empty or no string.
    """
    if not isinstance(prompt, str):
        raise PromptError(f"the prompt is a {type(prompt).__name__}; pass a string, or a list of Message for a chat")
    if not prompt:
        raise PromptError("the prompt is an empty string; pass at least one character for the model to continue")
    pieces: list[Piece] = []
    position = 0
    for match in finder.find(prompt):
        pieces.append(TextPiece(prompt[position : match.start], plain=False))
        pieces.append(ChunkPiece(prompt[match.start : match.end], match.packet_id))
        position = match.end
    pieces.append(TextPiece(prompt[position:], plain=False))
    return [piece for piece in pieces if piece.text]


def segment_chat(
    messages: Sequence[Message],
    finder: ChunkFinder,
    tokenizer: Any,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """Render a chat with the model's template and cut it at the chunks that ``finder`` knows.

    The text ends where the model has to speak: after the template's generation prompt or, when the last message is
    the assistant's, inside that message, which the model goes on with. Control strings that a message holds become
    plain text pieces of their own; all other text stays joined with the template's, so that without chunks and
    control strings there is one piece, the very text the template makes. The same goes for tool calls and for
    the ``tools`` and ``documents`` among ``template_kwargs``. A chunk whose place the template drops is rendered as
    text like any other. Messages whose roles the template refuses or leaves out are rearranged as ``chat.fit_roles``
    says.

    Args:
        messages: oldest first.
        tokenizer: any transformers tokenizer. One without a chat template gets lines of ``role: content``.
        template_kwargs: handed to ``apply_chat_template``, for example ``{"enable_thinking": False}``.

    Raises:
        PromptError: no messages, a message that is not role and text, or a template that refuses them all the same.
    """
    options = dict(template_kwargs or {})
    fitted = fit_roles(messages, renderer(tokenizer, options))
    marks = _Marks(repr((fitted, options)), control_strings(tokenizer))
    return marks.cut(_render_marked(fitted, options, marks, finder, tokenizer))


def _render_marked(
    messages: Sequence[Message], options: Mapping[str, Any], marks: _Marks, finder: ChunkFinder, tokenizer: Any
) -> str:
    """The rendered chat with every mark in it; marks the template loses are replaced by what they stood for."""

    def in_json(text: str) -> str:
        is_escaped = json.dumps(text, ensure_ascii=False)[1:-1] != text
        return marks.put_chunks(text, _NO_CHUNKS if is_escaped else finder)  # an escaped chunk is not the chunk

    messages, options = _rewrite(messages, options, lambda text: marks.put_chunks(text, finder), in_json)
    while True:
        rendered = renderer(tokenizer, options)(messages)
        lost = [mark for mark in marks.pieces if mark not in rendered]
        if not lost:
            return rendered
        literals = {mark: marks.take_back(mark) for mark in lost}
        put_back = partial(_replace_all, literals=literals)
        messages, options = _rewrite(messages, options, put_back, put_back)


def _rewrite(
    messages: Sequence[Message],
    options: Mapping[str, Any],
    change: Callable[[str], str],
    in_json: Callable[[str], str],
) -> tuple[list[Message], dict[str, Any]]:
    """``change`` applied to every text that a template renders but did not write; ``in_json`` where it writes JSON."""
    rewritten = []
    for message in messages:
        calls = [
            replace(call, name=change(call.name), arguments=_in_strings(call.arguments, in_json))
            for call in message.tool_calls
        ]
        rewritten.append(replace(message, content=change(message.content), tool_calls=tuple(calls)))
    ways = {"tools": in_json, "documents": change}
    given = {name: _in_strings(options[name], way) for name, way in ways.items() if name in options}
    return rewritten, {**options, **given}


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of what JSON can hold, with ``change`` applied to each string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_in_strings(key, change): _in_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_strings(item, change) for item in value]
    return value


def _replace_all(text: str, literals: Mapping[str, str]) -> str:
    for mark, literal in literals.items():
        text = text.replace(mark, literal)
    return text


class _Marks:
    """One-time words that stand for chunks and control strings while a chat goes through its template.

    They are plain ASCII letters and digits, which no template trims or escapes, and contain a random number that
    does not occur in ``written``, so nothing anybody wrote can pass for one.
    """

    def __init__(self, written: str, control: re.Pattern[str] | None) -> None:
        self.pieces: dict[str, Piece] = {}
        self._nonce = _unused_word(written)
        self._numbers = itertools.count()
        self._control = control

    def put_chunks(self, content: str, finder: ChunkFinder) -> str:
        """``content`` with a mark in place of each known chunk and each control string outside of chunks."""
        pieces = segment_text(content, finder) if content else []
        return "".join(
            self._put(piece) if isinstance(piece, ChunkPiece) else self._put_controls(piece.text) for piece in pieces
        )

    def take_back(self, mark: str) -> str:
        """Drop a mark; gives the text to put in its place, a chunk's control strings marked on their own."""
        piece = self.pieces.pop(mark)
        return self._put_controls(piece.text) if isinstance(piece, ChunkPiece) else piece.text

    def cut(self, rendered: str) -> list[Piece]:
        """The pieces of a text that holds marks."""
        parts = re.split(f"(KVP{self._nonce}X[0-9]+E)", rendered)
        pieces = [self.pieces.get(part) or TextPiece(part, plain=False) for part in parts]
        return [piece for piece in pieces if piece.text]

    def _put_controls(self, text: str) -> str:
        if self._control is None:
            return text
        return self._control.sub(lambda found: self._put(TextPiece(found.group(), plain=True)), text)

    def _put(self, piece: Piece) -> str:
        mark = f"KVP{self._nonce}X{next(self._numbers)}E"
        self.pieces[mark] = piece
        return mark


def _unused_word(written: str) -> str:
    while True:
        word = secrets.token_hex(6)
        if word not in written:
            return word


def control_strings(tokenizer: Any) -> re.Pattern[str] | None:
    """What the tokenizer would read as control tokens, if anything. White space is left out: it means the same as text.

    Args:
        tokenizer: any transformers tokenizer.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    words = sorted(word for word in added | set(tokenizer.all_special_tokens) if word.strip())
    return re.compile(f"(?:{'|'.join(map(re.escape, words))})+") if words else None


def speaks_control(text: str, control: re.Pattern[str] | None) -> bool:
    """Whether a chunk holds control strings, and more than a template writes of its own from one turn to the next.

    Such a chunk is cut out of final prompts however short it is. One that is nothing but the seam between two turns
    is not: every prompt's own seams would be read as plain text with it.
    """
    if control is None or not control.search(text):
        return False
    return not _TURNS.issuperset(control.sub(" ", text).split())
