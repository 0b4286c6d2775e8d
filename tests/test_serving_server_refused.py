"""Bad requests: each is refused in OpenAI's form, says what is wrong, and costs no worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_samples import Served, serving

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.serving.server.backend import EngineBackend

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def one(backbone: Backbone) -> Iterator[Served]:
    """A server without an index, with room for one answer at a time."""
    with serving(EngineBackend(KVPacketEngine(backbone), threads=1), max_body_bytes=100_000) as served:
        yield served


@pytest.fixture(name="served")
def served_fixture(one: Served) -> Iterator[Served]:
    """The same, which still answers whatever came before."""
    yield one
    assert one.chat().status_code == 200


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which must have OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert response.headers["x-request-id"].startswith("req-")
    return error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": "tiny",}',
        b"[]",
        b'"tiny"',
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b"[" * 90_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object(served: Served, content: bytes):
    response = served.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert refused(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"model": None}, "model", "missing_parameter"),
        ({"model": 3}, "model", "invalid_type"),
        ({"messages": None}, "messages", "missing_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_type"),
        ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
        ({"messages": USER * 51}, "messages", "too_many_messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "invalid_type",
        ),
        ({"messages": [USER[0] | {"mood": "glad"}]}, "messages[0].mood", "invalid_value"),
        ({"messages": [USER[0] | {"tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]", "invalid_type"),
        ({"messages": [{"role": "user", "content": "half a \ud800 character"}]}, "messages", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "9"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**6}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, "messages", "context_length_exceeded"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": 1e-9}, None, "invalid_value"),
        ({"top_p": 0}, None, "invalid_value"),
        ({"seed": -1}, None, "invalid_value"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": ["x" * 300]}, "stop", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"best_off": 2}, "best_off", "unknown_parameter"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage", "invalid_type"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
        ({"retrieve": True}, "retrieve", "unsupported_parameter"),
        ({"retrieve": {"k": 0}}, "retrieve.k", "invalid_value"),
        ({"retrieve": {"n": 3}}, "retrieve.n", "unknown_parameter"),
        ({"policy": "magic"}, "policy", "invalid_value"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "invalid_value"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_a_parameter_that_cannot_be_taken(
    served: Served, given: dict[str, Any], param: str | None, code: str, stream: bool
):
    body = {"model": "tiny", "messages": USER, **({"stream": True} if stream else {}), **given}
    response = served.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = refused(response, 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_options_of_a_stream_without_one(served: Served):
    assert refused(served.chat(stream_options={"include_usage": True}), 400)["param"] == "stream_options"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"retrieve": True}, "retrieve"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_a_text_with_a_parameter_that_cannot_be_taken(served: Served, given: dict[str, Any], param: str):
    response = served.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"} | given)
    assert refused(response, 400)["param"] == param


def test_parameters_that_change_nothing_are_taken(served: Served):
    given = {"n": 1, "logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    given |= {"user": "u", "metadata": {"a": "b"}, "frequency_penalty": 0.0, "logit_bias": {}, "seed": None}
    assert served.chat(**given).json()["choices"] == served.chat().json()["choices"]


def test_an_unknown_model_is_not_found_by_the_official_client(served: Served):
    messages: Any = USER
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai.chat.completions.create(model="gpt-4o", messages=messages)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("gpt-4o")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [100_001, 3_000_000])
def test_a_huge_body(served: Served, size: int, chunked: bool):
    content: Any = (b"x" * 10_000 for _ in range(size // 10_000 + 1)) if chunked else b"x" * size
    try:
        response = served.http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    except httpx.TransportError:
        assert (
            size == 3_000_000
        )  # far too much is not read to its end, and a client that still writes may hear no reason
    else:
        assert refused(response, 413)["code"] == "body_too_large"
    assert served.http.get("/healthz").status_code == 200


def test_a_body_that_is_no_json_by_its_header(served: Served):
    response = served.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert refused(response, 415)["code"] == "invalid_content_type"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/other", 404), ("GET", "/v1/completions", 405)])
def test_a_route_that_is_not_there(served: Served, method: str, path: str, status: int):
    response = served.http.request(method, path)
    assert response.status_code == status and response.json()["error"]["message"]


def test_keys_are_asked_for_but_not_by_health_and_metrics(engine: KVPacketEngine):
    with serving(EngineBackend(engine), keys=("right", "other")) as served:
        with pytest.raises(openai.AuthenticationError) as caught:
            served.openai.models.list()
        assert caught.value.code == "invalid_api_key"
        missing = served.http.get("/v1/models")
        assert refused(missing, 401)["code"] == "missing_api_key" and missing.headers["www-authenticate"] == "Bearer"
        for key in ("right", "other"):
            assert [model.id for model in served.openai.with_options(api_key=key).models.list()] == ["tiny"]
        for credentials in ("Bearer righ", "Bearer right!", "Bearer rig\u00e4t", "Bearer", "Basic right", "right"):
            header = {"authorization": credentials.encode()}
            refused(served.http.get("/v1/models", headers=header), 401)
        assert served.http.get("/healthz").status_code == served.http.get("/metrics").status_code == 200


def test_a_page_that_leads_here_by_a_name_of_its_own_is_refused(engine: KVPacketEngine):
    with serving(EngineBackend(engine), hosts=("localhost", "127.0.0.1")) as served:
        assert served.http.get("/v1/models").status_code == 200
        for host in ("evil.example", "evil.example:80", "[", ""):
            assert refused(served.http.get("/v1/models", headers={"host": host}), 403)["code"] == "wrong_host"
