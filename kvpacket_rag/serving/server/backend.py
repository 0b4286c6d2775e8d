"""What writes answers: the events of an answer on its way, and the engine of this process as their source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kvpacket_rag.answer import Answer, AnswerStream
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import ContextTooLongError
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.reading import Prompt
from kvpacket_rag.serving.server.calls import Call
from kvpacket_rag.serving.server.errors import busy, invalid


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was taken.

    Attributes:
        sources: of the chunks that were retrieved for it, best first; None where none were asked for.
    """

    sources: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete.

    Attributes:
        reason: ``"stop"`` or ``"length"``.
        prompt_tokens: of the whole prompt.
        cached_tokens: of those, the ones that were not read, for packets or an earlier prompt held them.
        completion_tokens: written.
        detail: more of what was reused, counts and reasons.
        first_token_seconds: from the moment the prompt was handed over.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    detail: Mapping[str, Any] = field(default_factory=dict)
    first_token_seconds: float | None = None


Event = Started | str | Finished


def look_up(call: Call, rag: KVPacketRAG | None) -> tuple[Prompt, Started]:
    """The prompt, with retrieved chunks before the question where the call asks for them.

    Raises:
        ApiError: it asks for them, and there is no index, nothing in it, or no question.
        StoreError: the index cannot be read.
    """
    if call.retrieve is None or isinstance(call.prompt, str):
        return call.prompt, Started()
    if rag is None:
        raise invalid("retrieve", "this server has no index to retrieve from", "unsupported_parameter")
    *before, last = call.prompt
    if last.role != "user":
        raise invalid("retrieve", "the last message is not the user's, so there is no question to look up")
    if not len(rag.index):
        raise busy("the index holds no chunks yet; add documents first", 503)
    hits = rag.retrieve(call.retrieve.query or last.content, call.retrieve.k)
    *instructions, question = rag.messages(last.content, hits)
    if any(message.role == "system" for message in before):
        instructions = []  # the client's own stand
    return [*instructions, *before, question], Started([hit.as_source() for hit in hits])


class Backend(Protocol):
    """Writes answers for the server. Who leaves the events unread stops the writing."""

    @property
    def fingerprint(self) -> str:
        """What answers depend on beside the request."""
        ...

    def answer(self, call: Call) -> AsyncGenerator[Event, None]:
        """The events of an answer: :class:`Started`, pieces of text, :class:`Finished`.

        Raises:
            ApiError: the request cannot be answered.
            KVPacketError: neither can the engine.
        """
        ...

    async def close(self) -> None:
        """Stop what still runs."""
        ...


class EngineBackend:
    """Answers by an engine in this process, on a few threads.

    A thread writes its answer as fast as it can, however slowly the client reads, and is free for the next one then.

    Args:
        engine: model and packets.
        rag: where ``retrieve`` looks; None to refuse it.
        threads: answers written at a time.
    """

    def __init__(self, engine: KVPacketEngine, rag: KVPacketRAG | None = None, threads: int = 4) -> None:
        self._engine = engine
        self._rag = rag
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpacket-answer")

    @property
    def fingerprint(self) -> str:
        """Of model, adapter and number format."""
        return self._engine.signature.digest

    async def answer(self, call: Call) -> AsyncGenerator[Event, None]:
        """See :class:`Backend`."""
        job = _Job(self, call, asyncio.get_running_loop())
        future = self._threads.submit(job.run)
        try:
            while True:
                event = await job.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            future.cancel()
            job.leave()

    async def close(self) -> None:
        """Wait for the threads, whose answers nobody reads any more."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def begin(self, call: Call) -> tuple[AnswerStream, Started]:
        """Look up documents if asked to, and hand the prompt to the engine."""
        prompt, started = look_up(call, self._rag)
        return self._stream(call, prompt), started

    def _stream(self, call: Call, prompt: Prompt) -> AnswerStream:
        answer = partial(self._engine.stream, prompt, policy=call.policy, template_kwargs=call.template_kwargs)
        try:
            return answer(call.settings)
        except ContextTooLongError as error:
            if call.is_limited or error.room < 1:
                raise
            return answer(replace(call.settings, max_new_tokens=error.room))  # our own limit, so what fits will do


class _Job:
    """One answer on its thread, and the way of its events to the event loop."""

    def __init__(self, backend: EngineBackend, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._backend = backend
        self._call = call
        self._loop = loop
        self._stream: AnswerStream | None = None
        self._left = False

    def run(self) -> None:
        """Write the answer."""
        try:
            if self._left:
                return
            self._stream, started = self._backend.begin(self._call)
            if self._left:
                self._stream.close()
            self._tell(started)
            for piece in self._stream:
                self._tell(piece)
            if not self._left:
                self._tell(_finished(self._stream.answer))
        except BaseException as error:  # whatever it is, who waits for the answer must hear of it
            self._tell(error)

    def leave(self) -> None:
        """Nobody waits any more: stop at the next token and give memory and packets back."""
        self._left = True
        if self._stream is not None:
            self._stream.close()

    def _tell(self, event: Event | BaseException) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


def _finished(answer: Answer) -> Finished:
    usage = answer.usage
    detail = {
        "policy": answer.policy,
        "packet_tokens": usage.packet_tokens,
        "preamble_tokens": usage.preamble_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "chunks_reused": usage.chunks_reused,
        "chunks_missed": [miss.packet_id for miss in usage.misses],  # reasons may name folders, so they are for the log
        "timings": asdict(answer.timings),
    }
    cached = usage.packet_tokens + usage.preamble_tokens
    counts = usage.prompt_tokens, cached, usage.completion_tokens
    return Finished(answer.finish_reason, *counts, detail, answer.timings.ttft_seconds)
