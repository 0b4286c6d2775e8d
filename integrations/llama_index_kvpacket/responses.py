"""The engine's answers as LlamaIndex's responses, whole or piece by piece."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from kvpacket_rag import Answer, AnswerStream

Raw = dict[str, Any]
R = TypeVar("R", ChatResponse, CompletionResponse)
Make = Callable[[str, str | None, Raw | None], R]


def raw(answer: Answer) -> Raw:
    """What ``response.raw`` tells of an answer; ``TokenCountingHandler`` reads its ``usage``."""
    prompt, completion = answer.usage.prompt_tokens, answer.usage.completion_tokens
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, **dataclasses.asdict(answer.usage)}
    return {
        "usage": {**usage, "misses": list(usage["misses"])},
        "timings": dataclasses.asdict(answer.timings),
        "finish_reason": answer.finish_reason,
    }


def chat_response(text: str, delta: str | None, details: Raw | None) -> ChatResponse:
    """One response of a chat; ``text`` is all that was written so far."""
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta, raw=details)


def completion_response(text: str, delta: str | None, details: Raw | None) -> CompletionResponse:
    """One response of a completion; ``text`` is all that was written so far."""
    return CompletionResponse(text=text, delta=delta, raw=details)


class SharedStream:
    """An answer that begins when it is first needed, in whichever thread that is.

    Args:
        begin: checks the prompt and starts the answer.
        details: makes of the whole answer what ``response.raw`` tells of it.
    """

    def __init__(self, begin: Callable[[], AnswerStream], details: Callable[[Answer], Raw] = raw) -> None:
        self._begin = begin
        self._details = details
        self._stream: AnswerStream | None = None
        self._closed = False

    def start(self) -> SharedStream:
        """Check the prompt; nothing is computed yet."""
        self._started()
        return self

    def _started(self) -> AnswerStream:
        if self._stream is None:
            self._stream = self._begin()
        if self._closed:  # given up while another thread was starting it
            self._stream.close()
        return self._stream

    def read(self) -> str | None:
        """The next piece; None at the end, or once the answer was given up."""
        return next(self._started(), None)

    def read_all(self) -> Answer:
        """Start, read to the end and return the answer."""
        return self._started().read_all()

    def details(self) -> Raw:
        """What to tell of the whole answer, once it was read to the end."""
        return self._details(self._started().answer)

    def close(self) -> None:
        """Give the answer up and free its context, at the latest when a step that is running ends."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()


def responses(stream: SharedStream, make: Make[R]) -> Generator[R, None, None]:
    """A response for each piece, and a last one without text that carries the usage."""
    text = ""
    while (piece := stream.read()) is not None:
        text += piece
        yield make(text, piece, None)
    yield make(text, "", stream.details())


async def aresponses(stream: SharedStream, make: Make[R]) -> AsyncGenerator[R, None]:
    """The same for an event loop, which goes on while a piece is computed."""
    text = ""
    while (piece := await asyncio.to_thread(stream.read)) is not None:
        text += piece
        yield make(text, piece, None)
    yield make(text, "", stream.details())


def closing(begin: Callable[[], Generator[R, None, None]], stream: SharedStream) -> Generator[R, None, None]:
    """What is told to callbacks from the first response on, with the context freed when the consumer leaves.

    A stream that nobody reads is told to nobody. The callbacks around the events do not close what they read, and a
    handler that keeps the exception of an abandoned stream would keep the context with it.

    Args:
        begin: gives the events; an error of the prompt is raised here at once, and told by them.
        stream: that they read.
    """
    try:
        stream.start()
    except Exception:
        return begin()
    return _closing(begin, stream)


def _closing(begin: Callable[[], Generator[R, None, None]], stream: SharedStream) -> Generator[R, None, None]:
    try:
        yield from begin()
    finally:
        stream.close()


async def aclosing(
    begin: Callable[[], Coroutine[Any, Any, AsyncGenerator[R, None]]], stream: SharedStream
) -> AsyncGenerator[R, None]:
    """The same for an event loop."""
    try:
        await asyncio.to_thread(stream.start)
    except Exception:
        return await begin()
    return _aclosing(begin, stream)


async def _aclosing(
    begin: Callable[[], Coroutine[Any, Any, AsyncGenerator[R, None]]], stream: SharedStream
) -> AsyncGenerator[R, None]:
    events = await begin()
    try:
        async for response in events:
            yield response
    finally:
        stream.close()
        await events.aclose()
