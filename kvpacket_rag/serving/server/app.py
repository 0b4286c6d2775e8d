"""The server: OpenAI's routes over a backend, with nothing of a request in any log but its id and counts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Sent

from kvpacket_rag.errors import DeviceError, PacketError, StoreError
from kvpacket_rag.serving.server import delivery
from kvpacket_rag.serving.server.backend import Backend, Finished
from kvpacket_rag.serving.server.calls import Call, Kind, Limits, check_model, parse
from kvpacket_rag.serving.server.delivery import ClientGone
from kvpacket_rag.serving.server.errors import ApiError, JSONResponse, busy, of_engine
from kvpacket_rag.serving.server.guard import Keys, Places, check_host, read_body
from kvpacket_rag.serving.server.metrics import ServerMetrics
from kvpacket_rag.serving.server.replies import Reply, event

logger = logging.getLogger(__name__)

_LEFT = 499  # what servers note of a client that did not wait for its answer
_UPLOADS = 64  # requests beyond the places whose bodies may come in meanwhile


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server treats those who ask.

    Attributes:
        limits: what a request may ask for.
        keys: API keys; without any, everybody may ask.
        hosts: names a request must be addressed to; all if empty.
        max_requests: answered or waiting at once; the next one is turned away with 429.
        max_body_bytes: of a request.
        body_seconds: a body may take to come in.
        send_seconds: a client may take to read what was sent.
    """

    limits: Limits
    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    max_requests: int = 36
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    send_seconds: float = 60.0


def create_app(backend: Backend, settings: ServerSettings, metrics: ServerMetrics | None = None) -> Starlette:
    """An ASGI application; it closes the backend when it ends.

    Args:
        backend: writes the answers.
        settings: of the server.
        metrics: shown at ``/metrics``; new ones by default.
    """
    server = _Server(backend, settings, metrics or ServerMetrics())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await backend.close()

    routes = [
        Route("/v1/chat/completions", server.endpoint(server.complete("chat")), methods=["POST"]),
        Route("/v1/completions", server.endpoint(server.complete("text")), methods=["POST"]),
        Route("/v1/models", server.endpoint(server.models), methods=["GET"]),
        Route("/v1/models/{model:path}", server.endpoint(server.model), methods=["GET"]),
        Route("/healthz", server.endpoint(server.health), methods=["GET"]),
        Route("/metrics", server.endpoint(server.show_metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})


Handler = Callable[[Request, Send, str], Awaitable[ASGIApp]]


class _Endpoint:
    """A route as an ASGI application, for Starlette wraps functions so that they cannot see the client leave."""

    def __init__(self, run: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(Request(scope, receive, send), send)


class _Server:
    def __init__(self, backend: Backend, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._backend = backend
        self._settings = settings
        self._metrics = metrics
        self._keys = Keys(settings.keys)
        self._places = Places(settings.max_requests)
        self._uploads = Places(settings.max_requests + _UPLOADS)
        self._created = int(time.time())

    def endpoint(self, handler: Handler) -> _Endpoint:
        """A handler with all that every request needs around it: checks, an id, counts, errors in OpenAI's form."""

        async def run(request: Request, send: Send) -> None:
            started, name = time.perf_counter(), f"req-{secrets.token_hex(8)}"
            watched = _Watched(delivery.patient(send, self._settings.send_seconds), name)
            status: int = _LEFT
            try:
                with self._metrics.in_progress.track_inprogress():
                    await self._answer(request, watched, handler, name)
                status = watched.status
            except (ClientGone, ClientDisconnect) as error:
                logger.info("request %s: the client is gone: %s", name, str(error) or "left")
            finally:
                seconds = time.perf_counter() - started
                route = request.scope["path"] if "model" not in request.path_params else "/v1/models/{model}"
                self._metrics.request(route, status, seconds)
                if route.startswith("/v1/"):
                    logger.info("request %s: %s %d in %.3f s", name, route, status, seconds)

        return _Endpoint(run)

    async def _answer(self, request: Request, send: _Watched, handler: Handler, name: str) -> None:
        response: ASGIApp
        try:
            check_host(request, self._settings.hosts)
            if request.scope["path"].startswith("/v1/"):
                self._keys.check(request)
            response = await handler(request, send, name)
        except (ClientGone, ClientDisconnect):
            raise
        except asyncio.CancelledError:  # its time of grace is over
            stopped = busy("the server was stopped before the answer was complete", 503)
            response = stopped.response()
            if send.status:
                await send({"type": "http.response.body", "body": event(stopped.body), "more_body": True})
                response = delivery.end
        except Exception as error:
            response = self._error(error, name).response()
        await response(request.scope, request.receive, send)

    def _error(self, error: Exception, name: str, call: Call | None = None) -> ApiError:
        """What the client is told; what is not its fault is logged, without the words of an unforeseen error."""
        found = of_engine(error, call.param if call else "")
        if isinstance(error, StoreError | PacketError | DeviceError):
            logger.error("request %s: %s: %s", name, type(error).__name__, str(error))
        elif found is error and found.status >= 500:  # of our own words
            logger.error("request %s: %s", name, found)
        elif found.status >= 500:
            frames = traceback.extract_tb(error.__traceback__)
            places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
            logger.error("request %s failed: %s at %s", name, type(error).__name__, places)
        return found

    def complete(self, kind: Kind) -> Handler:
        """The handler of chats or of texts."""

        async def handler(request: Request, send: Send, name: str) -> ASGIApp:
            async with self._uploads.one():
                body = await read_body(request, self._settings.max_body_bytes, self._settings.body_seconds)
                call = parse(body, kind, self._settings.limits)
                async with self._places.one():
                    return await delivery.unless_left(request, self._write(call, send, name))

        return handler

    async def _write(self, call: Call, send: Send, name: str) -> ASGIApp:
        reply = Reply(call, self._settings.limits.models[0], f"fp_{self._backend.fingerprint[:16]}")

        def on_finish(finished: Finished) -> None:
            self._metrics.answer(finished)
            counts = finished.cached_tokens, finished.prompt_tokens, finished.completion_tokens
            logger.info("request %s: %d of %d prompt tokens were cached, %d written", name, *counts)

        def error_of(error: Exception) -> ApiError:
            return self._error(error, name, call)

        try:
            async with aclosing(self._backend.answer(call)) as events:
                if not call.stream:
                    return await delivery.whole(events, reply, on_finish)
                await delivery.pieces(events, reply, on_finish, error_of, send)
                return delivery.end
        except (ClientGone, ApiError):
            raise
        except Exception as error:
            raise error_of(error) from error

    async def models(self, request: Request, send: Send, name: str) -> Response:
        """All models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._settings.limits.models]})

    async def model(self, request: Request, send: Send, name: str) -> Response:
        """One of them."""
        model = request.path_params["model"]
        check_model(model, self._settings.limits)
        return JSONResponse(self._model(model))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvpacket"}

    async def health(self, request: Request, send: Send, name: str) -> Response:
        """That the server is there."""
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request, send: Send, name: str) -> Response:
        """All counts."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Watched:
    """A send that notes the status and puts the request's id into the headers."""

    def __init__(self, send: Send, name: str) -> None:
        self._send = send
        self._name = name
        self.status = 0

    async def __call__(self, message: Sent) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self._name.encode())]}
        await self._send(message)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.scope['path'][:200]} is not served here"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    return ApiError(error.status_code, told, code, headers=error.headers).response()
