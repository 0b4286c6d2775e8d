"""One call of a model, on its way to the engine and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvpacket_rag import Answer, AnswerStream, MemoryStore, Message, Miss, Reuse, Usage
from llama_index_kvpacket.responses import Raw, raw
from llama_index_kvpacket.retrieved import ENCODED_NOW, Prepared

if TYPE_CHECKING:
    from llama_index_kvpacket.configuration import ConfiguredLLM

logger = logging.getLogger(__name__)

Prompt = str | list[Message]


class Request:
    """The one way to the engine.

    Nothing happens, and no error is raised, before it is started.

    Args:
        llm: whose fields apply where the call says nothing else.
        prompt: makes it.
        arguments: of the call.
    """

    def __init__(self, llm: ConfiguredLLM, prompt: Callable[[], Prompt], arguments: Mapping[str, Any]) -> None:
        self._llm = llm
        self._prompt = prompt
        self._arguments = arguments
        self._prepared = Prepared()

    def start(self) -> AnswerStream:
        """Check the prompt, and encode retrieved chunks in it that have no packet."""
        llm, call = self._llm, dict(self._arguments)
        template = {**llm.chat_template_kwargs, **(call.pop("chat_template_kwargs", None) or {})}
        policy = call.pop("policy", None) or llm.policy
        reuse = Reuse(
            call.pop("match", None) or llm.match,
            tuple(call.pop("hints", None) or llm.hints),
            call.pop("on_miss", None) or llm.on_miss,
        )
        settings, prompt = llm.generation_settings(call), self._prompt()
        if policy == "packets" and reuse.match != "off":
            reuse = self._prepare(prompt, reuse)
        return llm.engine.stream(prompt, settings, policy=policy, template_kwargs=template, reuse=reuse)

    def _prepare(self, prompt: Prompt, reuse: Reuse) -> Reuse:
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        in_memory = isinstance(self._llm.engine.store, MemoryStore)
        encode = self._llm.encode_retrieved and in_memory and reuse.on_miss != "error"
        prepared = self._llm.learner.prepare(texts, encode)
        misses = tuple(miss for miss in prepared.misses if miss.packet_id not in reuse.hints)
        reuse.act_on([*misses, *(Miss(name, ENCODED_NOW) for name in prepared.encoded)])
        self._prepared = dataclasses.replace(prepared, misses=misses)
        expected = prepared.held if reuse.match == "hints" and not reuse.hints else tuple(prepared.encoded)
        return dataclasses.replace(reuse, hints=(*reuse.hints, *expected))

    def details(self, answer: Answer) -> Raw:
        """What ``response.raw`` tells of the answer, and ``llm.last_usage`` from now on."""
        usage, times, seconds = self._count(answer.usage), answer.timings, self._prepared.seconds
        times = dataclasses.replace(
            times,
            load_seconds=times.load_seconds + seconds,
            ttft_seconds=times.ttft_seconds + seconds,
            total_seconds=times.total_seconds + seconds,
        )
        details = raw(dataclasses.replace(answer, usage=usage, timings=times))
        self._llm.note(details["usage"])
        logger.info(
            "%d of %d prompt tokens came from packets of %d chunks; %d chunks missed%s",
            usage.packet_tokens,
            usage.prompt_tokens,
            usage.chunks_reused,
            len(usage.misses),
            "".join(f"; {reason}" for reason in dict.fromkeys(miss.reason for miss in usage.misses)),
        )
        return details

    def _count(self, usage: Usage) -> Usage:
        """The engine's count, with chunks that were encoded just for this prompt as misses."""
        told = {miss.packet_id for miss in usage.misses}
        encoded = {name: tokens for name, tokens in self._prepared.encoded.items() if name not in told}
        more = [*self._prepared.misses, *(Miss(name, ENCODED_NOW) for name in encoded)]
        return dataclasses.replace(
            usage,
            packet_tokens=usage.packet_tokens - sum(encoded.values()),
            prefilled_tokens=usage.prefilled_tokens + sum(encoded.values()),
            chunks_reused=usage.chunks_reused - len(encoded),
            misses=(*usage.misses, *(miss for miss in more if miss.packet_id not in told)),
        )
