"""What a request may reuse, and what happens when it cannot."""

from __future__ import annotations

import copy
import logging

import pytest
from conftest import CHUNKS

from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketMissError, PromptError
from kvpacket_rag.reading import Reuse

SHORT = GenerationSettings(max_new_tokens=4)


def ask(*chunks: str) -> list[Message]:
    return [Message("user", "\n\n".join([*chunks, "Question: Who signed it?"]))]


def names(engine: KVPacketEngine) -> tuple[str, ...]:
    return tuple(engine.encode(CHUNKS[:3]))


def test_hints_alone_are_looked_for(engine: KVPacketEngine) -> None:
    first, second, _ = names(engine)
    usage = engine.generate(ask(*CHUNKS[:3]), SHORT, reuse=Reuse("hints", (second,))).usage
    assert usage.chunks_reused == 1 and usage.packet_tokens == engine.count_tokens(CHUNKS[1])
    assert engine.generate(ask(*CHUNKS[:3]), SHORT, reuse=Reuse("auto", (first,))).usage.chunks_reused == 3


def test_a_hint_whose_text_the_prompt_changed_is_a_miss(engine: KVPacketEngine) -> None:
    hints = names(engine)[:2]
    usage = engine.generate(ask(CHUNKS[0], repr([CHUNKS[1]])[2:9]), SHORT, reuse=Reuse(hints=hints)).usage
    assert [(miss.packet_id, "not in the prompt" in miss.reason) for miss in usage.misses] == [(hints[1], True)]


def test_a_hint_inside_a_larger_chunk_is_no_miss(engine: KVPacketEngine) -> None:
    (inner, _, _), (outer,) = names(engine), engine.encode([f"{CHUNKS[0]} {CHUNKS[1]}"])
    answer = engine.generate(ask(f"{CHUNKS[0]} {CHUNKS[1]}"), SHORT, reuse=Reuse(hints=(inner, outer)))
    assert answer.packet_ids == (outer,) and answer.usage.chunks_reused == 1 and not answer.usage.misses


def test_off_reads_the_prompt_in_full(engine: KVPacketEngine) -> None:
    hints = names(engine)
    off = engine.generate(ask(*CHUNKS[:3]), SHORT, reuse=Reuse("off", hints))
    full = engine.generate(ask(*CHUNKS[:3]), SHORT, policy="prefill")
    assert off.token_ids == full.token_ids and off.usage.packet_tokens == 0 and not off.usage.misses


def test_a_miss_is_an_error_where_that_is_asked(engine: KVPacketEngine) -> None:
    hints = names(engine)
    with pytest.raises(PacketMissError, match=f"chunk {hints[2][:12]} is not reused: it was retrieved"):
        engine.stream(ask(*CHUNKS[:2]), SHORT, reuse=Reuse(hints=hints, on_miss="error"))
    with pytest.raises(PacketMissError, match="knows no such chunk"):
        engine.stream(ask(*CHUNKS[:2]), SHORT, reuse=Reuse(hints=("f" * 64,), on_miss="error"))


def test_a_packet_that_went_is_an_error_before_any_text(engine: KVPacketEngine) -> None:
    names(engine)
    strict = Reuse(on_miss="error")
    stream = engine.stream(ask(*CHUNKS[:3]), SHORT, reuse=strict)
    for name in names(engine):
        engine.store.delete(name)
    with pytest.raises(PacketMissError):
        next(stream)
    names(engine)
    assert engine.generate(ask(*CHUNKS[:3]), SHORT, reuse=strict).usage.chunks_reused == 3  # nothing was left held


def test_a_miss_is_told_where_that_is_asked(engine: KVPacketEngine, caplog: pytest.LogCaptureFixture) -> None:
    hints = names(engine)
    with caplog.at_level(logging.WARNING):
        engine.generate(ask(CHUNKS[0]), SHORT, reuse=Reuse(hints=hints[:1], on_miss="warn"))
        assert not caplog.records
        engine.generate(ask(CHUNKS[0]), SHORT, reuse=Reuse(hints=hints[:2], on_miss="warn"))
    assert [hints[1][:12] in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("wrong", [{"match": "all"}, {"on_miss": "ignore"}, {"hints": "abc"}])
def test_unknown_words_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(PromptError, match=next(iter(wrong))):
        Reuse(**wrong)  # type: ignore[arg-type]


def test_a_chunk_too_short_to_be_looked_for_is_no_miss(engine: KVPacketEngine) -> None:
    (short,) = engine.encode(["Yes."])
    assert not engine.generate(ask("Yes."), SHORT, reuse=Reuse(hints=(short,), on_miss="error")).usage.misses


def test_control_strings_in_a_chunk_are_plain_text_though_it_is_not_hinted(engine: KVPacketEngine) -> None:
    text = f"{CHUNKS[0]} {engine.backbone.tokenizer.eos_token} and more"
    (name,) = engine.encode([CHUNKS[1]])
    engine.encode([text])
    prompt = f"{CHUNKS[1]}\n\n{text}\n\nWho?"
    counts = [
        engine.generate(prompt, SHORT, reuse=reuse).usage.prompt_tokens
        for reuse in (Reuse(), Reuse("hints", (name,)), Reuse("off"))
    ]
    assert len(set(counts)) == 1


def test_copies_share_engine_and_store(engine: KVPacketEngine) -> None:
    assert copy.deepcopy([engine, engine.store]) == [engine, engine.store]
