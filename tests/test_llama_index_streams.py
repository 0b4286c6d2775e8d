"""What happens around an answer on its way: event loops, consumers that leave, and errors half way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index_kvpacket import KVPacketLLM, KVPacketVectorStore
from llama_index_kvpacket.responses import SharedStream
from llama_index_samples import index_of, nodes

from kvpacket_rag import ContextTooLongError, GenerationSettings, KVPacketEngine, Message
from kvpacket_rag.learner import Prepared

ASYNC = ["achat", "acomplete", "astream_chat", "astream_complete"]
TEXT = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho signed the lease?"


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    engine.encode(CHUNKS)
    return KVPacketLLM(engine=engine, max_new_tokens=12)


@pytest.fixture
def contexts(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Contexts that are in use."""
    pool, held = llm.engine.backbone.pool, []
    take, give = pool.take, pool.give_back
    monkeypatch.setattr(pool, "take", lambda *a, **k: held.append(context := take(*a, **k)) or context)
    refilled = pool.take_filled
    monkeypatch.setattr(pool, "take_filled", lambda *a: (context := refilled(*a)) and (held.append(context) or context))
    monkeypatch.setattr(pool, "give_back", lambda context: (held.remove(context), give(context))[1])
    return held


@pytest.fixture
def events(llm: KVPacketLLM) -> LlamaDebugHandler:
    """Keeps every event with its payload, exceptions and their tracebacks included."""
    handler = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([handler])
    return handler


@pytest.fixture
def slow(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes a step of the model take 0.03 s; notes when each began."""
    begun: list[float] = []
    step = llm.engine.backbone.step

    def slowly(*args: Any) -> Any:
        begun.append(time.perf_counter())
        time.sleep(0.03)
        return step(*args)

    monkeypatch.setattr(llm.engine.backbone, "step", slowly)
    return begun


def failing(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of the next answer fails."""
    step, calls = llm.engine.backbone.step, iter(range(100))

    def step_or_fail(*args: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("device lost")
        return step(*args)

    monkeypatch.setattr(llm.engine.backbone, "step", step_or_fail)


async def longest_pause(work: Any) -> float:
    """Seconds for which the event loop stood still while ``work`` ran."""
    task, pauses = asyncio.ensure_future(work), [0.0]
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        pauses.append(time.perf_counter() - before)
    await task
    return max(pauses)


async def read(llm: KVPacketLLM, method: str, **kwargs: Any) -> list[Any]:
    """All responses of an async method."""
    given = [ChatMessage(content=TEXT)] if "chat" in method else TEXT
    result = await getattr(llm, method)(given, **kwargs)
    return [response async for response in result] if "stream" in method else [result]


@pytest.mark.parametrize("method", ASYNC)
async def test_the_event_loop_goes_on_while_the_model_works(llm: KVPacketLLM, slow: list[float], method: str):
    assert await longest_pause(read(llm, method)) < 0.03 * len(slow) / 2


@pytest.mark.parametrize("method", ASYNC)
async def test_it_goes_on_while_retrieved_chunks_are_encoded(
    llm: KVPacketLLM, method: str, monkeypatch: pytest.MonkeyPatch
):
    begun: list[float] = []
    monkeypatch.setattr(
        llm.engine.learner, "prepare", lambda *_, encode: begun.append(time.sleep(0.4) or 0) or Prepared()
    )
    assert await longest_pause(read(llm, method, max_tokens=1)) < 0.2 and len(begun) == 1


async def test_async_calls_side_by_side_answer_as_one_by_one(llm: KVPacketLLM):
    texts = [f"{chunk}\n\nWhat is said?" for chunk in CHUNKS]
    expected = [llm.complete(text).text for text in texts]
    assert [r.text for r in await asyncio.gather(*map(llm.acomplete, texts))] == expected
    with ThreadPoolExecutor(4) as threads:
        assert [r.text for r in threads.map(llm.complete, texts)] == expected


def test_a_consumer_that_leaves_frees_the_context_though_a_handler_keeps_the_exception(
    llm: KVPacketLLM, contexts: list[Any], events: LlamaDebugHandler
):
    stream = llm.stream_complete(TEXT)
    next(stream)
    assert len(contexts) == 1 and torch.is_grad_enabled()
    del stream
    assert contexts == []
    (_, end) = events.get_event_pairs(CBEventType.LLM)[0]
    assert isinstance(end.payload[EventPayload.EXCEPTION], GeneratorExit)
    assert llm.complete(TEXT).text == llm.engine.generate([Message("user", TEXT)], GenerationSettings(12)).text


async def test_an_async_consumer_that_leaves_frees_the_context(
    llm: KVPacketLLM, contexts: list[Any], events: LlamaDebugHandler
):
    async for _ in (stream := await llm.astream_complete(TEXT)):
        break
    assert len(contexts) == 1
    await stream.aclose()
    assert contexts == [] and (await llm.acomplete(TEXT)).text == llm.complete(TEXT).text


@pytest.mark.parametrize("method", ASYNC)
async def test_cancelling_stops_the_model_at_the_next_token(
    llm: KVPacketLLM, slow: list[float], contexts: list[Any], method: str
):
    task = asyncio.create_task(read(llm, method, max_tokens=200))
    while len(slow) < 3:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.2)
    assert contexts == [] and len(slow) < 8


@pytest.mark.parametrize("method", ["complete", "acomplete", "stream_complete", "astream_complete"])
async def test_an_error_at_the_third_token_is_raised_at_once_and_the_next_call_works(
    llm: KVPacketLLM, contexts: list[Any], events: LlamaDebugHandler, monkeypatch: pytest.MonkeyPatch, method: str
):
    expected = llm.complete(TEXT).text
    failing(llm, monkeypatch)
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="device lost"):
        result = getattr(llm, method)(TEXT)
        result = await result if method.startswith("a") else result
        _ = [r async for r in result] if method.startswith("as") else list(result)
    assert time.perf_counter() - began < 1 and contexts == []
    assert len(events.get_event_pairs(CBEventType.LLM)) == 2 and llm.complete(TEXT).text == expected


def test_a_stream_closed_while_a_step_runs_is_closed_by_the_reader(
    llm: KVPacketLLM, slow: list[float], contexts: list[Any]
):
    stream = SharedStream(lambda: llm.engine.stream([Message("user", TEXT)], GenerationSettings(100))).start()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(lambda: [*iter(stream.read, None)])
        while len(slow) < 3:
            time.sleep(0.005)
        stream.close()
        assert len(reading.result(timeout=2)) < 10
    assert contexts == []


@pytest.mark.parametrize("method", ["stream_chat", "stream_complete", "astream_chat", "astream_complete"])
async def test_every_event_that_begins_ends_though_nobody_reads_the_stream(
    llm: KVPacketLLM, events: LlamaDebugHandler, method: str
):
    def open_events() -> int:
        return len(events.get_events(CBEventType.LLM)) - 2 * len(events.get_event_pairs(CBEventType.LLM))

    async def begin(text: str) -> Any:
        found = getattr(llm, method)([ChatMessage(content=text)] if "chat" in method else text)
        return await found if method.startswith("a") else found

    unread = await begin(TEXT)
    assert events.get_events(CBEventType.LLM) == []
    with pytest.raises(ContextTooLongError):
        await begin("word " * 3000)
    assert len(events.get_event_pairs(CBEventType.LLM)) == 1 and open_events() == 0
    _ = [piece async for piece in unread] if method.startswith("a") else list(unread)
    assert len(events.get_event_pairs(CBEventType.LLM)) == 2 and open_events() == 0


def test_a_query_engines_stream_that_nobody_reads_yet_has_no_usage(llm: KVPacketLLM):
    store = KVPacketVectorStore(llm.engine)
    index = index_of(store, nodes())
    asking = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=2)
    for count in (1, 2):
        answer = asking.query("Who signed the lease?")
        assert llm.last_usage is None
        assert str(answer) and len(llm.usages) == count and llm.last_usage is llm.usages[-1]


def test_a_stream_nobody_reads_takes_no_context(llm: KVPacketLLM, contexts: list[Any]):
    stream: Iterator[Any] = llm.stream_complete(TEXT)
    assert contexts == []
    assert len(list(stream)) > 3 and contexts == []


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_a_stream_that_is_not_read_to_its_end_has_no_usage(llm: KVPacketLLM, method: str):
    llm.complete("Hi")
    assert llm.last_usage is not None
    stream = getattr(llm, method)([ChatMessage(content=TEXT)] if "chat" in method else TEXT)
    assert next(stream) and llm.last_usage is None and llm.hinted([]).last_usage is None
    stream.close()
    assert llm.last_usage is None and len(llm.usages) == 1
    assert len(list(llm.stream_complete(TEXT))) > 3 and llm.last_usage["chunks_reused"] == 2


@pytest.mark.parametrize("method", ["stream_complete", "astream_complete"])
async def test_characters_of_several_tokens_are_streamed_whole(
    llm: KVPacketLLM, method: str, monkeypatch: pytest.MonkeyPatch
):
    text = "caf\u00e9 \u6e2f\u53e3 \U0001f469\u200d\U0001f469\u200d\U0001f467 \ud55c\uae00 \u05e9\u05dc\u05d5\u05dd"
    ids = iter([*llm.token_ids(text), 2])
    monkeypatch.setattr("kvpacket_rag.writing.Sampler.pick", lambda sampler, logits: next(ids))
    seen = (
        await read(llm, method, max_tokens=99) if method[0] == "a" else list(llm.stream_complete(TEXT, max_tokens=99))
    )
    assert "".join(response.delta for response in seen) == text == seen[-1].text
    assert not any("\ufffd" in response.delta for response in seen) and len(seen) > 10
