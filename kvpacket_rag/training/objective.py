"""How far the student is from the teacher, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Objective = Literal["kl", "ce", "kl+ce"]

_SMALLEST = 1e-9  # of a probability mass, so that its logarithm is finite


@dataclass(frozen=True, slots=True)
class Targets:
    """What the teacher said: for every token of an answer its most likely tokens, and the mass of the rest.

    Attributes:
        answer: (tokens,) greedy choice, the end token included.
        top_ids: (tokens, k).
        top_log_probs: (tokens, k) float32, natural logarithm.
        hidden: (tokens, hidden) float32, states of one layer where the tokens were predicted; None if not kept.
    """

    answer: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    hidden: Tensor | None = None

    @property
    def tail(self) -> Tensor:
        """(tokens,) probability mass outside the top k."""
        return (1 - self.top_log_probs.exp().sum(-1)).clamp_min(0)


def kl_per_token(logits: Tensor, targets: Targets) -> Tensor:
    """Divergence KL(teacher ‖ student) in nats, the vocabulary outside the top k taken as one token.

    A lower bound of the divergence over the whole vocabulary, and equal to it when k is the vocabulary.

    Args:
        logits: (tokens, vocabulary) of the student.
        targets: of the teacher.

    Returns:
        (tokens,) float32.
    """
    student = torch.log_softmax(logits.float(), -1)
    chosen = student.gather(-1, targets.top_ids)
    kept = targets.top_log_probs
    inside = (kept.exp() * (kept - chosen)).sum(-1)
    tail = targets.tail
    rest = (1 - chosen.exp().sum(-1)).clamp_min(_SMALLEST)
    return inside + torch.xlogy(tail, tail) - tail * rest.log()


def cross_entropy_per_token(logits: Tensor, targets: Targets) -> Tensor:
    """(tokens,) negative log-likelihood of the teacher's greedy tokens, in nats."""
    return torch.nn.functional.cross_entropy(logits.float(), targets.answer, reduction="none")


def loss_per_token(logits: Tensor, targets: Targets, objective: Objective, ce_weight: float) -> Tensor:
    """(tokens,) of the chosen objective; ``"kl+ce"`` adds ``ce_weight`` times the cross-entropy."""
    if objective == "ce":
        return cross_entropy_per_token(logits, targets)
    loss = kl_per_token(logits, targets)
    if objective == "kl+ce":
        loss = loss + ce_weight * cross_entropy_per_token(logits, targets)
    return loss


def hidden_error(hidden: Tensor, targets: Targets) -> Tensor:
    """(tokens,) squared error of the student's hidden states, relative to the mean square of the teacher's."""
    if targets.hidden is None:
        raise ValueError("the teacher kept no hidden states; give it a hidden_layer")
    wanted = targets.hidden.float()
    return (hidden.float() - wanted).square().mean(-1) / wanted.square().mean()


def join(targets: Sequence[Targets], device: torch.device) -> Targets:
    """Targets of several answers, one behind the other, on a device."""
    names = [name for name in Targets.__slots__ if getattr(targets[0], name) is not None]
    return Targets(**{name: torch.cat([getattr(t, name) for t in targets]).to(device) for name in names})
