"""A vLLM behind this server: prompts are cut into packets and text here, and answered there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.reading import Reuse
from kvpacket_rag.serving.server.backend import Event, Finished, Started, look_up
from kvpacket_rag.serving.server.calls import Call
from kvpacket_rag.serving.server.errors import ApiError, busy, invalid
from kvpacket_rag.serving.vllm_prompt import VLLMPrompt, VLLMPrompter

_TIMEOUT = httpx.Timeout(10.0, read=300.0)  # seconds; vLLM may let a request wait for its turn


@dataclass(frozen=True, slots=True)
class VLLMAddress:
    """Where a vLLM listens.

    Attributes:
        url: up to and without ``/v1``.
        key: that it asks for; empty for none.
    """

    url: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def find_model(self) -> VLLMModel:
        """The model it serves.

        Raises:
            KVPacketError: nobody answers there, or something else than a vLLM does.
        """
        try:
            found = httpx.get(f"{self.url}/v1/models", headers=self.headers, timeout=_TIMEOUT)
            model = found.raise_for_status().json()["data"][0]
            window = (
                model.get("max_model_len") or model["metadata"]["max_request_context_length"]
            )  # the latter of Ray's
            return VLLMModel(str(model["id"]), int(window))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise KVPacketError(
                f"no vLLM answers at {self.url} ({type(error).__name__}: {error}); start it first, with the connector "
                "that reads this index"
            ) from error


@dataclass(frozen=True, slots=True)
class VLLMModel:
    """What a vLLM serves.

    Attributes:
        name: of the model there.
        window: positions a prompt and its answer may take together.
    """

    name: str
    window: int


class VLLMBackend:
    """Answers by a vLLM whose connector reads this index's packets.

    Args:
        engine: knows the packets and encodes those that are missing; it writes no answers.
        rag: where ``retrieve`` looks; None to refuse it.
        address: of vLLM.
        model: that it serves.
        threads: prompts cut at a time.
    """

    def __init__(
        self, engine: KVPacketEngine, rag: KVPacketRAG | None, address: VLLMAddress, model: VLLMModel, threads: int = 4
    ) -> None:
        self._engine = engine
        self._rag = rag
        self._model = model
        self._prompter = VLLMPrompter(engine)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpacket-prompt")
        unlimited = httpx.Limits(max_connections=None)  # the places of the server are the limit
        self._client = httpx.AsyncClient(
            base_url=address.url, headers=address.headers, timeout=_TIMEOUT, limits=unlimited
        )

    @property
    def fingerprint(self) -> str:
        """Of model, adapter and number format."""
        return self._engine.signature.digest

    async def answer(self, call: Call) -> AsyncGenerator[Event, None]:
        """See :class:`~kvpacket_rag.serving.server.backend.Backend`."""
        if call.policy == "auto":
            raise invalid("policy", "policy 'auto' is measured for the engine alone; expected 'packets' or 'prefill'")
        loop = asyncio.get_running_loop()
        started, prompt = await loop.run_in_executor(self._threads, self._cut, call)
        yield started
        reason, usage = "length", dict[str, Any]()
        async with aclosing(self._events(self._body(call, prompt))) as events:
            async for found in events:
                for choice in found.get("choices") or ():
                    if text := choice.get("text"):
                        yield str(text)
                    reason = choice.get("finish_reason") or reason
                usage = found.get("usage") or usage
        if reason == "error" or not usage:
            raise _broken()
        yield _finished(reason, usage, prompt)

    def _cut(self, call: Call) -> tuple[Started, VLLMPrompt]:
        prompt, started = look_up(call, self._rag)
        reuse = Reuse("off" if call.policy == "prefill" else "auto")
        return started, self._prompter.prompt(prompt, template_kwargs=call.template_kwargs, reuse=reuse)

    def _body(self, call: Call, prompt: VLLMPrompt) -> dict[str, Any]:
        settings, room = call.settings, self._model.window - len(prompt.token_ids)
        if room < 1 or (call.is_limited and settings.max_new_tokens > room):
            told = (
                f"the prompt leaves room for {max(room, 0)} tokens, and the answer may take {settings.max_new_tokens}"
            )
            raise invalid(call.param, told, "context_length_exceeded")
        body = prompt.body() | {
            "model": self._model.name,
            "max_tokens": min(settings.max_new_tokens, room),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": settings.min_p,
            "repetition_penalty": settings.repetition_penalty,
            "stop": list(settings.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if settings.seed is None else body | {"seed": settings.seed}

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What vLLM sends, piece by piece; its connection is closed when nobody reads on, which stops it."""
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code in (429, 503):
                    raise busy("the model server has no room at the moment", 503)
                if response.status_code != 200:
                    raise ApiError(
                        502, f"the model server answered with status {response.status_code}", "backend_error"
                    )
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _decoded(data)
        except httpx.HTTPError as error:
            raise ApiError(
                502, f"the model server cannot be reached: {type(error).__name__}", "backend_error"
            ) from error

    async def close(self) -> None:
        """Let threads and connections go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()


def _decoded(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "error" in found:
        raise _broken()
    return found


def _broken(told: str = "the model server broke off this answer") -> ApiError:
    return ApiError(502, told, "backend_error")


def _finished(reason: str, usage: dict[str, Any], prompt: VLLMPrompt) -> Finished:
    detail = {
        "policy": "packets" if prompt.claim else "prefill",
        "packet_tokens": prompt.packet_tokens,
        "prefilled_tokens": len(prompt.token_ids) - prompt.packet_tokens,
        "chunks_reused": len(prompt.claim.packets) if prompt.claim else 0,
        "chunks_missed": [miss.packet_id for miss in prompt.misses],
    }
    counts = len(prompt.token_ids), prompt.packet_tokens, int(usage.get("completion_tokens") or 0)
    return Finished(reason, *counts, detail)
