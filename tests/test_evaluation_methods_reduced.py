from __future__ import annotations

import pytest
from evaluation_samples import first_logits, make_case, own_logits, prefill
from torch.testing import assert_close

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.datasets import QASample
from kvpacket_rag.errors import KVPacketError, PacketError
from kvpacket_rag.evaluation.methods import Bench
from kvpacket_rag.evaluation.questions import PromptSettings, Question
from kvpacket_rag.evaluation.records import RecordFile
from kvpacket_rag.evaluation.run import Evaluation, Variant

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32


@pytest.fixture(scope="module")
def bench(backbone: Backbone, adapter: Adapter) -> Bench:
    return Bench(backbone, adapter)


def num_chunk_tokens(bench: Bench) -> int:
    parts = make_case(bench.backbone).parts
    chunks = [number for number, part in enumerate(parts) if part.packet_id]
    return sum(part.num_tokens for part in parts[chunks[0] : chunks[-1] + 1])


@pytest.mark.parametrize("base", ["packet", "plain"])
def test_nothing_made_smaller_is_the_method_itself(base: str, bench: Bench):
    case = make_case(bench.backbone)
    assert_close(first_logits(f"{base}@none", bench, case), first_logits(base, bench, case), **CLOSE)


def test_a_single_cache_kept_whole_is_full_prefill(bench: Bench):
    case = make_case(bench.backbone)
    state = prefill("single@none", bench, case)
    assert_close(state.logits[0], own_logits(bench.backbone.model, case.ids)[-1], **CLOSE)
    assert state.recomputed_tokens == 0 and state.num_slots == len(case.ids)


def test_a_single_cache_loses_tokens_of_the_chunks_and_none_of_the_preamble(bench: Bench):
    case, length = make_case(bench.backbone), num_chunk_tokens(bench)
    state = prefill("single@random-0.5", bench, case)
    assert state.num_positions == len(case.ids) and state.num_slots == len(case.ids) - length // 2
    before = sum(part.num_tokens for part in case.parts[: [bool(p.packet_id) for p in case.parts].index(True)])
    whole = prefill("full", bench, case)
    for thinned, full in zip(state.context.buffers, whole.context.buffers, strict=True):
        assert_close(thinned[..., :before, :], full[..., :before, :], **CLOSE)


@pytest.mark.parametrize(
    ("size", "most"), [("random-0.5", 0.52), ("int8", 0.30), ("k8v4", 0.25), ("random-0.5+k8v4", 0.15)]
)
def test_stored_bytes_are_those_of_the_tensors_themselves(size: str, most: float, bench: Bench):
    """Shares of float32, with a head of 16 channels, whose scales take more than those of a real model."""
    case = make_case(bench.backbone)
    whole, smaller = prefill("packet", bench, case), prefill(f"packet@{size}", bench, case)
    assert 0 < smaller.packet_bytes <= most * whole.packet_bytes * 1.1


def test_quantised_packets_are_near_and_thinned_ones_less(bench: Bench):
    case = make_case(bench.backbone)
    plain = first_logits("plain", bench, case)
    near, far = (float((first_logits(n, bench, case) - plain).norm()) for n in ("plain@int8", "plain@random-0.9"))
    assert 0 < near < 0.2 * far


@pytest.mark.parametrize(
    ("name", "found"), [("packet@", "SIZE"), ("full@int8", "SIZE"), ("packet@int3", "NAME:RATIO"), ("plain@cur-2", "1")]
)
def test_what_cannot_be_measured_is_refused(name: str, found: str, bench: Bench):
    with pytest.raises(KVPacketError, match=found):
        prefill(name, bench, make_case(bench.backbone))


def test_an_unknown_press_is_an_error_of_the_packets(bench: Bench):
    with pytest.raises(PacketError, match="there is no press"):
        prefill("packet@best-0.5", bench, make_case(bench.backbone))


def test_records_of_another_adapter_are_not_taken_for_these(backbone: Backbone, adapter: Adapter, tmp_path):
    other = Adapter.random(backbone.embed(range(500)), 3, 2, seed=5)
    digests = set()
    for used in (adapter, other):
        variant = Variant("packet@int8", "packet@int8", used)
        evaluation = Evaluation(backbone, [variant], RecordFile(tmp_path / "records.jsonl"))
        digests.add(_key_of(evaluation, backbone, variant))
    assert len(digests) == 2


def _key_of(evaluation: Evaluation, backbone: Backbone, variant: Variant) -> str:
    case = make_case(backbone)
    sample = QASample("1", "Who?", ("Ada",), (), "niah")
    return evaluation._key("niah", Question(sample, None, 4, 0, case), PromptSettings(), variant)
