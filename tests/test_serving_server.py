"""The server's answers are the engine's, for OpenAI's own client and for the frameworks'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pipeline_samples import pipeline
from server_samples import Served, rag_fixture, served_fixture, serving  # noqa: F401

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.serving.server.backend import EngineBackend
from kvpacket_rag.serving.server.calls import Limits

QUESTION = f"{CHUNKS[1]}\n\n{CHUNKS[3]}\n\nWho signed it?"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
MESSAGES = [Message("system", "Be brief."), Message("user", QUESTION)]
SHORT = GenerationSettings(max_new_tokens=12)


def test_a_chat_is_answered_as_by_the_engine_and_its_usage_tells_what_packets_held(served: Served, rag: KVPacketRAG):
    found = served.openai.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12)
    own = rag.engine.generate(MESSAGES, SHORT)
    chunks = sum(rag.engine.count_tokens(CHUNKS[number]) for number in (1, 3))
    assert found.choices[0].message.content == own.text and found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == own.finish_reason
    assert found.usage and found.usage.prompt_tokens_details
    assert found.model_extra and found.model_extra["kvpacket"]["packet_tokens"] == chunks == own.usage.packet_tokens
    assert chunks <= found.usage.prompt_tokens_details.cached_tokens < found.usage.prompt_tokens
    assert found.usage.prompt_tokens == own.usage.prompt_tokens
    assert found.usage.total_tokens == own.usage.prompt_tokens + len(own.token_ids)
    assert found.model_extra["kvpacket"]["chunks_reused"] == 2


def test_text_that_an_earlier_prompt_left_in_memory_counts_as_cached(served: Served, rag: KVPacketRAG):
    first, second = (served.chat(messages=CHAT).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    detail = second["kvpacket"]
    assert detail["preamble_tokens"] > 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == detail["packet_tokens"] + detail["preamble_tokens"]
    assert second["usage"]["prompt_tokens"] == cached + detail["prefilled_tokens"]


def test_a_stream_joins_to_the_same_answer_and_ends_with_reason_and_usage(served: Served, rag: KVPacketRAG):
    stream = served.openai.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    own = rag.engine.generate(MESSAGES, SHORT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own.text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == own.finish_reason
    assert all(chunk.usage is None and chunk.id == last.id for chunk in chunks)
    assert last.choices == [] and last.usage and last.usage.completion_tokens == len(own.token_ids)


def test_a_stream_without_options_has_no_usage_and_ends_with_done(served: Served):
    response = served.chat(stream=True)
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream") and done == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events)


def test_a_text_is_gone_on_with_as_by_the_engine_whole_and_streamed(served: Served, rag: KVPacketRAG):
    own = rag.engine.generate(QUESTION, SHORT)
    ask: Any = {"model": "tiny", "prompt": QUESTION, "max_tokens": 12}
    whole = served.openai.completions.create(**ask)
    assert whole.choices[0].text == own.text and whole.object == "text_completion"
    assert "".join(part.choices[0].text for part in served.openai.completions.create(**ask, stream=True)) == own.text


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.5, "seed": 1},
        {"temperature": 0.8, "top_k": 5, "seed": 2},
        {"repetition_penalty": 1.5},
    ],
)
def test_decoding_parameters_have_their_effect(served: Served, rag: KVPacketRAG, given: dict[str, Any]):
    own = rag.engine.generate(MESSAGES, GenerationSettings(max_new_tokens=12, **given))
    assert served.chat(messages=CHAT, max_tokens=12, **given).json()["choices"][0]["message"]["content"] == own.text


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_text_ends_the_answer_and_is_cut_from_it(served: Served, rag: KVPacketRAG, as_list: bool):
    text = rag.engine.generate(MESSAGES, SHORT).text
    stop = text[2:5]
    found = served.chat(messages=CHAT, max_tokens=12, stop=[stop] if as_list else stop).json()["choices"][0]
    assert found["message"]["content"] == text[: text.index(stop)] and found["finish_reason"] == "stop"


def test_policy_prefill_reuses_nothing(served: Served):
    found = served.chat(messages=CHAT, policy="prefill").json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and found["kvpacket"]["policy"] == "prefill"


def test_retrieve_answers_from_the_index_and_names_sources(served: Served, rag: KVPacketRAG):
    question = "Who signed the lease of the harbour office?"
    chat: Any = [{"role": "user", "content": question}]
    found = served.openai.chat.completions.create(
        model="tiny", messages=chat, max_tokens=12, extra_body={"retrieve": {"k": 2}}
    )
    own = rag.ask(question, 2, SHORT)
    assert found.choices[0].message.content == own.answer.text and found.model_extra
    assert [source["document_id"] for source in found.model_extra["sources"]] == [
        hit.chunk.document_id for hit in own.hits
    ]
    assert found.model_extra["sources"][0]["title"] == "Title 1"


def test_a_stream_names_its_sources_in_the_first_event(served: Served):
    response = served.chat(stream=True, retrieve=True)
    first, *_, _ = response.text.split("\n\n")
    assert len(json.loads(first.removeprefix("data: "))["sources"]) == 4


def test_an_empty_index_is_told_of(backbone: Backbone, tmp_path: Path):
    with pipeline(backbone, tmp_path) as rag, serving(EngineBackend(rag.engine, rag)) as served:
        response = served.chat(retrieve=True)
        assert response.status_code == 503 and "no chunks" in response.json()["error"]["message"]


def test_retrieve_keeps_the_chat_so_far_and_the_clients_instructions(served: Served, rag: KVPacketRAG):
    question = "Who signed the lease of the harbour office?"
    before = [Message("system", "Answer in Dutch."), Message("user", "Hello"), Message("assistant", "Hi")]
    chat = [{"role": m.role, "content": m.content} for m in before] + [{"role": "user", "content": question}]
    asked = rag.messages(question, rag.retrieve("door sensor silent", 1))[-1]
    own = rag.engine.generate([*before, asked], SHORT)
    retrieve = {"k": 1, "query": "door sensor silent"}
    found = served.chat(messages=chat, max_tokens=12, retrieve=retrieve).json()
    assert found["choices"][0]["message"]["content"] == own.text
    assert found["usage"]["prompt_tokens"] == own.usage.prompt_tokens


def test_an_answer_of_the_assistant_is_followed_by_a_new_one_or_gone_on_with(served: Served, rag: KVPacketRAG):
    chat = [*CHAT, {"role": "assistant", "content": "It was"}]
    messages = [*MESSAGES, Message("assistant", "It was")]
    on = served.chat(messages=chat, max_tokens=12, continue_final_message=True).json()
    assert on["choices"][0]["message"]["content"] == rag.engine.generate(messages, SHORT).text
    new = served.chat(messages=chat, max_tokens=12).json()
    own = rag.engine.generate(messages, SHORT, template_kwargs={"add_generation_prompt": True})
    assert new["choices"][0]["message"]["content"] == own.text
    assert new["usage"]["prompt_tokens"] > on["usage"]["prompt_tokens"]


def test_without_a_limit_of_the_client_an_answer_takes_what_the_window_leaves(rag: KVPacketRAG):
    text = "word " * 620
    room = rag.engine.context_window - served_tokens(rag, text)
    assert 0 < room < 2000
    with serving(EngineBackend(rag.engine), limits=Limits(("tiny",), max_tokens=2000)) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        found = served.http.post("/v1/chat/completions", json=body).json()
        assert found["usage"]["completion_tokens"] == room or found["choices"][0]["finish_reason"] == "stop"
        refused = served.http.post("/v1/chat/completions", json=body | {"max_tokens": room + 1})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def served_tokens(rag: KVPacketRAG, text: str) -> int:
    return rag.engine.generate([Message("user", text)], GenerationSettings(max_new_tokens=1)).usage.prompt_tokens


def test_content_in_parts_is_the_text_of_the_parts(served: Served):
    parts = [{"type": "text", "text": QUESTION[:40]}, {"type": "text", "text": QUESTION[40:]}]
    chat = [CHAT[0], {"role": "user", "content": parts}]
    assert served.chat(messages=chat).json()["choices"] == served.chat(messages=CHAT).json()["choices"]


def test_models_are_listed_and_found(served: Served):
    assert [model.id for model in served.openai.models.list()] == ["tiny"]
    assert served.openai.models.retrieve("tiny").owned_by == "kvpacket"


def test_health_and_metrics_tell_of_requests_without_their_text(served: Served):
    served.chat(messages=CHAT)
    assert served.http.get("/healthz").json() == {"status": "ok"}
    told = served.http.get("/metrics").text
    assert 'kvpacket_requests_total{route="/v1/chat/completions",status="200"} 1.0' in told
    assert "kvpacket_completion_tokens_total 4.0" in told and "lease" not in told


def test_langchains_chat_model_and_llm_work_unchanged(served: Served, rag: KVPacketRAG):
    place: Any = {"base_url": f"{served.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    chat = ChatOpenAI(**place, max_completion_tokens=12)
    asked = [("system", "Be brief."), ("human", QUESTION)]
    own, answer = [rag.engine.generate(MESSAGES, SHORT) for _ in range(2)][1], chat.invoke(asked)
    assert answer.text == own.text and answer.usage_metadata
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached == own.usage.packet_tokens + own.usage.preamble_tokens
    assert "".join(part.text for part in chat.stream(asked)) == own.text
    llm = OpenAI(**place, max_tokens=12, temperature=0)  # its own default is 0.7
    assert llm.invoke(QUESTION) == rag.engine.generate(QUESTION, SHORT).text


async def test_langchains_chat_model_works_asynchronously(served: Served, rag: KVPacketRAG):
    chat = ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model="tiny", max_completion_tokens=12)  # type: ignore[arg-type]
    own = rag.engine.generate(MESSAGES, SHORT)
    assert (await chat.ainvoke([("system", "Be brief."), ("human", QUESTION)])).text == own.text


@pytest.mark.parametrize("is_chat", [True, False])
def test_llama_indexs_openai_like_works_unchanged(served: Served, rag: KVPacketRAG, is_chat: bool):
    place: Any = {"api_base": f"{served.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    llm = OpenAILike(**place, is_chat_model=is_chat, max_tokens=12, temperature=0)  # its own default is 0.1
    own = rag.engine.generate([Message("user", QUESTION)] if is_chat else QUESTION, SHORT)
    assert llm.complete(QUESTION).text == own.text
    assert [part.text for part in llm.stream_complete(QUESTION)][-1] == own.text
    if is_chat:
        assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content == own.text
