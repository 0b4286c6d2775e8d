"""What stands before every request: who may ask, how much may come in, and how many may ask at once."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from kvpacket_rag.serving.server.errors import ApiError, busy

_CLOSE = {"connection": "close"}
_DRAINED = 4  # times the most bytes of a body that are read and dropped, so that the client hears why it is refused


class Places:
    """So many requests at once and no more.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place while the context lasts.

        Raises:
            ApiError: all are taken.
        """
        if self.taken >= self._most:
            raise busy(f"all {self._most} places for requests are taken; try again in a moment")
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


class Keys:
    """Who may ask. Compared in constant time, so that no clock tells how much of a key was right.

    Args:
        keys: any of them opens; none at all lets everybody in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, request: Request) -> None:
        """Raises ApiError if the request carries no key or a wrong one."""
        if not self._digests:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        challenge = {"www-authenticate": "Bearer"}
        if scheme.lower() != "bearer" or not given.strip():
            told = "no API key was given; send it in the header 'Authorization: Bearer KEY'"
            raise ApiError(401, told, "missing_api_key", headers=challenge)
        digest = _digest(given.strip())
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):  # all of them, found or not
            raise ApiError(401, "the API key is wrong", "invalid_api_key", headers=challenge)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_host(request: Request, hosts: Sequence[str]) -> None:
    """Refuse what a page in a browser sends through a name of its own that leads to this machine.

    Raises:
        ApiError: the request was addressed to another host than ``hosts``, where there are some.
    """
    name = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
    if hosts and name not in hosts:
        raise ApiError(403, f"this server answers to {', '.join(hosts)} alone, not to {name[:100]!r}", "wrong_host")


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The whole body.

    Args:
        request: whose body it is.
        most: bytes of it.
        seconds: it may take.

    Raises:
        ApiError: it is no JSON by its header, too large, or does not come in time.
        starlette.requests.ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind[:100]!r}, expected 'application/json'", "invalid_content_type")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in _parts(request, most * _DRAINED):
                size += len(part)
                if size <= most:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s", "timeout", headers=_CLOSE) from None
    if size > most:
        raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {most:,} bytes; send a shorter prompt", "body_too_large", headers=_CLOSE
    )


async def _parts(request: Request, most: int) -> AsyncIterator[bytes]:
    """Parts of the body as they come; far too long a body is given up at once."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most // _DRAINED)
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most // _DRAINED)
        yield part


async def left(request: Request) -> None:
    """Return once the client has left; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
