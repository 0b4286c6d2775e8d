"""What retrievers found: whose it is, how long it is remembered, and how much room its packets take."""

from __future__ import annotations

import copy
import threading

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


def test_a_copy_notes_its_usage_where_the_original_does(llm: KVPacketLLM):
    copied = copy.deepcopy(llm)
    copied.complete(TEXT)
    assert llm.last_usage == copied.last_usage is not None
