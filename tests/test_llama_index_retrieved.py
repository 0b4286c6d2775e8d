"""What retrievers found: whose it is, how long it is remembered, and how much room its packets take."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
from conftest import CHUNKS
from llama_index_kvpacket import KVPacketLLM, KVPacketVectorStore
from llama_index_kvpacket.retrieved import ADVICE
from llama_index_samples import QUESTION, WordEmbedding, index_of, no_stray_loop, node  # noqa: F401
from test_llama_index_reuse import TEXT, reasons, retrieve

from kvpacket_rag import KVPacketEngine, learner
from kvpacket_rag.learner import ENCODED_NOW


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=4)


def test_what_was_deleted_gets_no_packet_again_though_a_prompt_still_holds_it(llm: KVPacketLLM):
    store = KVPacketVectorStore(llm.engine)
    index = index_of(store, [node(f"n{number}", text, f"d{number}") for number, text in enumerate(CHUNKS)])
    assert len(index.as_retriever(similarity_top_k=4).retrieve(QUESTION)) == 4
    store.delete("d1")
    changed = node("n0", "The cold room was taken out of use by the night shift.", "d0")
    store.add([changed.model_copy(update={"embedding": WordEmbedding().get_text_embedding(changed.text)})])
    llm.complete(TEXT)
    kept = {known.text for known in llm.engine.store.known(llm.engine.signature)}
    assert kept == {changed.text, *CHUNKS[2:]}
    store.clear()
    assert len(llm.engine.store) == 0


def test_what_others_retrieved_is_no_miss_though_the_prompt_quotes_it(llm: KVPacketLLM):
    """Another request's retrieval, and an earlier turn of this one, whose answer stands in the prompt in part."""
    long = [f"{chunk} It was noted by the clerk on duty." for chunk in CHUNKS]
    other = threading.Thread(target=retrieve, args=[long[0]])
    other.start()
    other.join()
    retrieve(long[1])
    retrieve(long[2])
    usage = llm.complete(f"{long[0][:90]}\n{long[1][:90]}\n\n{long[2]}\n\n{QUESTION}").raw["usage"]
    assert reasons(usage) == [ENCODED_NOW]
    cut = llm.complete(f"{long[2][:90]}\n\n{QUESTION}").raw["usage"]
    assert reasons(cut) == [ADVICE.cut]  # its own still is


def test_packets_of_retrieved_chunks_are_bounded_however_many_models_share_an_engine(
    llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch
):
    retrieve(*CHUNKS)
    llm.complete(TEXT)
    monkeypatch.setattr(learner, "_KEPT_BYTES", llm.engine.store.size_bytes)
    for chunk in CHUNKS[2:]:
        KVPacketLLM(engine=llm.engine, max_new_tokens=2).complete(f"{chunk}\n\n{QUESTION}")
    assert len(llm.engine.store) == 2


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda llm: llm.model_copy(), lambda llm: llm.model_copy(deep=True)]
)
def test_a_copy_counts_for_itself_and_a_hinted_one_where_the_original_does(
    llm: KVPacketLLM, copied: Callable[[KVPacketLLM], KVPacketLLM]
):
    llm.complete(QUESTION)
    own, twin = llm.last_usage, copied(llm)
    assert twin.last_usage is None and twin.usages == [] and twin.engine is llm.engine
    twin.complete(TEXT)
    assert llm.usages == [own] and llm.last_usage == own != twin.last_usage
    hinted = twin.hinted([])
    hinted.complete(QUESTION)
    assert len(twin.usages) == 2 and hinted.last_usage is twin.last_usage and llm.usages == [own]


def test_of_a_prompt_that_is_known_in_part_the_rest_gets_packets_too(llm: KVPacketLLM):
    counts = []
    for texts in (CHUNKS[:2], CHUNKS[:3], CHUNKS[2:3]):
        retrieve(*texts)
        usage = llm.complete("\n\n".join([*texts, QUESTION])).raw["usage"]
        counts.append((usage["chunks_reused"], len(usage["misses"])))
    assert counts == [(0, 2), (2, 1), (1, 0)]
