from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_kvpacket import ChatKVPacket
from langchain_samples import across_tokens, broken, chat_about, lent_contexts, script, slow
from templates import LLAMA31, tokenizer_with

from kvpacket_rag import GenerationSettings, KVPacketEngine
from kvpacket_rag.backbone import Backbone

ASKED, ASKED_OF_ENGINE = chat_about(CHUNKS[1], CHUNKS[2])


@pytest.fixture
def chat(engine: KVPacketEngine) -> ChatKVPacket:
    engine.encode(CHUNKS)
    return ChatKVPacket.from_engine(engine, max_tokens=24)


def test_an_answer_is_the_engines_and_comes_from_packets(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    message = ChatKVPacket(engine=soft_engine, max_tokens=24).invoke(ASKED)
    expected = soft_engine.generate(ASKED_OF_ENGINE, GenerationSettings(max_new_tokens=24))
    assert message.content == expected.text
    assert message.response_metadata["chunks_reused"] == 2 and message.response_metadata["misses"] == []


def test_usage_counts_packet_tokens_as_read_from_cache(chat: ChatKVPacket):
    message = chat.invoke(ASKED)
    reused = chat.engine.count_tokens(CHUNKS[1]) + chat.engine.count_tokens(CHUNKS[2])
    assert message.usage_metadata and message.usage_metadata["input_token_details"] == {"cache_read": reused}
    assert message.usage_metadata["input_tokens"] == reused + message.response_metadata["prefilled_tokens"]
    assert message.usage_metadata["output_tokens"] == 24
    assert message.response_metadata["timings"]["ttft_seconds"] > 0


def test_prefill_policy_reads_in_full(chat: ChatKVPacket):
    message = chat.invoke(ASKED, policy="prefill")
    expected = chat.engine.generate(ASKED_OF_ENGINE, GenerationSettings(max_new_tokens=24), policy="prefill")
    assert message.content == expected.text and message.response_metadata["packet_tokens"] == 0


async def test_every_way_to_ask_gives_the_same_text(chat: ChatKVPacket):
    text = chat.invoke(ASKED).content
    assert (await chat.ainvoke(ASKED)).content == text
    assert "".join(chunk.text for chunk in chat.stream(ASKED)) == text
    assert "".join([chunk.text async for chunk in chat.astream(ASKED)]) == text
    assert "".join(e["data"]["chunk"].text for e in [
        event async for event in chat.astream_events(ASKED, version="v2") if event["event"] == "on_chat_model_stream"
    ]) == text  # fmt: skip


def test_a_stream_ends_with_one_chunk_of_usage(chat: ChatKVPacket):
    chunks = list(chat.stream(ASKED))
    assert len(chunks) > 5
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].chunk_position == "last"
    assert chunks[-1].response_metadata["finish_reason"] == "length"
    assert chunks[-1].response_metadata["chunks_reused"] == 2


def test_a_batch_equals_serial_calls(chat: ChatKVPacket):
    chats = [chat_about(chunk, CHUNKS[0])[0] for chunk in CHUNKS]
    serial = [chat.invoke(messages).content for messages in chats]
    assert [message.content for message in chat.batch(chats * 4, {"max_concurrency": 8})] == serial * 4


def test_every_end_token_of_the_generation_config_ends_an_answer(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    whole = chat.engine.generate(ASKED_OF_ENGINE, GenerationSettings(24)).token_ids
    end = next(token for place, token in enumerate(whole) if place > 2 and token not in whole[:place])
    config = chat.engine.backbone.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", [config.eos_token_id, end])
    message, kept = chat.invoke(ASKED), whole[: whole.index(end)]
    assert message.text == chat.engine.backbone.decode(list(kept))
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata and message.usage_metadata["output_tokens"] == len(kept) + 1


@pytest.mark.parametrize("text", ["渡し船は七時 שלום é", "👩‍👩‍👧‍👦 and 👍🏽 and e\u0301", "한국어 문장 😀"])
async def test_letters_of_many_bytes_are_streamed_whole(chat: ChatKVPacket, text: str, monkeypatch: pytest.MonkeyPatch):
    script(monkeypatch, chat.engine, *[text] * 3)
    chat.max_tokens = 99
    assert len(chat.engine.token_ids(text)) > len(text)  # so that a token is a part of a letter
    streams = [[chunk.text for chunk in chat.stream(ASKED)], [chunk.text async for chunk in chat.astream(ASKED)]]
    for pieces in streams:
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces) and len(pieces) > 4
    assert chat.invoke(ASKED).text == text


async def test_a_stop_text_across_two_tokens_ends_the_answer_before_it(chat: ChatKVPacket):
    whole = chat.invoke(ASKED).text
    stop = across_tokens([chunk.text for chunk in chat.stream(ASKED)])
    message, expected = chat.invoke(ASKED, stop=[stop]), whole[: whole.index(stop)]
    assert message.text == expected and message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata and message.usage_metadata["output_tokens"] < 24
    assert "".join(chunk.text for chunk in chat.stream(ASKED, stop=[stop])) == expected
    assert chat.bind(stop=[stop]).batch([ASKED])[0].text == expected
    stopping = ChatKVPacket.from_engine(chat.engine, max_tokens=24, stop=[stop])
    assert stopping.invoke(ASKED).text == (await stopping.ainvoke(ASKED)).text == expected
    assert "".join([chunk.text async for chunk in stopping.astream(ASKED, stop=["never"])]) == whole


def test_a_stop_text_inside_a_document_cuts_nothing(chat: ChatKVPacket):
    whole = chat.invoke(ASKED)
    assert "lease" in CHUNKS[1] and "lease" not in whole.text
    stopped = chat.invoke(ASKED, stop=["lease"])
    assert stopped.content == whole.content and stopped.response_metadata["chunks_reused"] == 2


async def test_the_event_loop_goes_on_while_the_model_works(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    slow(chat.engine, monkeypatch, 0.03)
    ticks = [time.perf_counter()]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.005)
            ticks.append(time.perf_counter())

    ticker = asyncio.create_task(tick())
    await chat.ainvoke(ASKED)
    _ = [chunk async for chunk in chat.astream(ASKED)]
    ticker.cancel()
    assert len(ticks) > 60  # of 46 steps of 0.03 s; a blocked loop ticks once a call


async def test_an_error_at_the_third_token_is_the_callers_and_the_next_call_works(
    chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch
):
    whole = chat.invoke(ASKED).content
    with lent_contexts(chat.engine, monkeypatch) as lent:
        for ask in (chat.invoke, lambda messages: list(chat.stream(messages))):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no third token"):
                broken(chat.engine, patch)
                ask(ASKED)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no third token"):
            broken(chat.engine, patch)
            await asyncio.wait_for(chat.ainvoke(ASKED), 10)
        assert chat.invoke(ASKED).content == whole and not lent


async def test_a_stream_nobody_reads_on_frees_its_context(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    with lent_contexts(chat.engine, monkeypatch) as lent:
        stream = chat.stream(ASKED)
        assert next(stream).text and len(lent) == 1
        stream.close()  # type: ignore[attr-defined]
        assert not lent
        async for chunk in chat.astream(ASKED):
            assert chunk.text and len(lent) == 1
            break
        await asyncio.sleep(0.05)
        assert not lent


async def test_a_cancelled_call_stops_the_model(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    began = slow(chat.engine, monkeypatch, 0.03)
    with lent_contexts(chat.engine, monkeypatch) as lent:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(chat.ainvoke(ASKED), 0.15)
        while lent:  # it ends with the piece it was at
            await asyncio.sleep(0.01)
        done = len(began)
        await asyncio.sleep(0.1)
        assert 0 < len(began) == done < 20


def test_a_prompt_has_one_beginning(make_model: Any):
    tokenizer = tokenizer_with(LLAMA31)  # of single bytes, so that cutting a text changes no token
    engine = KVPacketEngine(Backbone(make_model(vocab_size=len(tokenizer)), tokenizer, "bytes"))
    engine.encode(CHUNKS)
    message = ChatKVPacket.from_engine(engine, max_tokens=1).invoke(ASKED)
    conversation = [{"role": m.role, "content": m.content} for m in ASKED_OF_ENGINE]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert message.usage_metadata and message.usage_metadata["input_tokens"] == len(ids)


def test_tokens_are_counted_by_the_models_own_tokenizer_without_a_network(
    chat: ChatKVPacket, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    expected = tokenizer(CHUNKS[0], add_special_tokens=False)["input_ids"]
    assert chat.get_token_ids(CHUNKS[0]) == expected and chat.get_num_tokens(CHUNKS[0]) == len(expected)
