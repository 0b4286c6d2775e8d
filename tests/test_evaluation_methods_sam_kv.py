from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluation_samples import first_logits, make_case, own_logits, prefill
from torch import Tensor
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import repeat_kv

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.evaluation.case import Case, decode, score
from kvpacket_rag.evaluation.methods import Bench
from kvpacket_rag.evaluation.methods.partial import PartialStep
from kvpacket_rag.evaluation.methods.sam_kv import SamKV, SamKVSettings, fold_heads, keep_share, personalise
from kvpacket_rag.parts import Part

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32
SMALL = {"initial": 2, "local": 3, "block": 2}


@pytest.fixture(scope="module")
def bench(make_model: Callable[..., Any], tokenizer: Any) -> Bench:
    """Six layers, so that two of them lie below the stable ones."""
    return Bench(Backbone(make_model(num_hidden_layers=6), tokenizer, "tiny"))


def long_case(bench: Bench, lengths: tuple[int, ...] = (60, 45, 70)) -> Case:
    """Random chunks with a word between them."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(5, 500, (count,), generator=generator).tolist()

    parts = [Part.of_text(draw(6))]
    for number, length in enumerate(lengths):
        parts += [Part("chunk", length, str(number), draw(length)), Part.of_text(draw(2))]
    return Case([*parts, Part.of_text(draw(9))])


def kept_by(method: SamKV, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Tensor]:
    """The state, and the numbers of the tokens that were kept."""
    found: list[Tensor] = []
    original = PartialStep.keep_only

    def keep_only(step: PartialStep, numbers: Tensor) -> None:
        found.append(numbers)
        original(step, numbers)

    monkeypatch.setattr(PartialStep, "keep_only", keep_only)
    return method.prefill(case), found[0]


def test_with_all_kept_and_nothing_mixed_in_it_is_full_prefill(bench: Bench):
    case = long_case(bench)
    state = SamKV(bench.bare, SamKVSettings(64, 64, 8, fresh=1.0)).prefill(case)
    assert_close(state.logits[0], own_logits(bench.backbone.model, case.ids)[-1], **CLOSE)
    assert state.num_slots == state.num_positions == len(case.ids)


def test_with_all_kept_and_nothing_fresh_it_is_plain_concatenation(bench: Bench):
    case = long_case(bench)
    state = SamKV(bench.bare, SamKVSettings(64, 64, 8, fresh=0.0)).prefill(case)
    assert_close(state.logits[0], first_logits("plain", bench, case), **CLOSE)


def test_the_ends_of_every_chunk_and_all_text_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    case = long_case(bench)
    _, kept = kept_by(SamKV(bench.bare, SamKVSettings(**SMALL)), case, monkeypatch)
    done, expected = 0, set()
    for part in case.parts:
        numbers = list(range(done, done + part.num_tokens))
        expected |= set(numbers[:2] + numbers[-3:]) if part.packet_id else set(numbers)
        done += part.num_tokens
    assert expected < set(kept.tolist())
    assert len(kept) < len(case.ids)


def test_what_was_dropped_plays_no_part(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """Fresh tokens at their own positions are those of a prompt from which the others were left out."""
    case = long_case(bench)
    method = SamKV(bench.bare, SamKVSettings(**SMALL, fresh=1.0))
    monkeypatch.setattr(method, "_stable", range(5, 6))  # one layer, so that what is left is the same in all
    state, kept = kept_by(method, case, monkeypatch)
    ids, answer = torch.tensor([case.ids])[:, kept], [9, 40, 77]
    positions = torch.cat([kept, torch.arange(len(case.ids), len(case.ids) + 2)])[None]
    rows = torch.cat([ids, torch.tensor([answer[:2]])], 1)
    size = rows.shape[1]
    mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = bench.backbone.model(rows, position_ids=positions, attention_mask=mask, use_cache=False).logits[0, -3:]
    assert_close(score(bench.backbone, state, answer), expected, **CLOSE)
    assert state.num_slots == len(kept) < state.num_positions == len(case.ids)


def test_layers_above_read_no_more_than_layers_below(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    original = PartialStep.with_text

    def with_text(step: PartialStep, documents: Tensor) -> Tensor:
        sizes.append(len(documents))
        return original(step, documents)

    monkeypatch.setattr(PartialStep, "with_text", with_text)
    state = SamKV(bench.bare, SamKVSettings(**SMALL)).prefill(long_case(bench))
    assert len(sizes) == 4  # the union, then three stable layers above the first
    assert sizes == sorted(sizes, reverse=True)
    assert state.recomputed_tokens == pytest.approx((3 * sizes[0] + sum(sizes[1:])) / 6)


def test_an_answer_is_decoded_and_scored_over_the_shorter_context(bench: Bench):
    state = SamKV(bench.bare, SamKVSettings(**SMALL)).prefill(long_case(bench))
    answer = decode(bench.backbone, state, 6)
    assert score(bench.backbone, state, answer).argmax(-1).tolist() == answer
    assert "update" not in {name for layer in state.bound.cache.layers for name in vars(layer)}


@pytest.mark.parametrize("lengths", [(), (40,), (1,), (1, 1), (5, 60)])
def test_few_and_short_chunks_are_read(bench: Bench, lengths: tuple[int, ...]):
    state = SamKV(bench.bare, SamKVSettings(**SMALL)).prefill(long_case(bench, lengths))
    assert state.logits.isfinite().all()


def test_a_prompt_without_text_before_its_only_chunk_is_read(bench: Bench):
    case = long_case(bench, (40,))
    assert SamKV(bench.bare, SamKVSettings(**SMALL)).prefill(Case(case.parts[1:])).logits.isfinite().all()


def test_the_same_chunk_twice_is_read(bench: Bench):
    parts = make_case(bench.backbone, chunks=1).parts
    assert prefill("sam-kv", bench, Case([*parts[:-1], parts[-2], parts[-1]])).logits.isfinite().all()


def test_folded_queries_match_keys_as_repeated_keys_would_be_matched():
    torch.manual_seed(0)
    queries, keys = torch.randn(6, 8), torch.randn(2, 5, 8)
    repeated = repeat_kv(keys[None], 3)[0]  # query heads, keys, width
    expected = torch.einsum("hd,hkd->k", queries, repeated) / 3
    assert_close(torch.einsum("gd,gkd->k", fold_heads(queries, 2), keys), expected)


def test_a_segments_query_comes_from_the_others_and_the_question():
    torch.manual_seed(0)
    profiles, goal = torch.randn(3, 1, 2, 4), torch.randn(1, 2, 4)
    for segment, found in enumerate(personalise(profiles, goal)):
        for head in range(2):
            g = goal[0, head]
            others = [profiles[i, 0, head] for i in range(3) if i != segment]
            weights = [abs(float(d @ g / (d.norm() * g.norm()))) for d in others]
            expected = sum(w * d for w, d in zip(weights, others, strict=True)) / 2 + g
            assert_close(found[0, head], expected)


def test_the_query_of_an_only_segment_is_the_questions():
    goal = torch.randn(2, 3, 4)
    assert_close(personalise(torch.randn(1, 2, 3, 4), goal)[0], goal)


@pytest.mark.parametrize(
    ("anchor", "share"), [(1.0, 0.0), (1.5, 0.875), (4.0, 0.25), (5.0, 0.0), (5.5, 0.0), (-2.0, 0.0)]
)
def test_the_better_the_anchors_score_among_the_blocks_the_fewer_blocks_are_kept(anchor: float, share: float):
    assert keep_share(anchor, torch.tensor([3.0, 1.0, 5.0])) == share
