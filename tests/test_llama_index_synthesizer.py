"""The synthesizer that knows which node is which packet."""

from __future__ import annotations

import pytest
from conftest import CHUNKS
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.callbacks import CBEventType
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_kvpacket import BoundaryPromptHelper, KVPacketLLM, KVPacketSynthesizer, KVPacketVectorStore
from llama_index_kvpacket.prompt_helper import prompt_tokens
from llama_index_samples import QUESTION, index_of, no_stray_loop, nodes  # noqa: F401

from kvpacket_rag import ContextTooLongError, KVPacketEngine, KVPacketError, PacketMissError

MODES = ["compact", "refine", "tree_summarize", "simple_summarize"]


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    engine.encode(CHUNKS)
    return KVPacketLLM(engine=engine, max_new_tokens=8)


TEMPLATES = {
    "text_qa_template": PromptTemplate("{context_str}\nAnswer: {query_str}"),
    "refine_template": PromptTemplate("{context_msg}\n{existing_answer} Answer: {query_str}"),
    "summary_template": PromptTemplate("{context_str}\nAnswer: {query_str}"),
}


@pytest.fixture
def small(llm: KVPacketLLM) -> KVPacketLLM:
    """A window that takes a template, an answer to refine and two of the chunks, with their metadata."""
    template = prompt_tokens(llm, TEMPLATES["refine_template"].partial_format(query_str=QUESTION))
    return KVPacketLLM(engine=llm.engine, max_new_tokens=8, context_window=template + 2 * 8 + 80)


def found(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=each, score=1.0) for each in nodes(texts)]


@pytest.mark.parametrize("mode", MODES)
def test_the_answer_is_that_of_llama_indexs_own_synthesizer(llm: KVPacketLLM, mode: str):
    if mode == "simple_summarize":  # theirs shows a list; with the helper it does not
        Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    theirs = get_response_synthesizer(llm=llm, response_mode=ResponseMode(mode))
    Settings._prompt_helper = None
    expected = theirs.synthesize(QUESTION, found(*CHUNKS))
    response = KVPacketSynthesizer(llm, mode).synthesize(QUESTION, found(*CHUNKS))
    calls = len(llm.usages) // 2
    assert calls == (4 if mode == "refine" else 1)
    if mode != "simple_summarize":  # theirs puts one line break between chunks
        assert response.response == expected.response
        assert [u["prompt_tokens"] for u in llm.usages[:calls]] == [u["prompt_tokens"] for u in llm.usages[calls:]]
    assert response.source_nodes == expected.source_nodes and response.metadata == expected.metadata
    assert sum(usage["chunks_reused"] for usage in llm.usages[calls:]) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_all_four_ways_give_one_answer(llm: KVPacketLLM, mode: str):
    plain, piecewise = KVPacketSynthesizer(llm, mode), KVPacketSynthesizer(llm, mode, streaming=True)
    expected = plain.synthesize(QUESTION, found(*CHUNKS)).response
    assert (await plain.asynthesize(QUESTION, found(*CHUNKS))).response == expected
    assert "".join(piecewise.synthesize(QUESTION, found(*CHUNKS)).response_gen) == expected
    stream = await piecewise.asynthesize(QUESTION, found(*CHUNKS))
    assert "".join([piece async for piece in stream.async_response_gen()]) == expected


@pytest.mark.parametrize("mode", MODES)
def test_chunks_that_do_not_fit_into_one_prompt_stay_whole(
    small: KVPacketLLM, mode: str, caplog: pytest.LogCaptureFixture
):
    response = KVPacketSynthesizer(small, mode, **TEMPLATES).synthesize(QUESTION, found(*CHUNKS))
    reused = [usage["chunks_reused"] for usage in small.usages]
    expected = {"refine": [1, 1, 1, 1], "tree_summarize": [2, 2, 0], "simple_summarize": [2], "compact": [2, 2]}[mode]
    left_out = 2 if mode == "simple_summarize" else 0  # and a miss
    assert reused == expected and [len(usage["misses"]) for usage in small.usages] == [left_out, *[0] * len(reused[1:])]
    assert len(response.source_nodes) == 4
    assert ("2 of 4 chunks do not fit into one prompt and are left out" in caplog.text) == (mode == "simple_summarize")


@pytest.mark.parametrize("helper", [None, PromptHelper(context_window=400, num_output=8)])
@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_that_is_cut_or_left_out_is_a_miss(small: KVPacketLLM, mode: str, helper: PromptHelper | None):
    long = " ".join(CHUNKS * 8)
    (packet,) = small.engine.encode([long])
    answer = KVPacketSynthesizer(small, mode, prompt_helper=helper, **TEMPLATES)
    answer.synthesize(QUESTION, found(long, CHUNKS[1]))
    misses = [miss["packet_id"] for usage in small.usages for miss in usage["misses"]]
    kept = sum(usage["chunks_reused"] for usage in small.usages)
    assert misses.count(packet) == 1 and len(misses) + kept >= 2
    with pytest.raises(PacketMissError, match=packet[:12]):
        answer._reader.on_miss = "error"
        answer.synthesize(QUESTION, found(long))


def test_summaries_that_no_prompt_takes_two_of_end_in_an_error_and_not_in_a_loop(small: KVPacketLLM):
    wordy = KVPacketLLM(engine=small.engine, max_new_tokens=60, context_window=small.context_window + 52)
    with pytest.raises(ContextTooLongError, match="no two summaries of up to 60 tokens fit into one prompt"):
        KVPacketSynthesizer(wordy, "tree_summarize", **TEMPLATES).synthesize(QUESTION, found(*CHUNKS))


def test_a_retrieved_chunk_without_a_packet_is_a_miss_of_its_own_call(llm: KVPacketLLM):
    unknown = "The harbour office was painted blue in the spring of 2023 by two of the neighbours."
    KVPacketSynthesizer(llm, "refine").synthesize(QUESTION, found(CHUNKS[1], unknown))
    first, second = llm.usages
    assert first["chunks_reused"] == 1 and first["misses"] == []
    assert second["chunks_reused"] == 0 and "the store knows no such chunk" in second["misses"][0]["reason"]
    llm.on_miss = "error"
    with pytest.raises(PacketMissError, match="the store knows no such chunk"):
        KVPacketSynthesizer(llm).synthesize(QUESTION, found(CHUNKS[1], unknown))


def test_with_hints_alone_wanted_only_the_nodes_chunks_are_looked_for(llm: KVPacketLLM):
    llm.match = "hints"
    question = f"{CHUNKS[3]} Is that so?"
    KVPacketSynthesizer(llm).synthesize(question, found(CHUNKS[1]))
    assert llm.last_usage is not None and llm.last_usage["chunks_reused"] == 1
    llm.match = "auto"
    KVPacketSynthesizer(llm).synthesize(question, found(CHUNKS[1]))
    assert llm.last_usage["chunks_reused"] == 2


def test_it_works_in_query_engines_and_takes_their_prompts_and_callbacks(llm: KVPacketLLM, engine: KVPacketEngine):
    retriever = index_of(KVPacketVectorStore(engine), nodes()).as_retriever(similarity_top_k=3)
    query_engine = RetrieverQueryEngine(retriever, KVPacketSynthesizer(llm, ResponseMode.SIMPLE_SUMMARIZE))
    assert query_engine.query(QUESTION).response and llm.usages[-1]["chunks_reused"] == 3
    read = llm.usages[-1]["prefilled_tokens"]
    query_engine.update_prompts({"response_synthesizer:text_qa_template": PromptTemplate("{context_str}\n{query_str}")})
    query_engine.query(QUESTION)
    assert llm.usages[-1]["prefilled_tokens"] < read and llm.usages[-1]["chunks_reused"] == 3


def test_every_call_is_one_event_of_the_models_callbacks(llm: KVPacketLLM):
    from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler

    seen = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = KVPacketSynthesizer(llm, "refine", callback_manager=CallbackManager([seen]))
    synthesizer.synthesize(QUESTION, found(*CHUNKS[:3]))
    assert len(seen.get_event_pairs(CBEventType.LLM)) == 3
    assert len(seen.get_event_pairs(CBEventType.SYNTHESIZE)) == 1


def test_without_nodes_and_without_text_it_answers_as_others_do(llm: KVPacketLLM):
    synthesizer = KVPacketSynthesizer(llm)
    assert synthesizer.synthesize(QUESTION, []).response == "Empty Response" and llm.usages == []
    assert synthesizer.get_response(QUESTION, [CHUNKS[1]]) and llm.usages[-1]["chunks_reused"] == 1
    nothing = NodeWithScore(node=TextNode(text=" "))
    assert synthesizer.synthesize(QUESTION, [nothing]).response and llm.usages[-1]["misses"] == []


def test_another_model_or_mode_is_refused(llm: KVPacketLLM):
    with pytest.raises(KVPacketError, match="needs a KVPacketLLM as llm, and got a MockLLM"):
        KVPacketSynthesizer(MockLLM())
    with pytest.raises(KVPacketError, match="response_mode is 'accumulate', expected 'compact'"):
        KVPacketSynthesizer(llm, ResponseMode.ACCUMULATE)


def test_the_model_of_the_settings_is_the_default(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Settings, "_llm", llm)
    assert KVPacketSynthesizer().get_response(QUESTION, [CHUNKS[1]])
