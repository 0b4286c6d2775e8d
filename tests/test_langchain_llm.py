from __future__ import annotations

import logging
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnablePassthrough
from langchain_kvpacket import ChatKVPacket, KVPacketLLM
from langchain_samples import across_tokens, lent_contexts
from templates import tokenizer_with
from transformers import pipeline

from kvpacket_rag import ContextTooLongError, GenerationSettings, KVPacketEngine, Message, PromptError
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.batch import Rows

PROMPT = f"{CHUNKS[1]}\n\n{CHUNKS[3]}\n\nWho signed it?"


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    engine.encode(CHUNKS)
    return KVPacketLLM.from_engine(engine, max_tokens=24)


def test_a_prompt_is_a_message_of_the_user_and_answered_from_packets(soft_engine: KVPacketEngine):
    soft_engine.encode(CHUNKS)
    result = KVPacketLLM(engine=soft_engine, max_tokens=24).generate([PROMPT])
    expected = soft_engine.generate([Message("user", PROMPT)], GenerationSettings(max_new_tokens=24))
    assert result.generations[0][0].text == expected.text
    assert result.generations[0][0].generation_info["chunks_reused"] == 2  # type: ignore[index]


@pytest.mark.parametrize("template", [True, False])
def test_a_raw_prompt_or_a_model_without_template_takes_the_text_as_it_is(
    llm: KVPacketLLM, make_model: Any, template: bool
):
    tokenizer = tokenizer_with(None)
    bare = KVPacketEngine(Backbone(make_model(vocab_size=len(tokenizer)), tokenizer))
    model = KVPacketLLM(engine=llm.engine, raw=True) if template else KVPacketLLM(engine=bare)
    expected = model.engine.generate(PROMPT, GenerationSettings(max_new_tokens=9))
    assert model.invoke(PROMPT, max_tokens=9) == expected.text
    assert expected.text != llm.invoke(PROMPT, max_tokens=9)


def test_what_a_pipelines_user_writes_is_read_as_it_stands(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: llm.engine)
    asked = "Who signed it?"
    expected = llm.engine.generate(asked, GenerationSettings(9)).text
    backbone = llm.engine.backbone
    made = pipeline("text-generation", model=backbone.model, tokenizer=backbone.tokenizer)
    by_name = KVPacketLLM.from_model_id("some-model", "text-generation", pipeline_kwargs={"max_new_tokens": 9})
    assert by_name.invoke(asked) == KVPacketLLM(pipeline=made, max_tokens=9).invoke(asked) == expected
    templated = KVPacketLLM.from_model_id("some-model", raw=False, max_tokens=9)
    assert templated.invoke(asked) == llm.invoke(asked, max_tokens=9) != expected


FINAL = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_that_is_in_the_template_already_is_read_as_it_stands(
    llm: KVPacketLLM, caplog: pytest.LogCaptureFixture
):
    expected = llm.engine.generate(FINAL, GenerationSettings(24))
    with caplog.at_level(logging.INFO):
        assert llm.invoke(FINAL) == "".join(llm.stream(FINAL)) == expected.text
    assert caplog.text.count("are in the model's chat template already") == 1 and expected.usage.chunks_reused == 2
    doubled = llm.engine.generate([Message("user", FINAL)], GenerationSettings(24)).text
    assert KVPacketLLM(engine=llm.engine, raw=False, max_tokens=24).invoke(FINAL) == doubled != expected.text


@pytest.mark.parametrize(
    "text", [f"<|im_start|>user\n{PROMPT}", f"{PROMPT}<|im_end|>", f"Hi\n{FINAL}", f"user manual: {FINAL}"]
)
def test_control_strings_alone_are_text_that_is_told_of_once(
    llm: KVPacketLLM, text: str, caplog: pytest.LogCaptureFixture
):
    expected = llm.engine.generate([Message("user", text)], GenerationSettings(24)).text
    assert llm.invoke(text) == llm.invoke(text) == expected
    assert caplog.text.count("which the model reads as plain text; pass raw=True") == 1


def test_templates_without_control_tokens_are_known_too(llm: KVPacketLLM):
    plain = "{% for m in messages %}USER: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}BOT:{% endif %}"
    asked = KVPacketLLM(engine=llm.engine, max_tokens=9, chat_template_kwargs={"chat_template": plain})
    expected = llm.engine.generate("USER: Who?\nBOT:", GenerationSettings(9)).text
    assert asked.invoke("USER: Who?\nBOT:") == asked.invoke("Who?") == expected


async def test_every_way_to_ask_gives_the_same_text(llm: KVPacketLLM):
    text = llm.invoke(PROMPT)
    assert await llm.ainvoke(PROMPT) == "".join(llm.stream(PROMPT)) == text
    assert "".join([piece async for piece in llm.astream(PROMPT)]) == text
    assert (
        llm.batch([PROMPT, "Hi", PROMPT]) == await llm.abatch([PROMPT, "Hi", PROMPT]) == [text, llm.invoke("Hi"), text]
    )
    assert llm.invoke([HumanMessage(PROMPT)]) == llm.invoke(f"Human: {PROMPT}")


def test_the_prompts_of_a_batch_are_decoded_together(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    alone = [llm.invoke(text) for text in (PROMPT, "Hi")]
    widths, step = [], Rows.step
    monkeypatch.setattr(Rows, "step", lambda rows, tokens: widths.append(len(tokens)) or step(rows, tokens))
    assert llm.batch([PROMPT, "Hi"]) == alone and widths == [2] * 23


async def test_usage_is_summed_over_prompts_and_told_for_each(llm: KVPacketLLM):
    counts = [llm.engine.generate([Message("user", text)], GenerationSettings(24)).usage for text in (PROMPT, "Hi")]
    for result in (llm.generate([PROMPT, "Hi"]), await llm.agenerate([PROMPT, "Hi"])):
        assert result.llm_output and result.llm_output["token_usage"] == {
            "prompt_tokens": sum(usage.prompt_tokens for usage in counts),
            "completion_tokens": 48,
            "total_tokens": sum(usage.prompt_tokens for usage in counts) + 48,
        }
        facts = [generations[0].generation_info or {} for generations in result.generations]
        assert [fact["chunks_reused"] for fact in facts] == [2, 0]
        assert [fact["finish_reason"] for fact in facts] == ["length", "length"]


async def test_the_last_answers_usage_is_at_hand(llm: KVPacketLLM):
    assert llm.last_usage is None
    usage = llm.engine.generate([Message("user", PROMPT)], GenerationSettings(24)).usage
    expected = {"chunks_reused": 2, "misses": [], "completion_tokens": 24, "packet_tokens": usage.packet_tokens}
    asks = [
        llm.invoke,
        (RunnablePassthrough() | llm.bind(stop=["never"])).invoke,
        lambda prompt: list(llm.stream(prompt)),
    ]
    for ask in asks:
        ask("Hi")
        assert llm.last_usage and llm.last_usage["chunks_reused"] == 0
        ask(PROMPT)
        assert llm.last_usage and {name: llm.last_usage[name] for name in expected} == expected
    await llm.ainvoke("Hi")
    assert llm.last_usage["chunks_reused"] == 0 and llm.model_copy().last_usage is None
    with pytest.raises(ContextTooLongError):
        llm.invoke("word " * 5000)
    assert llm.last_usage is None
    chat = ChatKVPacket(llm=llm)
    message = chat.invoke(PROMPT)
    assert chat.last_usage and chat.last_usage["total_tokens"] == message.usage_metadata["total_tokens"]  # type: ignore[index]


async def test_a_stop_text_across_two_tokens_ends_the_answer_before_it(llm: KVPacketLLM):
    whole, stop = llm.invoke(PROMPT), across_tokens(list(llm.stream(PROMPT)))
    expected = whole[: whole.index(stop)]
    assert llm.invoke(PROMPT, stop=[stop]) == "".join(llm.stream(PROMPT, stop=[stop])) == expected
    stopping = KVPacketLLM(engine=llm.engine, max_new_tokens=24, stop_sequences=[stop])
    assert stopping.batch([PROMPT]) == [await stopping.ainvoke(PROMPT)] == [expected]
    assert stopping.invoke(PROMPT, stop=["never"]) == whole


def test_every_piece_is_told_to_a_handler_once(llm: KVPacketLLM):
    heard: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_llm_new_token(self, token: str, **_: Any) -> None:
            heard.append(token)

    assert list(llm.stream(PROMPT, {"callbacks": [Listener()]})) == heard


def test_a_stream_nobody_reads_on_frees_its_context(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    with lent_contexts(llm.engine, monkeypatch) as lent:
        stream = llm.stream(PROMPT)
        assert next(stream) and len(lent) == 1
        stream.close()  # type: ignore[attr-defined]
        assert not lent


def test_an_error_is_the_callers(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.backbone, "step", lambda *_: 1 / 0)
        for ask in (llm.invoke, lambda prompt: list(llm.stream(prompt))):
            with pytest.raises(ZeroDivisionError):
                ask(PROMPT)
    assert llm.invoke(PROMPT)
    with pytest.raises(PromptError, match="tool calling"):
        llm.bind(tools=[{"name": "look"}]).invoke(PROMPT)


def test_a_cached_answer_is_served_to_the_same_model_and_packets_alone(
    llm: KVPacketLLM, soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    soft_engine.encode(CHUNKS)
    cache = InMemoryCache()
    models = [KVPacketLLM(engine=e, max_tokens=4, cache=cache) for e in (llm.engine, soft_engine)]
    models.append(KVPacketLLM(engine=llm.engine, max_tokens=4, cache=cache, raw=True))
    first = [model.invoke(PROMPT) for model in models]
    assert first == [model.model_copy(update={"cache": False}).invoke(PROMPT) for model in models]
    monkeypatch.setattr(llm.engine.backbone, "step", lambda *_: pytest.fail("generated again"))
    assert [model.invoke(PROMPT) for model in models] == first


async def test_one_prompt_of_a_batch_that_fails_costs_the_others_nothing(llm: KVPacketLLM):
    asked = [PROMPT, "too long " * 3000, "Who?"]
    expected = [llm.invoke(PROMPT), ContextTooLongError, llm.invoke("Who?")]
    for limit in (None, 2):
        config = {"max_concurrency": limit}
        sync = llm.batch(asked, config, return_exceptions=True)
        for found in (sync, await llm.abatch(asked, config, return_exceptions=True)):
            assert [type(each) if isinstance(each, Exception) else each for each in found] == expected
    with pytest.raises(ContextTooLongError):
        llm.batch(asked)


async def test_a_stream_that_nobody_reads_yet_has_no_usage(llm: KVPacketLLM):
    for begin in (llm.stream, llm.astream):
        llm.invoke(PROMPT)
        stream = begin("Who?")
        assert llm.last_usage is None
        _ = list(stream) if begin == llm.stream else [piece async for piece in stream]
        assert llm.last_usage and llm.last_usage["chunks_reused"] == 0


def test_tokens_are_counted_by_the_models_own_tokenizer(llm: KVPacketLLM, tokenizer: Any):
    assert llm.get_num_tokens(PROMPT) == len(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])


def test_chat_and_text_model_share_one_engine(llm: KVPacketLLM):
    chat = ChatKVPacket.from_engine(llm.engine, max_tokens=24)
    assert chat.engine is llm.engine and chat.invoke(PROMPT).content == llm.invoke(PROMPT)
