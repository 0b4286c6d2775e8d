"""A context that an earlier prompt filled is gone on with, and gives the answer of a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import CHUNKS

from kvpacket_rag.answer import Answer
from kvpacket_rag.assemble import Assembly
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine

SHORT = GenerationSettings(max_new_tokens=8)


def ask(engine: KVPacketEngine, chunks: list[str], question: str = "Who signed it?", joint: str = "\n\n") -> Answer:
    messages = [Message("system", "Be brief."), Message("user", f"{joint.join(chunks)}\n\nQuestion: {question}")]
    return engine.generate(messages, SHORT)


def fresh(engine: KVPacketEngine, work: Callable[[], Answer]) -> Answer:
    """What an engine answers that remembers no prompt."""
    engine.backbone.pool.drop_idle()
    return work()


@pytest.fixture
def placed(soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the packets written into contexts, preambles among them."""
    soft_engine.encode(CHUNKS)
    soft_engine.backbone.pool.drop_idle()
    found: list[str] = []
    add = Assembly.add

    def noting(self: Assembly, packet: Any) -> Any:
        found.append(packet.packet_id)
        return add(self, packet)

    monkeypatch.setattr(Assembly, "add", noting)
    return found


def test_the_same_hits_in_the_same_order_are_assembled_once(soft_engine: KVPacketEngine, placed: list[str]):
    ask(soft_engine, CHUNKS)
    placed.clear()
    again = ask(soft_engine, CHUNKS, "And when?")
    assert placed == [] and again.usage.chunks_reused == 4 and again.usage.misses == ()
    assert again.token_ids == fresh(soft_engine, lambda: ask(soft_engine, CHUNKS, "And when?")).token_ids


def test_what_was_asked_before_changes_no_forward_of_the_question(
    soft_engine: KVPacketEngine, placed: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Other numbers of tokens in a forward round otherwise, which can turn an answer in 16 bits."""
    read: list[list[int]] = []
    prefill = soft_engine.backbone.prefill

    def noting(bound: Any, texts: Any) -> Any:
        read.append([len(ids) for _, ids in texts])
        return prefill(bound, texts)

    monkeypatch.setattr(soft_engine.backbone, "prefill", noting)
    first, context = ask(soft_engine, CHUNKS), ask(soft_engine, CHUNKS)
    kept = fresh(soft_engine, lambda: ask(soft_engine, CHUNKS))
    assert (first.usage.preamble_tokens, kept.usage.preamble_tokens) == (0, context.usage.preamble_tokens)
    preamble, *questions = read
    assert sum(preamble) == kept.usage.preamble_tokens and questions == [[kept.usage.prefilled_tokens]] * 3


def test_a_prompt_goes_on_behind_the_chunks_it_shares(soft_engine: KVPacketEngine, placed: list[str]):
    ask(soft_engine, CHUNKS)
    placed.clear()
    other = [CHUNKS[0], CHUNKS[1], CHUNKS[3], CHUNKS[2]]
    found = ask(soft_engine, other)
    assert placed == soft_engine.encode(other[2:])
    expected = fresh(soft_engine, lambda: ask(soft_engine, other))
    assert found.token_ids == expected.token_ids and found.usage == expected.usage


def test_text_between_chunks_belongs_to_what_is_shared(soft_engine: KVPacketEngine, placed: list[str]):
    first = ask(soft_engine, CHUNKS[:3], joint="\n\nNext document:\n")
    placed.clear()
    again = ask(soft_engine, CHUNKS[:3], joint="\n\nNext document:\n")
    assert again.token_ids == first.token_ids and placed == []
    other = ask(soft_engine, CHUNKS[:3], joint="\n\nAnother one:\n")
    assert placed == soft_engine.encode(CHUNKS[1:3])
    expected = fresh(soft_engine, lambda: ask(soft_engine, CHUNKS[:3], joint="\n\nAnother one:\n"))
    assert other.token_ids == expected.token_ids


def test_a_request_that_failed_leaves_nothing_that_is_taken_for_written(soft_engine: KVPacketEngine, monkeypatch):
    soft_engine.encode(CHUNKS)
    right = fresh(soft_engine, lambda: ask(soft_engine, CHUNKS, joint="\n\nNext:\n"))
    soft_engine.backbone.pool.drop_idle()
    with monkeypatch.context() as patch:
        patch.setattr(soft_engine.backbone, "prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(soft_engine, CHUNKS, joint="\n\nNext:\n")
    for buffer in soft_engine.backbone.pool._idle[0].buffers:
        buffer.fill_(float("nan"))  # what the failed request did not come to write
    assert ask(soft_engine, CHUNKS, joint="\n\nNext:\n").token_ids == right.token_ids


def test_two_answers_at_once_do_not_share_a_context(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    prompt = [Message("user", "\n\n".join(CHUNKS) + "\n\nQuestion: Who?")]
    right = soft_engine.generate(prompt, SHORT)
    one, two = soft_engine.stream(prompt, SHORT), soft_engine.stream(prompt, SHORT)
    for stream in (one, two, one, two):
        next(stream, "")
    assert one.read_all().token_ids == two.read_all().token_ids == right.token_ids


def test_full_prefill_takes_nothing_from_an_earlier_prompt(soft_engine: KVPacketEngine):
    prompt = [Message("user", "\n\n".join(CHUNKS) + "\n\nQuestion: Who?")]
    for _ in range(2):
        usage = soft_engine.generate(prompt, SHORT, policy="prefill").usage
        assert usage.prefilled_tokens == usage.prompt_tokens


def test_a_chunk_that_was_deleted_is_read_again_though_a_context_holds_it(soft_engine: KVPacketEngine):
    names = soft_engine.encode(CHUNKS)
    ask(soft_engine, CHUNKS)
    soft_engine.store.delete(names[0])
    assert ask(soft_engine, CHUNKS).usage.chunks_reused == 3
