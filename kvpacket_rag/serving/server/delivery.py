"""Brings an answer to its client: whole or as it is written, and stops it when the client leaves or does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Message as Sent
from starlette.types import Receive, Scope, Send

from kvpacket_rag.serving.server.backend import Event, Finished, Started
from kvpacket_rag.serving.server.errors import ApiError, JSONResponse
from kvpacket_rag.serving.server.guard import left
from kvpacket_rag.serving.server.replies import Reply, event

T = TypeVar("T")
OnFinish = Callable[[Finished], None]
ErrorOf = Callable[[Exception], ApiError]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy might collect the pieces
]


class ClientGone(Exception):
    """The client left, or did not read for too long; nobody is there to answer."""


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is given up when the client leaves.

    Raises:
        ClientGone: it left.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("left")
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def patient(send: Send, seconds: float) -> Send:
    """The same send, which gives a client up that does not read for so long."""

    async def send_in_time(message: Sent) -> None:
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            raise ClientGone(f"did not read for {seconds:g} s") from None

    return send_in_time


async def whole(events: AsyncIterator[Event], reply: Reply, on_finish: OnFinish) -> JSONResponse:
    """The answer in one piece."""
    started, pieces = Started(), list[str]()
    async for found in events:
        match found:
            case Started():
                started = found
            case Finished():
                on_finish(found)
                return JSONResponse(reply.whole(started, "".join(pieces), found))
            case piece:
                pieces.append(piece)
    raise AssertionError("an answer without an end")


async def pieces(
    events: AsyncIterator[Event],
    reply: Reply,
    on_finish: OnFinish,
    error_of: ErrorOf,
    send: Send,
) -> None:
    """The answer as server-sent events, up to :func:`end`.

    Nothing is sent before the first piece is there, so that errors keep a status. An error after that is an event of
    its own, without the mark of a whole answer behind it.
    """
    async with aclosing(_frames(events, reply, on_finish)) as frames:
        first = await anext(frames)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except ClientGone:
            raise
        except Exception as error:
            await send({"type": "http.response.body", "body": event(error_of(error).body), "more_body": True})


async def end(scope: Scope, receive: Receive, send: Send) -> None:
    """Ends a stream; apart from the rest, for a client may hang up as soon as it has the end, and has not left then."""
    await send({"type": "http.response.body", "body": b""})


async def _frames(events: AsyncIterator[Event], reply: Reply, on_finish: OnFinish) -> AsyncGenerator[bytes, None]:
    """The bytes to send; the opening comes together with what follows it."""
    opening = b""
    async for found in events:
        match found:
            case Started():
                opening = reply.first(found)
            case Finished():
                on_finish(found)
                yield opening + reply.last(found)
            case piece:
                yield opening + reply.piece(piece)
                opening = b""
