from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvpacket import ChatKVPacket
from langchain_samples import WordEmbeddings, chat_about, documents, slow

from kvpacket_rag import DiskStore, GenerationSettings, KVPacketEngine, KVPacketError, Message, PromptError

ASKED, ASKED_OF_ENGINE = chat_about(CHUNKS[1], CHUNKS[2])


@pytest.fixture
def chat(engine: KVPacketEngine) -> ChatKVPacket:
    engine.encode(CHUNKS)
    return ChatKVPacket.from_engine(engine, max_tokens=24)


def test_a_call_may_have_its_own_settings(chat: ChatKVPacket):
    drawn = [chat.invoke(ASKED, temperature=2.0, seed=seed, max_tokens=8).content for seed in (1, 1, 2)]
    settings = GenerationSettings(max_new_tokens=8, temperature=2.0, seed=1)
    assert drawn[0] == drawn[1] == chat.engine.generate(ASKED_OF_ENGINE, settings).text and drawn[2] != drawn[0]
    assert chat.invoke(ASKED, stop=drawn[0][1:4]).text == chat.invoke(ASKED, stop=[drawn[0][1:4]]).text
    assert chat.invoke(ASKED, max_new_tokens=3).usage_metadata["output_tokens"] == 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_token": 3}, "unknown argument max_token; it takes .*max_tokens"),
        ({"temperature": -1}, "temperature is -1, expected 0 or at least"),
        ({"model": "gpt-9"}, "asks for model 'gpt-9', but this one answers as 'tiny'"),
        ({"functions": [{"name": "look"}]}, "the call has functions, but tool calling .* bind_tools"),
        ({"response_format": {"type": "json_object"}}, "structured output are not supported"),
        ({"policy": "some"}, "policy is 'some'"),
        ({"match": "some"}, "match is 'some', expected 'auto', 'hints', 'off'"),
        ({"on_miss": "cry"}, "on_miss is 'cry'"),
        ({"kv_hint": "d1"}, "kv_hint is a str; pass a list"),
    ],
)
def test_a_call_that_cannot_be_answered_as_asked_says_why(chat: ChatKVPacket, arguments: dict[str, Any], message: str):
    with pytest.raises(PromptError, match=message):
        chat.invoke(ASKED, **arguments)


def test_a_call_may_name_the_models_own_name_and_what_only_servers_need(chat: ChatKVPacket):
    message = chat.invoke(ASKED, model="tiny", timeout=3, max_retries=0, tools=[])
    assert message.response_metadata["model_name"] == "tiny"


def test_neighbours_of_one_role_are_answered(chat: ChatKVPacket):
    messages = [
        HumanMessage(CHUNKS[0]),
        HumanMessage(CHUNKS[1]),
        AIMessage("So."),
        AIMessage("And?"),
        HumanMessage("?"),
    ]
    assert chat.invoke(messages).response_metadata["chunks_reused"] == 2


def test_template_arguments_reach_the_template(chat: ChatKVPacket):
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mood }}"
    expected = chat.engine.generate([Message("user", "Hi, ")], template_kwargs={"chat_template": plain, "mood": "!"})
    asked = ChatKVPacket(engine=chat.engine, chat_template_kwargs={"chat_template": plain, "mood": "?"})
    message = asked.invoke("Hi, ", chat_template_kwargs={"mood": "!"})
    assert message.content == expected.text
    assert message.usage_metadata["input_tokens"] == expected.usage.prompt_tokens  # type: ignore[index]


def test_nothing_is_loaded_until_the_first_call_and_then_once(
    chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    loaded: list[str] = []
    monkeypatch.setattr(
        KVPacketEngine, "load", lambda model, **_: loaded.append(model) or time.sleep(0.05) or chat.engine
    )
    lazy = ChatKVPacket(model="some-model", store=tmp_path, max_tokens=2, timeout=60, max_retries=2, api_key="none")
    assert repr(lazy) and lazy._identifying_params and not loaded and "none" not in repr(lazy)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lazy.invoke, ["a", "b", "c", "d"]))
    assert loaded == ["some-model"]


async def test_the_model_is_loaded_off_the_event_loop(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: threads.append(threading.get_ident()) or chat.engine)
    await ChatKVPacket(model="one", max_tokens=2).ainvoke("a")
    _ = [chunk async for chunk in ChatKVPacket(model="other", max_tokens=2).astream("a")]
    assert len(threads) == 2 and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_token": 3}, r"^ChatKVPacket: there is no max_new_token \(meant max_new_tokens\?\)$"),
        ({"language": "en"}, r"^ChatKVPacket: there is no language; it takes adapter, .*max_tokens"),
        ({"top_k": "few", "seed": "x"}, r"^ChatKVPacket: top_k: input should be a valid .*, not 'few'; seed: .*'x'$"),
        ({"top_p": 0.0}, "top_p is 0.0, expected in"),
        ({"stop": [""]}, "stop"),
        ({"match": "some"}, "match"),
        ({"store": "library"}, "an engine of model 'tiny' was given, so store can have no effect"),
        ({"model": "other"}, "an engine of model 'tiny' was given, so model can have no effect"),
        ({"engine": "tiny"}, "engine is of type str, expected a KVPacketEngine"),
    ],
)
def test_fields_without_a_meaning_are_refused(engine: KVPacketEngine, fields: dict[str, Any], message: str):
    with pytest.raises(KVPacketError, match=message):
        ChatKVPacket(**{"engine": engine, **fields})


def test_an_error_of_the_constructor_shows_no_secret_and_comes_unwrapped():
    with pytest.raises(KVPacketError) as refused:
        ChatKVPacket(model_kwargs={"token": "hf_secret"}, max_tokens="many", api_key="hf_secret")
    assert "hf_secret" not in str(refused.value) and "pydantic" not in str(refused.value)
    assert refused.value.__suppress_context__ and refused.value.__cause__ is None


def test_a_stream_that_is_not_read_to_its_end_has_no_usage(chat: ChatKVPacket):
    chat.invoke("Hi")
    stream = chat.stream(ASKED)
    assert chat.last_usage is None and next(stream) is not None and chat.last_usage is None
    stream.close()  # type: ignore[attr-defined]
    assert chat.last_usage is None
    assert list(chat.stream(ASKED)) and chat.last_usage and chat.last_usage["chunks_reused"] == 2
    with pytest.raises(PromptError):
        chat.invoke([])
    assert chat.last_usage is None


def test_copies_share_the_engine_and_count_for_themselves(chat: ChatKVPacket):
    chat.invoke(ASKED)
    for other in (copy.copy(chat), copy.deepcopy(chat), chat.model_copy(), chat.model_copy(deep=True)):
        assert other.engine is chat.engine and other.last_usage is None
        other.invoke("Hi")
        assert other.last_usage != chat.last_usage is not None
    longer = chat.configurable_fields(max_tokens=ConfigurableField("limit"))
    message = longer.invoke(ASKED, {"configurable": {"limit": 5}})
    assert message.usage_metadata and message.usage_metadata["output_tokens"] == 5
    assert message.response_metadata["chunks_reused"] == 2


def test_a_pickle_holds_names_and_no_weights(chat: ChatKVPacket):
    lazy = ChatKVPacket(model="some-model", store="library", max_tokens=3, stop=["\n"])
    other = pickle.loads(pickle.dumps(lazy))
    assert len(pickle.dumps(lazy)) < 3000 and repr(other) == repr(lazy)
    assert other.shared_engine.options == lazy.shared_engine.options and other.shared_engine.loaded is None
    with pytest.raises(KVPacketError, match="cannot be pickled"):
        pickle.dumps(chat)


def test_a_cached_answer_is_served_to_the_same_model_packets_and_policy_alone(
    chat: ChatKVPacket, soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    soft_engine.encode(CHUNKS)
    cache, began = InMemoryCache(), slow(chat.engine, monkeypatch, 0)
    models = [ChatKVPacket(engine=e, max_tokens=4, cache=cache) for e in (chat.engine, soft_engine)]
    for fields in ({"policy": "prefill"}, {"stop": ["never"]}):
        models.append(ChatKVPacket(engine=chat.engine, max_tokens=4, cache=cache, **fields))
    first = [model.invoke(ASKED).content for model in models]
    count = len(began)
    assert count == 4 * 3 and [model.invoke(ASKED).content for model in models] == first and len(began) == count
    expected = soft_engine.generate(ASKED_OF_ENGINE, GenerationSettings(max_new_tokens=4)).text
    assert models[1].invoke(ASKED).content == expected


def test_a_cache_on_disk_serves_a_later_process_over_the_same_packets_and_no_other(
    chat: ChatKVPacket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache, began = InMemoryCache(), slow(chat.engine, monkeypatch, 0)

    def answer(place: str | None, texts: list[str]) -> bool:
        """Whether an engine as a process makes it anew had to compute."""
        store = DiskStore(tmp_path / place) if place else None
        engine = KVPacketEngine(chat.engine.backbone, store, min_match_tokens=4)
        engine.encode(texts)
        count = len(began)
        ChatKVPacket(engine=engine, max_tokens=4, cache=cache).invoke(ASKED)
        engine.close()
        return len(began) > count

    kinds = [("one", CHUNKS), ("other", CHUNKS), (None, CHUNKS), (None, CHUNKS[:1])]
    assert [answer(*kind) for kind in kinds * 2] == [True] * 4 + [False] * 4


def test_a_copy_with_another_model_answers_from_that_or_says_that_it_cannot(
    chat: ChatKVPacket, soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KVPacketError, match="an engine of model 'tiny' was given, so model can have no effect"):
        chat.model_copy(update={"model": "other"})
    assert chat.model_copy(update={"engine": soft_engine}).engine is soft_engine
    monkeypatch.setattr(KVPacketEngine, "load", lambda name, **_: {"one": chat.engine, "other": soft_engine}[name])
    one = ChatKVPacket(model="one", max_tokens=3)
    assert one.engine is chat.engine
    other = one.model_copy(update={"model": "other", "max_tokens": 4})
    assert (other.engine, other.max_tokens, one.engine) == (soft_engine, 4, chat.engine)


def test_packets_that_a_prompt_makes_do_not_change_the_key_of_its_answer(
    engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    chat, began = ChatKVPacket(engine=engine, max_tokens=4, cache=InMemoryCache()), slow(engine, monkeypatch, 0)
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_documents(documents())
    for _ in range(2):
        store.as_retriever().invoke("lease")
        chat.invoke(ASKED)
    assert len(engine.store) and len(began) == 3


async def test_the_first_call_of_a_model_that_is_not_loaded_yet_is_cached_like_any_other(
    chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch
):
    began = slow(chat.engine, monkeypatch, 0)
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: chat.engine)
    cache, lengths = InMemoryCache(), []
    for way in ("sync", "async"):
        chats = [ChatKVPacket(model="cached", max_tokens=4, cache=cache, stop=[way]) for _ in range(2)]
        for model in (chats[0], chats[0], chats[1]):
            _ = model.invoke(ASKED) if way == "sync" else await model.ainvoke(ASKED)
            lengths.append(len(began))
    assert lengths == [3, 3, 3, 6, 6, 6]


def test_a_handler_hears_every_piece_once_and_the_usage(chat: ChatKVPacket):
    class Listener(BaseCallbackHandler):
        heard: list[str] = []  # noqa: RUF012

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.heard.append(token)

    usage, listener = UsageMetadataCallbackHandler(), Listener()
    chunks = [chunk.text for chunk in chat.stream(ASKED, {"callbacks": [listener, usage]})]
    assert listener.heard == chunks and usage.usage_metadata["tiny"]["output_tokens"] == 24
    ChatKVPacket(engine=chat.engine, max_tokens=24, streaming=True).invoke(ASKED, {"callbacks": [listener]})
    assert listener.heard == chunks * 2
    _ = list(chat.stream_events(ASKED, {"callbacks": [listener]}, version="v3"))
    assert listener.heard == chunks * 3


def test_traces_name_model_limits_and_stops(chat: ChatKVPacket):
    traced = chat._get_ls_params(stop=["\n"], temperature=0.5)
    assert traced == {
        "ls_provider": "kvpacket",
        "ls_model_type": "chat",
        "ls_model_name": "tiny",
        "ls_temperature": 0.5,
        "ls_max_tokens": 24,
        "ls_stop": ["\n"],
    }
    assert chat.profile and chat.profile["max_input_tokens"] == chat.engine.context_window
