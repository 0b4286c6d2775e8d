"""Chunks in prompts: whole as long as any prompt can take them, and never too many."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index_kvpacket import BoundaryPromptHelper, KVPacketLLM, KVPacketSynthesizer, KVPacketVectorStore
from llama_index_kvpacket.prompt_helper import Packed, prompt_tokens
from llama_index_samples import QUESTION, index_of, no_stray_loop, node  # noqa: F401

from kvpacket_rag import Adapter, Backbone, ContextTooLongError, KVPacketEngine, KVPacketError, Message

MODES = ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate"]
ANSWER = 16
QA = PromptTemplate("{context_str}\nAnswer: {query_str}").partial_format(query_str=QUESTION)


@pytest.fixture(autouse=True)
def _settings() -> Any:
    yield
    Settings._prompt_helper = None


@pytest.fixture(scope="module")
def long_backbone(make_model: Callable[..., Any], tokenizer: Any) -> Backbone:
    """The tiny model with room for 8192 tokens."""
    return Backbone(make_model(max_position_embeddings=8192), tokenizer, "tiny")


@pytest.fixture(scope="module")
def library(long_backbone: Backbone) -> tuple[KVPacketEngine, VectorStoreIndex]:
    """Eight nodes of 350 tokens each, with packets."""
    engine = KVPacketEngine(long_backbone)
    chunks = [long_chunk(engine, number) for number in range(8)]
    store = KVPacketVectorStore(engine)
    return engine, index_of(store, [node(f"n{i}", text) for i, text in enumerate(chunks)])


def long_chunk(engine: KVPacketEngine, number: int) -> str:
    """350 tokens, of which no two chunks have the first ones in common."""
    ids = engine.token_ids(f"Report {number}: " + " ".join(CHUNKS * 5))[:350]
    return engine.backbone.decode(ids).strip()


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=ANSWER)


def positions(llm: KVPacketLLM, usage: dict[str, Any]) -> int:
    soft = llm.engine.encoder.adapter.stored_tokens * usage["chunks_reused"]
    return usage["prompt_tokens"] + soft + llm.max_new_tokens


@pytest.mark.parametrize("window", [8000, 3000, 1500])
@pytest.mark.parametrize("mode", MODES)
def test_all_eight_chunks_stay_whole_in_every_mode_and_window(
    library: tuple[KVPacketEngine, VectorStoreIndex], mode: str, window: int
):
    engine, index = library
    llm = KVPacketLLM(engine=engine, context_window=window, max_new_tokens=ANSWER)
    Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=8).query(QUESTION)
    print(f"\n{mode:20} window {window}: {sum(u['chunks_reused'] for u in llm.usages)}/8 in {len(llm.usages)} calls")
    assert sum(usage["chunks_reused"] for usage in llm.usages) == 8
    assert max(positions(llm, usage) for usage in llm.usages) <= window


@pytest.mark.parametrize("window", [8000, 3000, 1500])
def test_in_chat_engines_too(library: tuple[KVPacketEngine, VectorStoreIndex], window: int):
    engine, index = library
    llm = KVPacketLLM(engine=engine, context_window=window, max_new_tokens=ANSWER)
    Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    memory = ChatMemoryBuffer.from_defaults(llm=llm)
    chat = index.as_chat_engine(chat_mode="condense_plus_context", llm=llm, memory=memory, similarity_top_k=8)
    chat.chat(QUESTION)
    assert sum(usage["chunks_reused"] for usage in llm.usages) == 8
    assert max(positions(llm, usage) for usage in llm.usages) <= window


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "compact_accumulate"])
def test_without_it_chunks_are_cut_and_that_is_told(library: tuple[KVPacketEngine, VectorStoreIndex], mode: str):
    engine, index = library
    llm = KVPacketLLM(engine=engine, context_window=1500, max_new_tokens=ANSWER)
    Settings._prompt_helper, before = None, Settings.tokenizer
    Settings.tokenizer = llm.token_ids
    index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=8).query(QUESTION)
    Settings.tokenizer = before
    missed = [miss for usage in llm.usages for miss in usage["misses"]]
    assert sum(usage["chunks_reused"] for usage in llm.usages) < 8
    assert missed and all("cut it to fit the window" in miss["reason"] for miss in missed)


@pytest.mark.parametrize("mode", MODES)
def test_soft_tokens_are_counted(backbone: Backbone, soft_engine: KVPacketEngine, mode: str):
    chunks = [f"{one} {other}" for one in CHUNKS for other in CHUNKS]
    soft_engine.encode(chunks)
    llm = KVPacketLLM(engine=soft_engine, context_window=900, max_new_tokens=ANSWER)
    Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    index = index_of(KVPacketVectorStore(soft_engine), [node(f"n{i}", text) for i, text in enumerate(chunks)])
    index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=16).query(QUESTION)
    assert sum(usage["chunks_reused"] for usage in llm.usages) == 16
    assert max(positions(llm, usage) for usage in llm.usages) <= 900


def test_an_empty_prompt_counts_what_the_model_would_read(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    llm.system_prompt = "Be brief."
    prompt = DEFAULT_TEXT_QA_PROMPT_SEL.partial_format(query_str=QUESTION)
    messages = prompt.select(llm).format_messages(context_str="", query_str=QUESTION)
    given = [Message("system", "Be brief."), *(Message(m.role.value, m.content or "") for m in messages)]
    assert prompt_tokens(llm, prompt) == llm.engine.generate(given, llm.generation_settings({})).usage.prompt_tokens
    monkeypatch.setattr(llm.engine.backbone.tokenizer, "chat_template", None)
    assert prompt_tokens(llm, QA) == llm.engine.count_tokens(f"Be brief.\n\n\nAnswer: {QUESTION}")


def packed(llm: KVPacketLLM, texts: Sequence[str], room: int, padding: int = 5) -> list[str]:
    helper = BoundaryPromptHelper.from_llm(llm, chunk_size_limit=room)
    return helper.repack(QA, texts, padding=padding, llm=llm)


def test_texts_are_packed_as_they_are_and_packed_ones_come_apart_at_their_borders(llm: KVPacketLLM):
    chunks = [f" {CHUNKS[0]}\n", CHUNKS[1], "  \n", CHUNKS[2]]
    (whole,) = packed(llm, chunks, 500)
    assert whole == f" {CHUNKS[0]}\n\n\n{CHUNKS[1]}\n\n{CHUNKS[2]}"
    assert packed(llm, [whole], 500) == [whole] and packed(llm, [whole], 30) == [chunks[0], chunks[1], chunks[3]]
    assert packed(llm, [whole], 60) == [f"{chunks[0]}\n\n{chunks[1]}", chunks[3]]
    assert isinstance(whole, Packed) and packed(llm, [" "], 60) == [""] == packed(llm, [], 60)


def test_only_a_chunk_that_fits_nowhere_is_cut_and_that_is_warned_of(
    llm: KVPacketLLM, caplog: pytest.LogCaptureFixture
):
    chunk = " ".join(CHUNKS)
    pieces = packed(llm, [CHUNKS[1], chunk, CHUNKS[2]], 60)
    assert pieces[0] == CHUNKS[1] and pieces[-1] == CHUNKS[2] and len(pieces) > 3
    assert all(llm.engine.count_tokens(piece) <= 56 for piece in pieces)
    assert set(chunk.split()) == {word for piece in pieces[1:-1] for word in piece.split()}
    assert f"a chunk of {llm.engine.count_tokens(chunk)} tokens is cut" in caplog.text


def test_a_chunk_that_fits_only_beside_a_short_answer_stays_whole(llm: KVPacketLLM):
    size = llm.engine.count_tokens(CHUNKS[1]) + 4
    assert packed(llm, [CHUNKS[1], CHUNKS[1]], size - 6, padding=500) == [CHUNKS[1]] * 2


def test_text_for_one_prompt_is_cut_at_its_end_and_shown_as_text(llm: KVPacketLLM):
    helper = BoundaryPromptHelper.from_llm(llm, chunk_size_limit=60)
    (short,) = helper.truncate(QA, [f"\n{CHUNKS[1]} "], llm=llm)
    assert short == f"\n{CHUNKS[1]} "
    cut = helper.truncate(QA, ["\n".join(CHUNKS)], llm=llm)
    assert str(cut) == cut[0] and cut[0].startswith(CHUNKS[0]) and llm.engine.count_tokens(cut[0]) <= 56
    assert QA.format(context_str=cut) == QA.format(context_str=cut[0])


@pytest.mark.parametrize("template", [DEFAULT_TEXT_QA_PROMPT_SEL, DEFAULT_REFINE_PROMPT_SEL])
def test_a_prompt_that_leaves_no_room_says_what_to_do(engine: KVPacketEngine, template: Any):
    llm = KVPacketLLM(engine=engine, context_window=300, max_new_tokens=200)
    helper = BoundaryPromptHelper.from_llm(llm)
    with pytest.raises(ContextTooLongError, match=r"the answer may take 200.*window of 300; shorten"):
        helper.repack(template.partial_format(query_str=QUESTION), CHUNKS, llm=llm)


def test_a_chat_history_that_fills_the_window_says_what_to_do(engine: KVPacketEngine):
    llm = KVPacketLLM(engine=engine, context_window=800, max_new_tokens=ANSWER)
    Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    history = [ChatMessage(role=role, content="word " * 60) for role in ("user", "assistant") * 4]
    memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=10_000)
    index = index_of(KVPacketVectorStore(engine), [node("n", CHUNKS[1])])
    with pytest.raises(ContextTooLongError, match="a memory with a lower token_limit"):
        index.as_chat_engine(chat_mode="context", llm=llm, memory=memory).chat(QUESTION)


def test_many_retrieved_chunks_in_a_small_window_are_all_read_or_told_of(
    engine: KVPacketEngine, caplog: pytest.LogCaptureFixture
):
    chunks = [f"Note {i}: {CHUNKS[i % 4]}" for i in range(50)]
    llm = KVPacketLLM(engine=engine, context_window=700, max_new_tokens=4)
    index = index_of(KVPacketVectorStore(engine), [node(f"n{i}", text) for i, text in enumerate(chunks)])
    for mode in ("compact", "simple_summarize"):
        llm.usages.clear()
        synthesizer = KVPacketSynthesizer(llm, mode)
        index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=50).query(QUESTION)
        reused = sum(usage["chunks_reused"] for usage in llm.usages)
        assert reused == 50 or f"{50 - reused} of 50 chunks do not fit" in caplog.text
        assert (reused == 50) == (mode == "compact")


def test_for_a_structured_model_its_schema_is_counted(llm: KVPacketLLM):
    class Lease(BaseModel):
        signed_by: str

    helper = BoundaryPromptHelper.from_llm(llm.as_structured_llm(Lease))
    plain = helper._get_available_chunk_size(QA, llm=llm)
    assert helper._get_available_chunk_size(QA, llm=llm.as_structured_llm(Lease)) < plain - 20


def test_a_copy_and_a_pickle_count_by_the_same_model(
    llm: KVPacketLLM, backbone: Backbone, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
):
    soft = KVPacketEngine(backbone, adapter=adapter)
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: soft)
    helper = BoundaryPromptHelper.from_llm(KVPacketLLM("mine", max_new_tokens=ANSWER), chunk_size_limit=300)
    twins = copy.deepcopy(helper), pickle.loads(pickle.dumps(helper))
    for twin in twins:
        assert twin.model_dump() == helper.model_dump() and twin._llm is not None and twin._llm.engine is soft
        assert twin._cost(CHUNKS[0]) == helper._cost(CHUNKS[0]) > soft.count_tokens(CHUNKS[0]) + 5
        assert twin.repack(QA, CHUNKS) == helper.repack(QA, CHUNKS)
    with pytest.raises(KVPacketError, match="cannot be pickled"):
        pickle.dumps(BoundaryPromptHelper.from_llm(llm))


def test_another_model_is_refused_and_left_to_llama_indexs_own_counting(llm: KVPacketLLM):
    with pytest.raises(KVPacketError, match="needs a KVPacketLLM, and got a MockLLM"):
        BoundaryPromptHelper.from_llm(MockLLM())
    own = BoundaryPromptHelper.from_llm(llm)
    theirs = super(BoundaryPromptHelper, own)._get_available_chunk_size(QA, llm=MockLLM())
    assert own._get_available_chunk_size(QA, llm=MockLLM()) == theirs
    assert own.class_name() == "KVPacketBoundaryPromptHelper"
