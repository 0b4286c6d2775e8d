"""The server in front of a vLLM, played here by a few lines: what it is sent, and what becomes of what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from conftest import CHUNKS
from server_samples import Served, eventually, rag_fixture, running, serving  # noqa: F401
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvpacket_rag.chat import Message
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.serving.server.vllm_backend import VLLMAddress, VLLMBackend, VLLMModel
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter

QUESTION = f"{CHUNKS[1]}\n\n{CHUNKS[3]}\n\nWho signed it?"
CHAT: Any = [{"role": "user", "content": QUESTION}]
END = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


class PlayedVLLM:
    """Answers every request with ``events``."""

    def __init__(self) -> None:
        self.status = 200
        self.window: dict[str, Any] = {"max_model_len": 1500}
        self.asked: list[dict[str, Any]] = []
        self.left = 0
        self.forever = False
        self.events: list[Any] = [
            {"choices": [{"text": "Ada "}]},
            {"choices": [{"text": "Marlow", "finish_reason": "stop"}]},
            END,
            "[DONE]",
        ]
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "served", **self.window}]})),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _complete(self, request: Request) -> Any:
        self.asked.append(await request.json())
        if self.status != 200:
            return JSONResponse({"error": {"message": "secret"}}, self.status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        try:
            for found in self.events:
                yield f"data: {found if isinstance(found, str) else json.dumps(found)}\n\n"
            while self.forever:
                yield 'data: {"choices": [{"text": "x"}]}\n\n'
                await asyncio.sleep(0.01)
        finally:
            self.left += 1


@pytest.fixture(name="vllm")
def vllm_fixture() -> PlayedVLLM:
    return PlayedVLLM()


@pytest.fixture(name="address")
def address_fixture(vllm: PlayedVLLM) -> Iterator[str]:
    """Where it listens."""
    with running(vllm.app) as served:
        yield served.url


@pytest.fixture(name="served")
def served_fixture(rag: KVPacketRAG, address: str) -> Iterator[Served]:
    place = VLLMAddress(address, "key")
    with serving(VLLMBackend(rag.engine, rag, place, place.find_model())) as served:
        yield served


def test_it_is_sent_the_prompt_in_packets_with_the_clients_settings(served: Served, rag: KVPacketRAG, vllm: PlayedVLLM):
    own = VLLMPrompter(rag.engine).prompt([Message("user", QUESTION)])
    found = served.openai.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop="\n"
    )
    (asked,) = vllm.asked
    assert own.claim and asked | own.body() == asked and asked["model"] == "served" and asked["stream"] is True
    told = {name: asked[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")}
    assert told == {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "stop": ["\n"]}
    assert found.choices[0].message.content == "Ada Marlow" and found.choices[0].finish_reason == "stop"
    assert found.usage and found.usage.completion_tokens == 3 and found.usage.prompt_tokens == len(own.token_ids)
    assert found.usage.prompt_tokens_details
    assert found.usage.prompt_tokens_details.cached_tokens == own.packet_tokens > 0


def test_streams_and_retrieved_documents_pass_through(served: Served, vllm: PlayedVLLM):
    stream = served.openai.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, extra_body={"retrieve": {"k": 2}}
    )
    first, *rest = stream
    assert first.model_extra and len(first.model_extra["sources"]) == 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in [first, *rest]) == "Ada Marlow"
    assert len(vllm.asked[0]["kv_transfer_params"]["kvpacket"]["packets"]) == 2


def test_full_prefill_names_no_packets(served: Served, vllm: PlayedVLLM):
    served.chat(messages=CHAT, policy="prefill")
    assert "kv_transfer_params" not in vllm.asked[0]
    assert served.chat(messages=CHAT, policy="auto").json()["error"]["param"] == "policy"


@pytest.mark.parametrize(
    ("status", "events", "expected"),
    [
        (500, [], 502),
        (400, [], 502),
        (503, [], 503),
        (200, [{"error": {"message": "secret"}}], 502),
        (200, ["{"], 502),
        (200, [{"choices": [{"text": "", "finish_reason": "error"}]}, END], 502),
        (200, [], 502),
    ],
)
def test_what_goes_wrong_there_is_told_in_openais_form(
    served: Served, vllm: PlayedVLLM, status: int, events: list[Any], expected: int
):
    good, vllm.status, vllm.events = vllm.events, status, events
    response = served.chat(messages=CHAT)
    assert response.status_code == expected and response.json()["error"]["code"] in ("backend_error", "overloaded")
    assert "secret" not in response.text
    vllm.status, vllm.events = 200, good
    assert served.chat(messages=CHAT).status_code == 200


def test_a_client_that_leaves_ends_the_answer_there(served: Served, vllm: PlayedVLLM):
    vllm.forever = True
    stream = served.openai.chat.completions.create(model="tiny", messages=CHAT, stream=True)
    next(stream)
    assert vllm.left == 0
    stream.close()
    eventually(lambda: vllm.left == 1)


def test_a_limit_beyond_its_window_is_refused_and_our_own_is_lowered(served: Served, vllm: PlayedVLLM):
    with pytest.raises(openai.BadRequestError, match="leaves room"):
        served.openai.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1500)
    long = [{"role": "user", "content": "word " * 492}]
    assert served.chat(messages=long * 2).json()["error"]["code"] == "context_length_exceeded"
    assert vllm.asked == []
    answer = served.http.post("/v1/chat/completions", json={"model": "tiny", "messages": long}).json()
    room = 1500 - answer["usage"]["prompt_tokens"]
    assert 0 < room < 12 and vllm.asked[0]["max_tokens"] == room


def test_the_window_of_ray_serve_stands_elsewhere(address: str, vllm: PlayedVLLM):
    vllm.window = {"metadata": {"max_request_context_length": 700}}
    assert VLLMAddress(address).find_model() == VLLMModel("served", 700)


def test_nobody_there_is_an_error(address: str, vllm: PlayedVLLM):
    assert VLLMAddress(address).find_model() == VLLMModel("served", 1500)
    for vllm.window in ({}, {"metadata": None}, {"max_model_len": "long"}):
        with pytest.raises(KVPacketError, match="no vLLM answers"):
            VLLMAddress(address).find_model()
    with pytest.raises(KVPacketError, match="no vLLM answers"):
        VLLMAddress("http://127.0.0.1:1").find_model()
