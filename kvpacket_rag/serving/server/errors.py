"""Errors in the form that OpenAI's clients read: what is wrong, with which parameter, and a code for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from kvpacket_rag.errors import ContextTooLongError, DeviceError, PacketError, PromptError, StoreError

RETRY_SECONDS = 2  # after which a client that was turned away may come again


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: for a person.
        code: for a program, such as ``"model_not_found"``.
        param: the parameter it is about.
        headers: more of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """To be sent."""
        return JSONResponse(self.body, self.status, self.headers)


class JSONResponse(Response):
    """JSON in ASCII: a text that holds half a character, such as one a client sent, can be written nevertheless."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Compact JSON in ASCII."""
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A parameter that cannot be taken as it is."""
    return ApiError(400, message, code, param)


def busy(message: str, status: int = 429) -> ApiError:
    """No room at the moment."""
    return ApiError(status, message, "overloaded", headers={"retry-after": str(RETRY_SECONDS)})


def of_engine(error: Exception, param: str) -> ApiError:
    """What a client is told of an error of the engine.

    Errors of a prompt say what is wrong with it. Those of the store may name folders of this machine, which are for
    the log alone, and so is all that was not foreseen.

    Args:
        error: that the engine raised.
        param: where the prompt stood in the request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextTooLongError):
        return invalid(param, str(error), "context_length_exceeded")
    if isinstance(error, PromptError):
        return invalid(param, str(error))
    if isinstance(error, StoreError | PacketError):
        return busy("the index or its packets cannot be read at the moment; the server's log says why", 503)
    if isinstance(error, DeviceError):
        return busy("memory does not suffice for this request at the moment; ask again, or for less", 503)
    return ApiError(500, "the server failed on this request; its log says where", "internal_error")
