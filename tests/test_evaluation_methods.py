from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import CHUNKS
from evaluation_samples import QUESTIONS, divergence, first_logits, make_case, make_messages, own_logits, prefill
from torch.testing import assert_close

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import (
    ContextTooLongError,
    KVPacketError,
    PacketError,
    PromptError,
    UnsupportedModelError,
)
from kvpacket_rag.evaluation.case import Case, decode, release, score
from kvpacket_rag.evaluation.flops import Flops, LayerCost, of_rotation
from kvpacket_rag.evaluation.measure import prefilled
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.parts import Part

NAMES = (
    "full prefix packet plain none legolink-0 random-0.3 random-1 epic-4 epic-999 cacheblend-0.15 cacheblend-1 a3-0.3 "
    "a3-1 sam-kv sam-kv-large"
).split()
ALL_READ = ("full", "prefix", "random-1", "random-1.0", "epic-999", "cacheblend-1.0", "a3-1.0")
NONE_READ = ("random-0", "epic-0", "cacheblend-0", "cacheblend-0.001", "a3-0", "a3-0.001")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32


@pytest.fixture(scope="module")
def bench(backbone: Backbone, adapter: Adapter) -> Bench:
    return Bench(backbone, adapter)


@pytest.mark.parametrize("name", ALL_READ)
def test_all_tokens_recomputed_is_the_models_own_reading(bench: Bench, name: str):
    case = make_case(bench.backbone)
    state = prefill(name, bench, case)
    assert_close(state.logits[0], own_logits(bench.backbone.model, case.ids)[-1], **CLOSE)
    assert state.recomputed_tokens == pytest.approx(case.num_document_tokens)


@pytest.mark.parametrize("name", NONE_READ)
def test_no_token_recomputed_is_plain_concatenation(bench: Bench, name: str):
    case = make_case(bench.backbone)
    state = prefill(name, bench, case)
    assert_close(state.logits[0], first_logits("plain", bench, case), **CLOSE)
    assert state.recomputed_tokens == 0


def test_plain_concatenation_is_what_an_engine_without_adapter_serves(bench: Bench, engine: KVPacketEngine):
    engine.encode(CHUNKS)
    answer = engine.generate(make_messages(), GenerationSettings(max_new_tokens=8))
    state = prefill("plain", bench, make_case(bench.backbone))
    assert tuple(decode(bench.backbone, state, 8)) == answer.token_ids
    assert answer.usage.chunks_reused == 4


def test_the_packet_method_is_what_an_engine_with_its_adapter_serves(bench: Bench, soft_engine: KVPacketEngine):
    messages = [Message("user", "\n\n".join([*CHUNKS, QUESTIONS[0]]))]  # nothing but white space between chunks
    soft_engine.encode(CHUNKS)
    answer = soft_engine.generate(messages, GenerationSettings(max_new_tokens=8))
    state = prefill("packet", bench, Case.from_chat(bench.backbone, messages, CHUNKS))
    assert tuple(decode(bench.backbone, state, 8)) == answer.token_ids
    assert state.num_slots == answer.usage.packet_tokens + answer.usage.prefilled_tokens + 4 * 5  # its soft tokens


def test_without_context_the_chunks_and_the_white_space_between_them_are_gone(bench: Bench):
    chunks = CHUNKS[:2]
    messages = [Message("user", f"{chunks[0]}\n\n{chunks[1]}\n\nWho?")]
    case = Case.from_chat(bench.backbone, messages, chunks)
    ids = [token for part in (case.parts[0], case.parts[-1]) for token in part.ids or []]
    assert_close(first_logits("none", bench, case), own_logits(bench.backbone.model, ids)[-1], **CLOSE)


@pytest.mark.parametrize("method", ["random", "cacheblend", "a3"])
def test_divergence_from_full_prefill_falls_as_more_is_recomputed(bench: Bench, method: str):
    cases = [make_case(bench.backbone, question) for question in range(4)]
    full = [first_logits("full", bench, case) for case in cases]
    found = []
    for ratio in ("0", "0.5", "0.9", "1"):
        logits = [first_logits(f"{method}-{ratio}", bench, case) for case in cases]
        found.append(sum(map(divergence, full, logits)))
    assert found[0] > found[1] > found[2] > found[3]
    assert found[3] < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_scored_in_one_forward_is_predicted_as_step_by_step(bench: Bench, name: str):
    state = prefill(name, bench, make_case(bench.backbone))
    answer = decode(bench.backbone, state, 6)
    scored = score(bench.backbone, state, answer)
    assert scored.shape == (len(answer), bench.backbone.model.config.vocab_size)
    assert scored.argmax(-1).tolist() == answer
    assert decode(bench.backbone, state, 6) == answer  # scored, then decoded again


@pytest.mark.parametrize("name", ["full", "random-1", "cacheblend-1"])
def test_scores_of_a_given_answer_are_the_models_own(bench: Bench, name: str):
    case, answer = make_case(bench.backbone), [7, 41, 300, 12]
    expected = own_logits(bench.backbone.model, case.ids + answer)[-5:-1]
    state = prefill(name, bench, case)
    assert_close(score(bench.backbone, state, answer), expected, **CLOSE)
    assert_close(score(bench.backbone, state, answer[:1]), expected[:1], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [0, 1])
def test_prompts_with_one_chunk_or_none_are_read(bench: Bench, name: str, chunks: int):
    case = make_case(bench.backbone, chunks=chunks)
    state = prefill(name, bench, case)
    assert state.logits.isfinite().all()
    if not chunks and name != "packet":
        assert_close(state.logits[0], own_logits(bench.backbone.model, case.ids)[-1], **CLOSE)


@pytest.mark.parametrize("name", ["packet", "plain", "a3-0.5", "sam-kv"])
def test_a_prompt_that_begins_with_a_chunk_is_read(bench: Bench, name: str):
    parts = list(make_case(bench.backbone).parts)
    first = next(number for number, part in enumerate(parts) if part.packet_id)
    assert prefill(name, bench, Case(parts[first:])).logits.isfinite().all()


def test_a_chunk_at_the_very_end_is_read_as_text(bench: Bench):
    parts = make_case(bench.backbone).parts
    last = max(number for number, part in enumerate(parts) if part.packet_id)
    case = Case(parts[: last + 1])
    assert case.num_document_tokens == sum(part.num_tokens for part in parts[:last] if part.packet_id)
    assert_close(first_logits("random-0", bench, case), first_logits("plain", bench, case), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_times_and_operations_are_told(bench: Bench, name: str):
    case = make_case(bench.backbone)
    state = prefill(name, bench, case)
    assert 0 <= state.load_seconds + state.assemble_seconds < state.ttft_seconds
    assert state.flops.query > 0
    assert (state.flops.rotate > 0) == (state.packet_bytes > 0) == (name not in ("full", "none"))
    assert (state.flops.recompute > 0) == (state.recomputed_tokens > 0)


def test_a_method_is_charged_for_the_packets_it_used_whatever_others_keep(backbone: Backbone):
    names = ("plain", "prefix", "a3-0.3", "none", "full")
    case = make_case(backbone)
    alone = {name: prefill(name, Bench(backbone), case).packet_bytes for name in names}
    together = Bench(backbone)
    for order in (names, names[::-1]):
        assert {name: prefill(name, together, case).packet_bytes for name in order} == alone
    slot = backbone.pool.slot_bytes
    assert alone["plain"] == alone["a3-0.3"] == case.num_document_tokens * slot
    assert alone["prefix"] == case.parts[0].num_tokens * slot and alone["none"] == 0
    prefix = parse_method("prefix", together)
    prefix.prepare(case)
    prefix.prepare(Case(make_case(backbone, chunks=2).parts))
    assert prefix.prefill(case).packet_bytes == alone["prefix"]


def test_packets_of_one_case_only_are_kept(bench: Bench):
    for question, chunks in ((0, 4), (1, 2)):
        prefill("plain", bench, make_case(bench.backbone, question, chunks))
        assert len(bench.bare.store) == chunks


def test_equal_prompts_draw_equal_random_tokens(backbone: Backbone):
    found = [first_logits("random-0.3", Bench(backbone), make_case(backbone)) for _ in range(2)]
    assert_close(found[0], found[1], atol=0, rtol=0)


def test_a_prompt_is_charged_in_full_whoever_read_its_packets_before(backbone: Backbone):
    cost, found = LayerCost.of(backbone), []
    backbone.pool.drop_idle()
    for case in (make_case(backbone, chunks=1), make_case(backbone, chunks=1)):
        for _ in range(2):
            with prefilled(backbone, parse_method("plain", Bench(backbone)), case) as state:
                found.append(state.flops)
    text = len(case.ids) - case.num_document_tokens
    query = cost.layers * cost.of_tokens(text, len(case.ids))
    assert found == [Flops(of_rotation(backbone.plan, case.num_document_tokens), 0.0, query)] * 4


def test_released_memory_is_used_again(bench: Bench):
    case = make_case(bench.backbone)
    state = prefill("plain", bench, case)
    release(bench.backbone, state)
    assert prefill("epic-2", bench, case).context.buffers[0] is state.context.buffers[0]


@pytest.mark.parametrize("name", ["", "full-1", "epic", "epic-x", "random", "random-1.5", "a3--1", "cacheblend-0,15"])
def test_a_name_of_no_method_lists_those_there_are(bench: Bench, name: str):
    with pytest.raises(KVPacketError, match=r"known are full, prefix, packet.*epic-N.*cacheblend-R"):
        parse_method(name, bench)


def test_names_are_kept_as_they_were_given(bench: Bench):
    assert [parse_method(name, bench).name for name in NAMES] == NAMES


@pytest.mark.parametrize("without", [None, "empty"])
def test_the_packet_method_without_an_adapter_is_what_is_served_without_one(backbone: Backbone, without: str | None):
    engine = KVPacketEngine.around(backbone, adapter=None)
    engine.encode(CHUNKS)
    answer = engine.generate(make_messages(), GenerationSettings(max_new_tokens=8))
    bench = Bench(backbone, Adapter.empty(backbone.hidden_size) if without else None)
    state = prefill("packet", bench, make_case(backbone))
    assert tuple(decode(backbone, state, 8)) == answer.token_ids and answer.usage.chunks_reused == 4
    assert not torch.allclose(state.logits, prefill("plain", bench, make_case(backbone)).logits, **CLOSE)


@pytest.mark.parametrize("name", ["full", "plain", "random-0.5"])
def test_a_case_longer_than_the_window_is_refused(bench: Bench, name: str):
    with pytest.raises(ContextTooLongError, match="max_new_tokens"):
        prefill(name, bench, make_case(bench.backbone, max_new_tokens=5000))


def test_answers_beyond_the_room_of_the_case_and_empty_ones_are_refused(bench: Bench):
    state = prefill("full", bench, make_case(bench.backbone, max_new_tokens=2))
    with pytest.raises(PacketError, match="do not fit"):
        score(bench.backbone, state, [5] * 400)
    with pytest.raises(PromptError, match="at least one"):
        score(bench.backbone, state, [])


def test_a_case_without_tokens_is_refused():
    for parts in ([], [Part("text", 1)]):
        with pytest.raises(PromptError, match="parts_of"):
            Case(parts)


def test_a_model_that_takes_no_mask_is_refused_by_name(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    report = bench.backbone.report
    monkeypatch.setattr(bench.backbone, "report", replace(report, one_pass=False))
    with pytest.raises(UnsupportedModelError, match="EPIC, CacheBlend, A3 and SAM-KV"):
        parse_method("epic-4", bench)
    assert torch.isfinite(prefill("plain", bench, make_case(bench.backbone)).logits).all()
