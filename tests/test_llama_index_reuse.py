"""What of a prompt comes from packets: known chunks, hinted ones, and those that any retriever found."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import VectorStoreIndex
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_kvpacket import KVPacketLLM, retrieved
from llama_index_kvpacket.retrieved import ADVICE, ESCAPED, RETRIEVED
from llama_index_samples import QUESTION, WordEmbedding, no_stray_loop, node  # noqa: F401

from kvpacket_rag import Backbone, DiskStore, KVPacketEngine, MemoryStore, PacketMissError, StoreFullError, learner
from kvpacket_rag.learner import ENCODED_NOW

TEXT = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\n{QUESTION}"


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=4)


def plain_index(texts: list[str]) -> VectorStoreIndex:
    """An index of LlamaIndex's own, which knows nothing of packets."""
    return VectorStoreIndex([node(f"n{i}", text) for i, text in enumerate(texts)], embed_model=WordEmbedding())


def retrieve(*texts: str) -> None:
    """Let a retriever find these texts."""
    plain_index(list(texts)).as_retriever(similarity_top_k=len(texts)).retrieve(QUESTION)


def reasons(usage: Any) -> list[str]:
    return [miss["reason"] for miss in usage["misses"]]


def test_a_chunk_of_any_index_is_encoded_when_a_prompt_first_holds_it_and_reused_from_then_on(llm: KVPacketLLM):
    query_engine = plain_index(CHUNKS).as_query_engine(llm=llm, similarity_top_k=2)
    first, second = [(query_engine.query(QUESTION).response, llm.last_usage) for _ in range(2)]
    assert first[0] == second[0] and len(llm.engine.store) == 2
    assert first[1]["chunks_reused"] == 0 and reasons(first[1]) == [ENCODED_NOW] * 2
    assert second[1]["chunks_reused"] == 2 and reasons(second[1]) == []
    assert first[1]["packet_tokens"] == 0 and first[1]["prompt_tokens"] == second[1]["prompt_tokens"]
    assert second[1]["packet_tokens"] >= sum(known.num_tokens for known in llm.engine.store.known(llm.engine.signature))


async def test_an_async_stream_encodes_them_too(llm: KVPacketLLM):
    query_engine = plain_index(CHUNKS).as_query_engine(llm=llm, similarity_top_k=2, streaming=True)
    for reused in (0, 2):
        response = await query_engine.aquery(QUESTION)
        assert [piece async for piece in response.async_response_gen()]
        assert llm.last_usage is not None and llm.last_usage["chunks_reused"] == reused


def test_the_time_to_encode_them_is_part_of_the_time_to_the_first_token(
    llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(llm.engine.learner, "prepare", lambda *_, encode: learner.Prepared(seconds=100.0))
    timings = llm.complete(TEXT).raw["timings"]
    assert 100 < timings["load_seconds"] < timings["ttft_seconds"] < timings["total_seconds"] < 150


def test_what_a_prompt_does_not_hold_is_not_encoded(llm: KVPacketLLM):
    retrieve(*CHUNKS)
    assert llm.complete(f"{CHUNKS[1]}\n{QUESTION}").raw["usage"]["chunks_reused"] == 0 and len(llm.engine.store) == 1


@pytest.mark.parametrize("fields", [{"match": "off"}, {"policy": "prefill"}, {"encode_retrieved": False}])
def test_nothing_is_encoded_where_packets_are_not_wanted(llm: KVPacketLLM, fields: dict[str, Any]):
    retrieve(*CHUNKS[:2])
    usage = KVPacketLLM(engine=llm.engine, **fields).complete(TEXT, max_tokens=2).raw["usage"]
    assert len(llm.engine.store) == 0 and usage["packet_tokens"] == 0
    assert reasons(usage) == ([ADVICE.not_encoded] * 2 if "encode_retrieved" in fields else [])


def test_text_that_a_post_processor_put_in_place_of_a_sentence_is_encoded(llm: KVPacketLLM):
    sentence = TextNode(text="Ada Marlow signed it.", metadata={"window": CHUNKS[1]})
    sentence.excluded_llm_metadata_keys = ["window"]
    index = VectorStoreIndex([sentence], embed_model=WordEmbedding())
    steps = [MetadataReplacementPostProcessor(target_metadata_key="window")]
    query_engine = index.as_query_engine(llm=llm, node_postprocessors=steps)
    for reused in (0, 1):
        query_engine.query(QUESTION)
        assert llm.last_usage is not None and llm.last_usage["chunks_reused"] == reused


def test_a_chunk_that_is_part_of_a_longer_one_is_no_chunk_of_its_own(llm: KVPacketLLM):
    retrieve(CHUNKS[1], f"{CHUNKS[0]} {CHUNKS[1]}")
    llm.complete(f"{CHUNKS[0]} {CHUNKS[1]}\n\n{QUESTION}")
    assert [known.text for known in llm.engine.store.known(llm.engine.signature)] == [f"{CHUNKS[0]} {CHUNKS[1]}"]


def test_a_store_that_is_full_is_a_miss_and_no_failure(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise StoreFullError("no room")

    monkeypatch.setattr(llm.engine.store, "put", full)
    retrieve(*CHUNKS[:2])
    usage = llm.complete(TEXT).raw["usage"]
    assert reasons(usage) == ["no room"] * 2 and usage["packet_tokens"] == 0


def test_in_memory_the_oldest_packets_of_retrieved_chunks_make_room(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    for number, chunk in enumerate(CHUNKS):
        monkeypatch.setattr(learner, "_KEPT_BYTES", 0 if number == 3 else 2**40)
        retrieve(chunk)
        llm.complete(f"{chunk}\n{QUESTION}")
        if number == 1:
            llm.engine.encode([chunk], ["a node"])
    texts = [known.text for known in llm.engine.store.known(llm.engine.signature)]
    assert sorted(texts) == sorted([CHUNKS[1], CHUNKS[3]])


def test_on_disk_nothing_is_kept_that_would_outlive_its_document(llm: KVPacketLLM, tmp_path: Any):
    retrieve(*CHUNKS[:2])
    on_disk = KVPacketLLM(engine=KVPacketEngine(llm.engine.backbone, DiskStore(tmp_path), min_match_tokens=4))
    misses = on_disk.complete(TEXT, max_tokens=2).raw["usage"]["misses"]
    assert len(misses) == 2 and all("KVPacketPostprocessor" in miss["reason"] for miss in misses)
    assert not list(on_disk.engine.store.known(on_disk.engine.signature))


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (CHUNKS[0][:70] + "\n\n", ADVICE.cut),
        ("... " + CHUNKS[1][-70:], ADVICE.cut),
        (repr([f"{CHUNKS[2]}\n'{CHUNKS[3]}'"]), ESCAPED),
        (repr([f"title: \"Doors\"\n\n{CHUNKS[2]}\n'{CHUNKS[3]}'"]), ESCAPED),
    ],
)
def test_a_retrieved_chunk_that_a_prompt_holds_in_another_form_is_told_of(llm: KVPacketLLM, shown: str, reason: str):
    chunk = f"{CHUNKS[0]} {CHUNKS[1]}" if reason == ADVICE.cut else f"{CHUNKS[2]}\n'{CHUNKS[3]}'"
    (packet,) = llm.engine.encode([chunk])
    retrieve(chunk, CHUNKS[3][:30])
    usage = llm.complete(f"Context: {shown}\n{QUESTION}").raw["usage"]
    assert {"packet_id": packet, "reason": reason} in usage["misses"] and usage["chunks_reused"] == 0


def test_misses_are_warned_of_or_refused_as_asked(llm: KVPacketLLM, caplog: pytest.LogCaptureFixture):
    retrieve(*CHUNKS[:2])
    with pytest.raises(PacketMissError, match=r"retrieved and has no packet.*Encode it first"):
        llm.complete(TEXT, on_miss="error")
    assert len(llm.engine.store) == 0
    with caplog.at_level(logging.WARNING, logger="kvpacket_rag"):
        llm.complete(TEXT, on_miss="warn")
    assert caplog.text.count(ENCODED_NOW) == 2
    strict = KVPacketLLM(engine=llm.engine, on_miss="error", max_new_tokens=4)
    assert strict.complete(TEXT).raw["usage"]["chunks_reused"] == 2


def test_hints_are_looked_for_and_those_not_in_the_prompt_are_misses(llm: KVPacketLLM):
    first, second, third = llm.engine.encode(CHUNKS[:3])
    usage = llm.complete(TEXT, hints=[first, third]).raw["usage"]
    assert usage["chunks_reused"] == 2 and [miss["packet_id"] for miss in usage["misses"]] == [third]
    usage = llm.complete(TEXT, match="hints", hints=[second]).raw["usage"]
    assert usage["chunks_reused"] == 1 and usage["misses"] == []
    with pytest.raises(PacketMissError, match=third[:12]):
        llm.complete(TEXT, hints=[third], on_miss="error")


def test_with_hints_alone_wanted_and_none_given_what_was_retrieved_counts(llm: KVPacketLLM):
    llm.engine.encode(CHUNKS[:2])
    llm.match = "hints"
    assert llm.complete(TEXT).raw["usage"]["chunks_reused"] == 0
    retrieve(CHUNKS[1], CHUNKS[3])
    usage = llm.complete(TEXT).raw["usage"]
    assert usage["chunks_reused"] == 1 and usage["misses"] == []


def test_a_hinted_copy_shares_everything_but_its_hints(engine: KVPacketEngine):
    llm = KVPacketLLM(engine=engine, max_new_tokens=4)
    (first,) = engine.encode(CHUNKS[:1])
    hinted = llm.hinted([first, first])
    assert hinted.hints == (first,) and llm.hints == () and hinted.engine is engine
    assert hinted.complete(QUESTION).raw["usage"] == llm.last_usage and len(llm.usages) == 1
    assert [miss["packet_id"] for miss in llm.last_usage["misses"]] == [first]


def test_a_model_listens_to_retrievers_once_however_many_there_are(llm: KVPacketLLM):
    before = list(retrieved.get_dispatcher().event_handlers)
    KVPacketLLM(engine=llm.engine)
    assert retrieved.get_dispatcher().event_handlers == before and before.count(RETRIEVED) == 1


def found(*texts: str) -> None:
    """What one retriever found, however much."""
    hits = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    RETRIEVED.handle(retrieved.RetrievalEndEvent(str_or_query_bundle="q", nodes=hits))


def test_only_so_many_retrieved_nodes_are_remembered():
    for number in range(1500):
        found(f"chunk {number}")
    assert RETRIEVED.texts() == [f"chunk {number}" for number in range(1500 - 1024, 1500)]


def test_what_was_retrieved_at_once_is_remembered_whole(llm: KVPacketLLM):
    found(*CHUNKS[:2], *(f"Note {number} of very many, of which the prompt holds none." for number in range(1500)))
    assert reasons(llm.complete(TEXT).raw["usage"]) == [ENCODED_NOW] * 2
    assert llm.complete(TEXT).raw["usage"]["chunks_reused"] == 2


def capped(backbone: Backbone, num_packets: int) -> KVPacketLLM:
    """Over a store that has room for so many of the chunks' packets."""
    probe = KVPacketEngine(backbone)
    probe.encode(CHUNKS)
    chunks = list(probe.store.known(probe.signature))
    sizes = sorted(probe.store.get(chunk.packet_id, probe.signature).size_bytes for chunk in chunks)
    store = MemoryStore(max_bytes=sum(sizes[-num_packets:]))
    return KVPacketLLM(engine=KVPacketEngine(backbone, store, min_match_tokens=4), max_new_tokens=2)


def test_a_capped_store_tells_of_every_retrieved_chunk_that_it_has_no_packet_of(backbone: Backbone):
    llm = capped(backbone, 2)
    prompt = "\n\n".join([*CHUNKS, QUESTION])
    retrieve(*CHUNKS)
    for _ in range(3):
        usage = llm.complete(prompt).raw["usage"]
        assert usage["chunks_reused"] + len(usage["misses"]) == 4 and usage["prefilled_tokens"] > 0
        assert usage["packet_tokens"] >= 0 and usage["chunks_reused"] >= 0
    assert usage["chunks_reused"] == 2 and all("raise max_bytes" in reason for reason in reasons(usage))


def test_a_packet_that_goes_before_the_prompt_is_read_is_a_miss(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    retrieve(*CHUNKS[:2])
    llm.complete(TEXT)
    prepare = llm.engine.learner.prepare

    def then_evict(*given: Any, **options: Any) -> Any:
        prepared = prepare(*given, **options)
        llm.engine.store.delete(llm.engine.encoder.identify(CHUNKS[0])[0])
        return prepared

    monkeypatch.setattr(llm.engine.learner, "prepare", then_evict)
    usage = llm.complete(TEXT).raw["usage"]
    assert usage["chunks_reused"] == 1 and reasons(usage) == ["the store knows no such chunk"]


def test_counts_hold_where_a_longer_chunk_covers_retrieved_ones(llm: KVPacketLLM):
    longer = f"{CHUNKS[0]} {CHUNKS[1]}"
    llm.engine.encode([longer])
    retrieve(*CHUNKS[:2])
    usage = llm.complete(f"{longer}\n\n{QUESTION}").raw["usage"]
    assert usage["chunks_reused"] == 1 and usage["misses"] == [] and len(llm.engine.store) == 1
    assert usage["packet_tokens"] == llm.engine.count_tokens(longer)
    assert usage["prompt_tokens"] == sum(usage[f"{kind}_tokens"] for kind in ("packet", "preamble", "prefilled"))


def test_a_chunk_too_short_to_be_looked_for_is_text_and_no_miss(backbone: Backbone):
    llm = KVPacketLLM(engine=KVPacketEngine(backbone), max_new_tokens=2)
    retrieve("Yes, in May.", CHUNKS[1])
    usages = [llm.complete(f"Yes, in May.\n\n{CHUNKS[1]}\n\n{QUESTION}").raw["usage"] for _ in range(2)]
    assert [usage["chunks_reused"] for usage in usages] == [0, 1] and len(llm.engine.store) == 1
    assert reasons(usages[0]) == [ENCODED_NOW] and usages[1]["misses"] == []


def test_where_nothing_could_be_reused_that_is_told_once(
    llm: KVPacketLLM, tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    retrieve(*CHUNKS[:2])
    on_disk = KVPacketLLM(engine=KVPacketEngine(llm.engine.backbone, DiskStore(tmp_path), min_match_tokens=4))
    for asked in (llm, on_disk, on_disk, on_disk.hinted([])):
        asked.complete(TEXT, max_tokens=1)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "no chunk of a prompt was reused; it was retrieved and has no packet" in told[0]


def test_a_later_prompt_of_an_answer_that_quotes_its_chunks_is_no_fault(
    llm: KVPacketLLM, caplog: pytest.LogCaptureFixture
):
    """As of tree_summarize, whose last prompt holds what the others wrote of the chunks."""
    long = [f"{chunk} It was noted by the clerk on duty." for chunk in CHUNKS]
    retrieve(*long[:2])
    for chunk in long[:2]:
        llm.complete(f"{chunk}\n\n{QUESTION}")
    quoting = f"{long[0][:90]}\n\n{long[1][:90]}\n\n{QUESTION}"
    assert reasons(llm.complete(quoting).raw["usage"]) == [ADVICE.cut] * 2 and not caplog.records
    retrieve(*long[:2])
    llm.complete(quoting)
    assert "no chunk of a prompt was reused" in caplog.text


def test_the_usage_of_every_call_of_an_answer_is_kept(llm: KVPacketLLM):
    llm.engine.encode(CHUNKS)
    plain_index(CHUNKS).as_query_engine(llm=llm, similarity_top_k=3, response_mode="refine").query(QUESTION)
    assert [usage["chunks_reused"] for usage in llm.usages] == [1, 1, 1] and llm.usages[-1] == llm.last_usage
    for _ in range(1100):
        llm.note({}, 0)
    assert len(llm.usages) == 1000
