"""Scores against values worked out by hand, divergences against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvpacket_rag.evaluation.bootstrap import (
    average,
    difference,
    estimate,
    mean,
    median,
    percentile_95,
    recovered_divergence,
    recovered_score,
)
from kvpacket_rag.evaluation.metrics import contains, exact_match, f1, fidelity, says_yes_or_no, squad_normalise


def test_normalisation_drops_case_punctuation_articles_and_spaces():
    assert squad_normalise("  The Harbour-Office, of  an A.D. town!\n") == "harbouroffice of ad town"
    assert squad_normalise("1,234,567") == "1234567"
    assert squad_normalise("theatre another") == "theatre another"


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Ada Marlow signed", ["Ada Marlow"], 4 / 5),  # precision 2/3, recall 1
        ("in March 2021", ["March 2021", "21 March"], 4 / 5),  # the better of 4/5 and 2/5
        ("the the cat", ["cat cat"], 2 / 3),  # articles gone: one word of one, one of two
        ("x x y", ["x y y"], 2 / 3),  # words count as often as they stand in both
        ("nothing alike", ["Ada Marlow"], 0),
        ("", ["Ada"], 0),
        ("the", ["an"], 1),  # both empty after normalisation
    ],
)
def test_f1_equals_the_value_worked_out_by_hand(prediction: str, golds: list[str], expected: float):
    assert f1(prediction, golds) == pytest.approx(expected)


def test_exact_match_is_after_normalisation_and_over_all_golds():
    assert exact_match("The Lease.", ["rent", "lease"]) == 1
    assert exact_match("the lease of the office", ["lease"]) == 0


def test_contains_wants_whole_words_in_order():
    assert contains("It is 8,412,097.", ["8412097"]) == 1
    assert contains("It is 84120971.", ["8412097"]) == 0
    assert contains("Marlow, Ada", ["Ada Marlow"]) == 0
    assert contains("anything", ["the"]) == 0


def test_yes_and_no_are_told_by_the_first_one_said():
    assert says_yes_or_no("Yes, though no one says so.", ["yes"]) == 1
    assert says_yes_or_no("It is not known.", ["no"]) == 0
    assert says_yes_or_no("The answer is no.", ["No"]) == 1


def test_fidelity_equals_the_definition_of_the_divergence():
    full, method = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    p, q = (np.exp(x.numpy()) / np.exp(x.numpy()).sum(-1, keepdims=True) for x in (full, method))
    found = fidelity(full, method)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)  # float32
    assert found.agreement == (p.argmax(-1) == q.argmax(-1)).mean()


def test_fidelity_of_equal_logits_is_perfect_and_of_broken_ones_not_a_number():
    logits = torch.randn(4, 9)
    same = fidelity(logits.to(torch.bfloat16), logits.to(torch.bfloat16))
    assert (same.kl, same.agreement) == (0, 1)
    assert fidelity(logits, logits + 3).kl == pytest.approx(0, abs=1e-6)  # float32
    assert math.isnan(fidelity(logits, logits * torch.nan).kl)


def test_recovered_gaps_are_ratios_of_means():
    method, plain, full = np.array([0.1, 0.3]), np.array([0.2, 0.6]), np.array([0.9, 1.0])
    assert recovered_divergence(method, plain) == pytest.approx(1 - 0.4 / 0.8)
    assert recovered_score(method, plain, full) == pytest.approx((0.2 - 0.4) / (0.95 - 0.4))


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = estimate(mean, values)
    half = 1.96 * values.std() / 20
    assert found.value == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)


def test_pairs_stay_together_in_every_draw():
    plain = np.random.default_rng(2).uniform(0.1, 5, 60)
    found = estimate(recovered_divergence, plain * 0.25, plain)
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.75, 0.75))
    found = estimate(difference, plain + 1, plain)
    assert (found.low, found.high) == pytest.approx((1, 1))


def test_draws_are_the_same_from_the_same_seed_only():
    values = list(np.random.default_rng(3).uniform(size=30))
    assert estimate(median, values, seed=1).low == estimate(median, values, seed=1).low
    assert (estimate(mean, values, seed=1).draws != estimate(mean, values, seed=2).draws).any()
    assert percentile_95(np.arange(101.0)) == 95


def test_a_ratio_without_a_gap_is_not_defined():
    assert not estimate(recovered_divergence, [0.0, 0.0], [0.0, 0.0]).is_defined
    some = estimate(recovered_divergence, [0.1, 0.1, 0.1], [0.0, 0.0, 0.5])
    assert some.is_defined and np.isfinite([some.low, some.high]).all()


def test_sets_are_averaged_with_equal_weight_and_independent_draws():
    large, small = estimate(mean, [1.0] * 100, seed=4), estimate(mean, [0.0, 4.0], seed=4)
    both = average([large, small])
    assert both.value == 1.5 and (both.low, both.high) == (0.5, 2.5)
