"""The objectives against torch's own, over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvpacket_rag.training.objective import (
    Targets,
    cross_entropy_per_token,
    hidden_error,
    join,
    kl_per_token,
    loss_per_token,
)


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(seed)) * 2


def _targets(teacher: torch.Tensor, k: int) -> Targets:
    values, ids = torch.log_softmax(teacher, -1).topk(k)
    return Targets(teacher.argmax(-1), ids, values)


def _full_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    p, q = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
    return torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def test_kl_over_the_whole_vocabulary_is_the_divergence() -> None:
    teacher, student = _logits(0), _logits(1)
    assert_close(kl_per_token(student, _targets(teacher, 50)), _full_kl(teacher, student), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 5, 20, 49])
def test_kl_over_the_top_is_a_lower_bound_that_grows_with_k(k: int) -> None:
    teacher, student = _logits(0), _logits(1)
    some, more = (kl_per_token(student, _targets(teacher, n)) for n in (k, k + 1))
    assert (some <= more + 1e-5).all() and (more <= _full_kl(teacher, student) + 1e-4).all()


def test_kl_of_the_teacher_with_itself_is_zero() -> None:
    assert_close(kl_per_token(_logits(0), _targets(_logits(0), 8)), torch.zeros(6), atol=1e-5, rtol=0)


def test_kl_is_computed_in_float32_from_bfloat16_logits() -> None:
    student = _logits(1).bfloat16()
    assert_close(
        kl_per_token(student, _targets(_logits(0), 50)), _full_kl(_logits(0), student.float()), atol=1e-4, rtol=1e-4
    )


def test_kl_stays_finite_when_the_student_is_certain_of_the_top() -> None:
    student = torch.full((1, 50), -100.0)
    student[0, 0] = 100.0
    assert kl_per_token(student, _targets(_logits(0)[:1], 8)).isfinite().all()


def test_cross_entropy_is_that_of_the_greedy_tokens() -> None:
    teacher, student = _logits(0), _logits(1)
    expected = -torch.log_softmax(student, -1)[torch.arange(6), teacher.argmax(-1)]
    assert_close(cross_entropy_per_token(student, _targets(teacher, 8)), expected)


def test_both_objectives_add_up() -> None:
    student, targets = _logits(1), _targets(_logits(0), 8)
    expected = kl_per_token(student, targets) + 0.3 * cross_entropy_per_token(student, targets)
    assert_close(loss_per_token(student, targets, "kl+ce", 0.3), expected)


def test_the_hidden_error_is_relative_to_the_teachers_scale() -> None:
    hidden = torch.randn(6, 4)
    targets = Targets(*(torch.zeros(6) for _ in range(3)), hidden=hidden)
    assert_close(hidden_error(hidden * 0, targets).mean(), torch.tensor(1.0))
    assert not hidden_error(hidden, targets).any()


def test_joined_targets_keep_order_and_leave_out_what_is_missing() -> None:
    parts = [_targets(_logits(seed), 4) for seed in (0, 1)]
    joined = join(parts, torch.device("cpu"))
    assert joined.answer.tolist() == [*parts[0].answer.tolist(), *parts[1].answer.tolist()] and joined.hidden is None
