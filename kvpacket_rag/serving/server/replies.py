"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from kvpacket_rag.serving.server.backend import Finished, Started
from kvpacket_rag.serving.server.calls import Call
from kvpacket_rag.serving.server.errors import to_json

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Reply:
    """The frame that all parts of one answer share.

    Attributes:
        call: what is answered.
        model: name it is answered under.
        fingerprint: of what answers depend on.
        id: of the answer.
        created: seconds since 1970.
    """

    call: Call
    model: str
    fingerprint: str
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.call.kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, started: Started, text: str, finished: Finished) -> dict[str, Any]:
        """An answer in one piece."""
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(content if self.call.kind == "chat" else {"text": text}, finished.reason)
        more = _sources(started) | {"usage": usage(finished), "kvpacket": dict(finished.detail)}
        name = "chat.completion" if self.call.kind == "chat" else "text_completion"
        return self._frame(name, [choice]) | more

    def first(self, started: Started) -> bytes:
        """The event that opens a stream; a text has none but where it names sources."""
        if self.call.kind == "chat":
            return self._event([self._choice({"delta": {"role": "assistant", "content": ""}})], _sources(started))
        return self._event([self._choice({"text": ""})], _sources(started)) if started.sources is not None else b""

    def piece(self, text: str) -> bytes:
        """A piece of text."""
        return self._event([self._choice({"delta": {"content": text}} if self.call.kind == "chat" else {"text": text})])

    def last(self, finished: Finished) -> bytes:
        """What ends a stream: the reason, the usage if it was asked for, and the mark of the end."""
        content: dict[str, Any] = {"delta": {}} if self.call.kind == "chat" else {"text": ""}
        end = self._event([self._choice(content, finished.reason)], {"kvpacket": dict(finished.detail)})
        counts = self._event([], {"usage": usage(finished)}) if self.call.include_usage else b""
        return end + counts + DONE

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        name = "chat.completion.chunk" if self.call.kind == "chat" else "text_completion"
        usage = {"usage": None} if self.call.include_usage else {}
        return event(self._frame(name, choices) | usage | (more or {}))

    def _choice(self, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


def usage(finished: Finished) -> dict[str, Any]:
    """Tokens of a request; the cached ones are those that packets and earlier prompts held."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def _sources(started: Started) -> dict[str, Any]:
    return {} if started.sources is None else {"sources": started.sources}
