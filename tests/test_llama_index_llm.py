from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, LLMMetadata, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.llms import LLM
from llama_index.core.prompts import PromptTemplate
from llama_index_kvpacket import KVPacketLLM
from tokenizers.processors import TemplateProcessing

from kvpacket_rag import Backbone, GenerationSettings, KVPacketEngine, Message, PromptError

QUESTION = "Who signed the lease?"
TEXT = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\n{QUESTION}"
SHORT = GenerationSettings(max_new_tokens=8)
METHODS = [f"{a}{s}{kind}" for a in ("", "a") for s in ("", "stream_") for kind in ("chat", "complete")]


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    engine.encode(CHUNKS)
    return KVPacketLLM(engine=engine, max_new_tokens=8)


async def call(llm: LLM, method: str, text: str = TEXT, **kwargs: Any) -> list[Any]:
    """All responses of one of the eight methods."""
    given = [ChatMessage(role="user", content=text)] if method.endswith("chat") else text
    result = getattr(llm, method)(given, **kwargs)
    if method.startswith("a"):
        result = await result
    if "stream" not in method:
        return [result]
    return [response async for response in result] if method.startswith("a") else list(result)


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_gives_the_engines_answer_and_usage(llm: KVPacketLLM, method: str):
    expected = llm.engine.generate([Message("user", TEXT)], SHORT)
    last = (await call(llm, method))[-1]
    usage = last.raw["usage"]
    assert text_of(last) == expected.text and last.raw["finish_reason"] == expected.finish_reason
    assert usage["chunks_reused"] == 2 and usage["misses"] == [] and usage == llm.last_usage
    parts = [usage[name] for name in ("packet_tokens", "preamble_tokens", "prefilled_tokens")]
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens == sum(parts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(expected.token_ids)


@pytest.mark.parametrize("method", [m for m in METHODS if "stream" in m])
async def test_streamed_deltas_join_to_the_text_and_the_usage_comes_once(llm: KVPacketLLM, method: str):
    seen = await call(llm, method)
    joined = ["".join(r.delta for r in seen[: n + 1]) for n in range(len(seen))]
    assert joined == [text_of(response) for response in seen] and len(seen) > 3
    assert [response.raw is None for response in seen] == [True] * (len(seen) - 1) + [False]


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_makes_one_event_pair_and_counts_its_tokens_once(llm: KVPacketLLM, method: str):
    events, tokens = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    llm.callback_manager = CallbackManager([events, tokens])
    usage = (await call(llm, method))[-1].raw["usage"]
    assert len(events.get_event_pairs(CBEventType.LLM)) == 1 == len(tokens.llm_token_counts)
    assert tokens.prompt_llm_token_count == usage["prompt_tokens"]
    assert tokens.completion_llm_token_count == usage["completion_tokens"]


@pytest.mark.parametrize("method", METHODS)
async def test_arguments_of_a_call_are_honoured_and_unknown_ones_refused(llm: KVPacketLLM, method: str):
    long = text_of((await call(llm, method, max_tokens=24))[-1])
    tokens = (await call(llm, method, max_new_tokens=3))[-1].raw["usage"]["completion_tokens"]
    stop = long[6:11]
    assert tokens == 3 and text_of((await call(llm, method, max_tokens=24, stop=stop))[-1]) == long[: long.index(stop)]
    drawn = [text_of((await call(llm, method, temperature=1.5, seed=seed))[-1]) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(PromptError, match=r"'max_new_token' \(meant 'max_new_tokens'\?\)"):
        await call(llm, method, max_new_token=3)


def test_a_call_can_leave_the_packets_aside(llm: KVPacketLLM):
    usage = llm.complete(TEXT, policy="prefill").raw["usage"]
    assert usage["packet_tokens"] == usage["chunks_reused"] == 0


def test_a_stop_text_that_spans_tokens_ends_the_answer_and_the_work(llm: KVPacketLLM):
    whole = llm.engine.generate([Message("user", TEXT)], GenerationSettings(max_new_tokens=40))
    steps = [llm.engine.backbone.decode(list(whole.token_ids[:n])) for n in range(1, 41)]
    stop = whole.text[len(steps[3]) - 1 : len(steps[5]) + 1]
    llm.stop = [stop]
    response = llm.complete(TEXT, max_tokens=40)
    assert response.text == whole.text[: whole.text.index(stop)] and response.raw["finish_reason"] == "stop"
    assert response.raw["usage"]["completion_tokens"] < 12
    assert "".join(r.delta for r in llm.stream_complete(TEXT, max_tokens=40)) == response.text


def test_an_answer_does_not_depend_on_one_that_a_stop_text_ended_before(llm: KVPacketLLM):
    other = f"{CHUNKS[1]}\n\n{CHUNKS[2]}\n\nWhat is paid?"
    expected = llm.complete(other).text
    stop = llm.complete(TEXT).text[2:4]
    for _ in range(3):
        assert llm.complete(TEXT, stop=stop).raw["finish_reason"] == "stop" and llm.complete(other).text == expected


def test_a_stop_text_in_the_prompt_cuts_nothing_and_the_answer_does_not_begin_with_the_prompt(llm: KVPacketLLM):
    plain = llm.complete(TEXT)
    stopped = llm.complete(TEXT, stop=["lease", "minus twenty"])
    assert stopped.text == plain.text and not plain.text.startswith(TEXT[:8])


def test_a_formatted_prompt_is_final_and_a_plain_one_becomes_a_users_message(llm: KVPacketLLM):
    final = llm.engine.generate(TEXT, SHORT)
    assert llm.complete(TEXT, formatted=True).text == final.text != llm.complete(TEXT).text


def rendered(llm: KVPacketLLM, ask: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The prompt the model reads in a call."""
    ids: list[int] = []
    prefiller = llm.engine._prefiller
    run = prefiller.run
    monkeypatch.setattr(prefiller, "run", lambda parts, n: ids.extend(prefiller.all_ids(parts)) or run(parts, n))
    ask()
    return str(llm.engine.backbone.tokenizer.decode(ids))


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.complete(QUESTION),
        lambda llm: list(llm.stream_complete(QUESTION)),
        lambda llm: llm.chat([ChatMessage(content=QUESTION)]),
        lambda llm: llm.predict(PromptTemplate("{q}"), q=QUESTION),
        lambda llm: llm.chat([ChatMessage(role="system", content="Be brief."), ChatMessage(content=QUESTION)]),
    ],
)
def test_the_system_prompt_stands_in_the_prompt_once(llm: KVPacketLLM, ask: Any, monkeypatch: pytest.MonkeyPatch):
    llm.system_prompt = "Be brief."
    text = rendered(llm, lambda: ask(llm), monkeypatch)
    assert text.count("Be brief.") == 1 and text.index("Be brief.") < text.index(QUESTION)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_without_a_chat_template_prompts_are_plain_text(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.engine.backbone.tokenizer, "chat_template", None)
    llm.system_prompt = "Be brief."
    assert not llm.metadata.is_chat_model
    assert rendered(llm, lambda: llm.complete(QUESTION), monkeypatch) == f"Be brief. {QUESTION}"
    predict = rendered(llm, lambda: llm.predict(PromptTemplate("{q}"), q=QUESTION), monkeypatch)
    assert predict == f"Be brief.\n\n{QUESTION}"


@pytest.mark.parametrize("own", [{}, {"completion_to_prompt": lambda text: f"[{text}]"}])
def test_a_completion_is_wrapped_and_then_led_by_the_system_prompt_as_hugging_face_llm_has_it(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
):
    llm = KVPacketLLM(engine=engine, system_prompt="SYS", query_wrapper_prompt="<U>{query_str}<A>", **own)
    expected = "SYS [<U>q<A>]" if own else "SYS <U>q<A>"
    assert rendered(llm, lambda: llm.complete("q", max_tokens=2), monkeypatch) == expected
    assert rendered(llm, lambda: list(llm.stream_complete("q", max_tokens=2)), monkeypatch) == expected


def test_own_prompt_functions_are_used_in_place_of_the_template(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    llm = KVPacketLLM(engine=engine, max_new_tokens=2)
    llm.completion_to_prompt, llm.messages_to_prompt = "<<{}>>".format, lambda ms: f"[{ms[-1].content}]"
    assert rendered(llm, lambda: llm.complete("hi"), monkeypatch) == "<<hi>>"
    assert rendered(llm, lambda: llm.chat([ChatMessage(content="hi")]), monkeypatch) == "[hi]"


@pytest.mark.parametrize("ask", ["chat", "complete", "formatted"])
def test_a_prompt_begins_with_one_bos_token_however_it_came(
    backbone: Backbone, tokenizer: Any, ask: str, monkeypatch: pytest.MonkeyPatch
):
    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    own.bos_token, own.chat_template = "<|endoftext|>", "{{ bos_token }}" + own.chat_template
    llm = KVPacketLLM(engine=KVPacketEngine(Backbone(backbone.model, own)), max_new_tokens=2)
    calls = {
        "chat": lambda: llm.chat([ChatMessage(content="hi")]),
        "complete": lambda: llm.complete("hi"),
        "formatted": lambda: llm.complete("hi", formatted=True),
    }
    text = rendered(llm, calls[ask], monkeypatch)
    assert text.count("<|endoftext|>") == 1 and text.startswith("<|endoftext|>")


def test_roles_and_contents_of_every_kind_reach_the_template(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    roles = [MessageRole.DEVELOPER, MessageRole.USER, MessageRole.CHATBOT, MessageRole.FUNCTION]
    messages = [ChatMessage(role=role, blocks=[TextBlock(text=role.value), TextBlock(text="x")]) for role in roles]
    text = rendered(llm, lambda: llm.chat([*messages, ChatMessage(role="user", content=None)]), monkeypatch)
    heads = [line for line in text.split("\n") if line.startswith("<|im_start|>")]
    assert [head.removeprefix("<|im_start|>") for head in heads] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    assert "developer\nx" in text and "function\nx" in text and "None" not in text


def test_what_is_no_text_is_refused(llm: KVPacketLLM):
    with pytest.raises(PromptError, match="ImageBlock; this model reads text only"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])


def test_metadata_and_token_counts_are_the_models_own(llm: KVPacketLLM):
    assert llm.metadata == LLMMetadata(context_window=2048, num_output=8, is_chat_model=True, model_name="tiny")
    assert llm.token_ids(TEXT) == llm.engine.backbone.tokenizer(TEXT)["input_ids"]


def test_an_error_of_the_prompt_is_raised_by_the_call_itself(llm: KVPacketLLM):
    events = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([events])
    with pytest.raises(PromptError, match="2048"):
        llm.stream_complete("word " * 3000)
    assert len(events.get_event_pairs(CBEventType.LLM)) == 1
