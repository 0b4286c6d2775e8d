from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from test_engine import SHORT, ask

from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError


def test_streamed_pieces_join_to_the_generated_text_and_end_at_a_stop_text(engine: KVPacketEngine):
    engine.encode(CHUNKS)
    whole = engine.generate(ask(CHUNKS), GenerationSettings(max_new_tokens=30))
    stop = whole.text[3:6]
    settings = GenerationSettings(max_new_tokens=30, stop=(stop,))
    stream = engine.stream(ask(CHUNKS), settings)
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == whole.text[: whole.text.find(stop)]
    assert stream.answer.finish_reason == "stop" and len(stream.answer.token_ids) < len(whole.token_ids)


def test_a_stop_text_that_stands_in_a_chunk_does_not_cut_the_prompt(engine: KVPacketEngine):
    engine.encode(CHUNKS)
    free = engine.generate(ask(CHUNKS), SHORT)
    assert engine.generate(ask(CHUNKS), replace(SHORT, stop=("harbour office in March",))).text == free.text


def test_requests_do_not_touch_each_other(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    prompts = [ask(list(pair), f"Question {n}?") for n, pair in enumerate(itertools.permutations(CHUNKS, 2))]
    alone = [soft_engine.generate(p, SHORT).token_ids for p in prompts]
    soft_engine.generate(prompts[0], replace(SHORT, stop=("e",)))
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda p: soft_engine.generate(p, SHORT).token_ids, prompts * 2))
    assert together == alone * 2


def test_an_abandoned_stream_frees_its_context_and_leaves_the_callers_modes_alone(engine: KVPacketEngine):
    engine.encode(CHUNKS)
    pool, held = engine.backbone.pool, []
    take, give = pool.take, pool.give_back
    pool.take = lambda *a, **k: held.append(context := take(*a, **k)) or context  # type: ignore[method-assign]
    pool.take_filled = lambda *_: None  # type: ignore[method-assign] # every request takes a context of its own
    pool.give_back = lambda context: (held.remove(context), give(context))[1]  # type: ignore[method-assign]
    try:
        stream = engine.stream(ask(CHUNKS), GenerationSettings(max_new_tokens=50))
        next(stream)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and len(held) == 1
        assert engine.generate(ask(CHUNKS), SHORT).text  # nothing is locked meanwhile
        stream.close()
        assert not held
        next(engine.stream(ask(CHUNKS), SHORT))
        gc.collect()
        assert not held
    finally:
        del pool.take, pool.take_filled, pool.give_back


def test_an_error_in_the_middle_reaches_the_caller_and_the_next_request_works(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    calls, step = [], engine.backbone.step

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("lost the device")
        return step(*arguments)

    monkeypatch.setattr(engine.backbone, "step", failing)
    stream = engine.stream(ask(CHUNKS), SHORT)
    with pytest.raises(RuntimeError, match="lost the device"):
        list(stream)
    with pytest.raises(KVPacketError, match="not finished"):
        _ = stream.answer
    assert engine.generate(ask(CHUNKS), SHORT).usage.completion_tokens > 0


def test_a_lock_is_never_held_between_two_pieces(engine: KVPacketEngine):
    stream = engine.stream(ask(CHUNKS), SHORT)
    next(stream)
    free = threading.Event()

    def take_and_release() -> None:
        with engine.backbone.runner.lock:
            free.set()

    threading.Thread(target=take_and_release).start()
    assert free.wait(5)


def test_closing_from_another_thread_lets_a_running_step_end_and_frees_the_context(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    inside, go_on, step = threading.Event(), threading.Event(), engine.backbone.step

    def slow(*arguments: Any) -> Any:
        inside.set()
        go_on.wait(5)
        return step(*arguments)

    monkeypatch.setattr(engine.backbone, "step", slow)
    freed: list[Any] = []
    monkeypatch.setattr(engine.backbone.pool, "give_back", freed.append)
    stream = engine.stream(ask(CHUNKS), SHORT)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert inside.wait(5)
    stream.close()
    assert not freed
    go_on.set()
    reader.join(5)
    assert len(freed) == 1 and next(stream, None) is None
