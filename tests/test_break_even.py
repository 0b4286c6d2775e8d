"""Which way a prompt takes: from packets, in full, or the quicker of the two."""

from __future__ import annotations

import pytest
from conftest import CHUNKS

from kvpacket_rag import break_even
from kvpacket_rag.break_even import measure_break_even
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketMissError, PromptError
from kvpacket_rag.finder import ChunkFinder
from kvpacket_rag.reading import Reuse

SHORT = GenerationSettings(max_new_tokens=6)
PROMPT = [Message("user", "\n\n".join(CHUNKS) + "\n\nQuestion: Who?")]


@pytest.mark.parametrize(("break_even_tokens", "way"), [(10_000, "prefill"), (1, "packets")])
def test_auto_takes_the_quicker_way_and_says_which(soft_engine: KVPacketEngine, break_even_tokens: int, way: str):
    soft_engine.encode(CHUNKS)
    soft_engine.break_even_tokens = break_even_tokens
    found = soft_engine.generate(PROMPT, SHORT, policy="auto")
    expected = soft_engine.generate(PROMPT, SHORT, policy=way)
    assert found.policy == expected.policy == way
    assert found.token_ids == expected.token_ids and found.usage.chunks_reused == expected.usage.chunks_reused


def test_it_is_measured_once_and_only_when_asked_for(soft_engine: KVPacketEngine, monkeypatch):
    calls = []
    monkeypatch.setattr("kvpacket_rag.answering.measure_break_even", lambda *_, **__: calls.append(1) or 64)
    soft_engine.generate(PROMPT, SHORT)
    assert calls == []
    for _ in range(2):
        soft_engine.generate(PROMPT, SHORT, policy="auto")
    assert calls == [1]


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_first_length_at_which_packets_win_is_the_answer(engine: KVPacketEngine, on_disk: bool, monkeypatch):
    asked = []

    def seconds(backbone, prefiller, parts):
        prefiller.run(parts, 1)
        asked.append((parts[1].num_tokens, parts[1].packet_id is not None))
        return 1.0 if parts[1].packet_id else parts[1].num_tokens / 50

    monkeypatch.setattr(break_even, "_first_token", seconds)
    assert measure_break_even(engine.backbone, engine.encoder, on_disk) == 64
    assert {length for length, _ in asked} == {16, 32, 64}


def test_where_packets_never_win_everything_is_read(engine: KVPacketEngine, monkeypatch):
    monkeypatch.setattr(break_even, "_first_token", lambda backbone, prefiller, parts: bool(parts[1].packet_id))
    assert measure_break_even(engine.backbone, engine.encoder, False) == engine.context_window


def test_measuring_leaves_the_users_store_alone(soft_engine: KVPacketEngine):
    before = len(soft_engine.store)
    assert soft_engine.break_even_tokens >= 16
    assert len(soft_engine.store) == before


def test_an_unknown_policy_is_refused(soft_engine: KVPacketEngine):
    with pytest.raises(PromptError, match="policy is 'fast', expected 'packets', 'prefill' or 'auto'"):
        soft_engine.generate(PROMPT, SHORT, policy="fast")


def test_a_miss_stays_one_where_the_prompt_is_read_in_full(soft_engine: KVPacketEngine):
    """What was hinted and rewritten is told of, and refused if that was asked for, whichever way is quicker."""
    (name,) = soft_engine.encode(CHUNKS[:1])
    soft_engine.break_even_tokens = 10_000
    prompt = [Message("user", CHUNKS[0].replace("cold", "warm"))]
    answer = soft_engine.generate(prompt, SHORT, policy="auto", reuse=Reuse(hints=(name,)))
    assert answer.policy == "prefill" and [miss.packet_id for miss in answer.usage.misses] == [name]
    with pytest.raises(PacketMissError):
        soft_engine.generate(prompt, SHORT, policy="auto", reuse=Reuse(hints=(name,), on_miss="error"))


def test_the_chunks_are_looked_for_once(soft_engine: KVPacketEngine, monkeypatch):
    soft_engine.encode(CHUNKS)
    soft_engine.break_even_tokens = 10_000
    calls, find = [], ChunkFinder.find
    monkeypatch.setattr(ChunkFinder, "find", lambda *given: calls.append(1) or find(*given))
    counts = []
    for policy in ("packets", "auto", "prefill"):
        calls.clear()
        soft_engine.generate(PROMPT, SHORT, policy=policy)
        counts.append(len(calls))
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.parametrize(("policy", "expected"), [("packets", True), ("prefill", False), ("auto", False)])
def test_packets_are_made_only_for_prompts_that_may_use_them(soft_engine: KVPacketEngine, policy, expected: bool):
    soft_engine.break_even_tokens = 1 + soft_engine.count_tokens(CHUNKS[0])
    assert soft_engine.may_reuse(CHUNKS[0], policy) is expected
    assert soft_engine.may_reuse(CHUNKS[0] + " And more.", policy) is (policy != "prefill")
