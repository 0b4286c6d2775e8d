"""Which chunks may come from packets, hints of what was retrieved, and one engine for all classes of a process."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_kvpacket import ChatKVPacket, KVPacketLLM, KVPacketVectorStore, format_docs
from langchain_kvpacket.lazy_engine import EngineOptions, load_engine
from langchain_samples import QUESTION, Reused, WordEmbeddings, chat_about, documents

from kvpacket_rag import GenerationSettings, KVPacketEngine, Message, PacketMissError, PromptError, StoreError

ASKED, ASKED_OF_ENGINE = chat_about(*CHUNKS[:3])


@pytest.fixture(autouse=True)
def _no_engines_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_kvpacket.lazy_engine._engines", weakref.WeakValueDictionary())
    monkeypatch.setattr("langchain_kvpacket.lazy_engine._asked_for", weakref.WeakSet())


@pytest.fixture
def chat(engine: KVPacketEngine) -> ChatKVPacket:
    engine.encode(CHUNKS)
    return ChatKVPacket(engine=engine, max_tokens=6)


def facts(message: Any) -> tuple[int, int]:
    return message.response_metadata["chunks_reused"], len(message.response_metadata["misses"])


@pytest.mark.parametrize("as_documents", [True, False])
async def test_only_hinted_chunks_are_looked_for_where_that_is_asked(chat: ChatKVPacket, as_documents: bool):
    hints = documents()[1:3] if as_documents else chat.engine.encode(CHUNKS[1:3])
    assert facts(chat.invoke(ASKED, match="hints", kv_hint=hints)) == (2, 0)
    assert facts(await chat.ainvoke(ASKED, match="hints", kv_hint=hints[:1])) == (1, 0)
    assert facts(list(chat.bind(match="hints", kv_hint=hints).stream(ASKED))[-1]) == (2, 0)
    assert facts(ChatKVPacket(engine=chat.engine, match="hints", max_tokens=1).invoke(ASKED)) == (0, 0)
    llm = KVPacketLLM(engine=chat.engine, match="hints", max_tokens=1)
    info = llm.generate([ASKED_OF_ENGINE[1].content], kv_hint=hints).generations[0][0].generation_info
    assert info and info["chunks_reused"] == 2


def test_off_reads_in_full(chat: ChatKVPacket):
    full = chat.engine.generate(ASKED_OF_ENGINE, GenerationSettings(6), policy="prefill")
    message = ChatKVPacket(engine=chat.engine, match="off", max_tokens=6).invoke(ASKED)
    assert message.content == full.text and facts(message) == (0, 0)


def test_a_hinted_chunk_that_was_rewritten_is_a_miss_with_the_reason(
    chat: ChatKVPacket, caplog: pytest.LogCaptureFixture
):
    changed = [HumanMessage(f"{CHUNKS[1]}\n\n{CHUNKS[0].upper()}")]
    hints = documents()[:2]
    assert facts(chat.invoke(changed, kv_hint=hints)) == (1, 1)
    with pytest.raises(PacketMissError, match="its text is not in the prompt"):
        chat.invoke(changed, kv_hint=hints, on_miss="error")
    strict = ChatKVPacket(engine=chat.engine, on_miss="error", max_tokens=1)
    with pytest.raises(PacketMissError, match="its text is not in the prompt"):
        list(strict.stream(changed, kv_hint=hints))
    assert facts(strict.invoke(changed)) == (1, 0)
    with caplog.at_level(logging.WARNING):
        chat.invoke(changed, kv_hint=hints, on_miss="warn")
    assert [chat.engine.encode(CHUNKS[:1])[0][:12] in record.getMessage() for record in caplog.records] == [True]


def test_a_hint_without_text_or_packet_does_no_harm(chat: ChatKVPacket):
    hints = [Document(" \n"), *documents()[:1], Document("A text that nobody ever encoded, of some length.")]
    assert facts(chat.invoke(ASKED, kv_hint=hints)) == (3, 1)


def test_a_cached_answer_is_of_one_way_to_match(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    keys = [
        ChatKVPacket(engine=chat.engine, **fields)._get_llm_string(stop=None, **call)
        for fields in ({}, {"match": "off"}, {"on_miss": "error"})
        for call in ({}, {"kv_hint": ["a"]})
    ]
    assert len(set(keys)) == 6


def test_models_and_stores_made_from_equal_names_share_one_engine(
    chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    loaded: list[Any] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda *names, **o: loaded.append((*names, o["store"])) or make())
    make = lambda: KVPacketEngine(chat.engine.backbone, min_match_tokens=4)  # noqa: E731
    first, llm = ChatKVPacket(model="shared", device="cpu"), KVPacketLLM.from_model_id("shared", device=-1)
    store = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), model="shared")
    assert store.engine is first.engine is llm.engine is pickle.loads(pickle.dumps(first)).engine
    assert ChatKVPacket(llm=llm).engine is copy.deepcopy(llm).engine is store.engine
    assert facts(first.invoke(format_docs(store.similarity_search(QUESTION, 2)))) == (2, 0)
    others = [ChatKVPacket(model="shared", store=place) for place in (tmp_path, str(tmp_path))]
    assert others[0].engine is others[1].engine is not first.engine
    assert loaded == [("shared", None), ("shared", str(tmp_path))]


@pytest.mark.parametrize("word", ["model", "adapter"])
def test_other_files_under_the_same_name_are_another_engine(
    backbone: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str
):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: KVPacketEngine(backbone))
    file = tmp_path / ("weights.safetensors" if word == "model" else "adapter.safetensors")
    place = str(tmp_path if word == "model" else file)
    (tmp_path / "config.json").write_text("{}")
    file.write_bytes(b"first")
    first, again = (ChatKVPacket(**{word: place}) for _ in range(2))
    assert first.engine is again.engine
    file.write_bytes(b"trained anew")
    assert ChatKVPacket(**{word: place}).engine is not first.engine is again.engine


def test_an_engine_that_nobody_holds_is_let_go(chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: KVPacketEngine(chat.engine.backbone))
    first = load_engine(EngineOptions("let-go"))
    assert load_engine(EngineOptions("let-go")) is first
    watch = weakref.ref(first)
    del first
    gc.collect()
    assert watch() is None


def test_a_store_without_engine_is_over_the_one_its_models_are_over(
    engine: KVPacketEngine, soft_engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: soft_engine)
    chat, llm = ChatKVPacket(engine=engine), KVPacketLLM(engine=engine)
    assert KVPacketVectorStore(WordEmbeddings()).engine is engine
    other = KVPacketLLM.from_model_id("other")
    with pytest.raises(StoreError, match=r"over 2 different engines .* engine=chat\.engine"):
        KVPacketVectorStore.from_texts(CHUNKS, WordEmbeddings())
    del chat, llm
    gc.collect()
    twin = KVPacketLLM.from_model_id("other", device=-1)
    assert twin.engine is KVPacketVectorStore(WordEmbeddings()).engine is soft_engine is other.engine


def test_a_model_that_could_not_be_made_or_is_gone_does_not_count(engine: KVPacketEngine):
    with pytest.raises(PromptError) as failed:
        ChatKVPacket(model="other", max_tokens=0)
    circle: list[Any] = [ChatKVPacket(model="another")]
    circle.append(circle)
    del circle
    chat = ChatKVPacket(engine=engine)
    assert KVPacketVectorStore(WordEmbeddings()).engine is chat.engine is engine and failed.traceback


def test_a_folder_is_one_place_wherever_the_process_is(
    chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    loaded: list[Any] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **o: loaded.append(o["store"]) or make())
    make = lambda: KVPacketEngine(chat.engine.backbone)  # noqa: E731
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    first = ChatKVPacket(model="placed", store="library")
    options = EngineOptions("placed", store=Path("library"))
    monkeypatch.chdir("there")
    copies = [pickle.loads(pickle.dumps(first)), ChatKVPacket(**first.model_dump()), ChatKVPacket(llm=first)]
    copies.append(ChatKVPacket(model="placed", store=tmp_path / "library"))
    assert all(copy.engine is first.engine is load_engine(options) for copy in copies)
    other = ChatKVPacket(model="placed", store="library")
    assert other.engine is not first.engine
    assert loaded == [str(tmp_path / "library"), str(tmp_path / "there" / "library")]


def test_the_default_adapter_is_the_one_that_ships(monkeypatch: pytest.MonkeyPatch, chat: ChatKVPacket):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(KVPacketEngine, "load", lambda _, **options: asked.update(options) or chat.engine)
    assert ChatKVPacket(model="adapted").engine and asked["adapter"] == "auto"
    assert KVPacketVectorStore(WordEmbeddings()).engine is chat.engine and asked["adapter"] == "auto"


@pytest.mark.parametrize("make", [ChatKVPacket, KVPacketLLM])
def test_an_answer_after_one_that_ended_on_a_stop_text_is_as_ever(chat: ChatKVPacket, make: Any):
    model = make(engine=chat.engine, max_tokens=12)
    text = "\n\n".join([*CHUNKS[:2], QUESTION])
    expected = chat.engine.generate([Message("user", text)], GenerationSettings(12)).text
    model.invoke(text, stop=[expected[2:4]])
    answer = model.invoke(text)
    assert (answer if isinstance(answer, str) else answer.text) == expected


class ByPlace(BaseRetriever):
    """Finds the chunks of the places in a query, such as "02"."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [documents()[int(place)] for place in query]


@pytest.mark.parametrize("make", [ChatKVPacket, KVPacketLLM])
def test_of_a_prompt_that_is_known_in_part_the_rest_gets_packets_too(engine: KVPacketEngine, make: Any):
    chain = ByPlace() | format_docs | (lambda text: f"{text}\n\n{QUESTION}") | make(engine=engine, max_tokens=1)
    heard = Reused()
    for query in ("01", "012", "2"):
        chain.invoke(query, {"callbacks": [heard]})
    assert heard.chunks == [0, 2, 1] and [len(misses) for misses in heard.misses] == [2, 1, 0]
