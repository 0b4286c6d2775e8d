"""How good an answer is, and how near one way of reading a prompt comes to another."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: the normalisation of SQuAD."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words, against the gold answer that fits best."""
    return max(_f1(squad_normalise(prediction).split(), squad_normalise(gold).split()) for gold in golds)


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    shared = sum((Counter(found) & Counter(gold)).values())
    return 2 * shared / (len(found) + len(gold))


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 if the prediction is one of the gold answers after normalisation, else 0."""
    return float(squad_normalise(prediction) in {squad_normalise(gold) for gold in golds})


def contains(prediction: str, golds: Sequence[str]) -> float:
    """1 if the normalised words of a gold answer stand in the prediction one after another, else 0."""
    found = f" {squad_normalise(prediction)} "
    return float(any(f" {squad_normalise(gold)} " in found for gold in golds if squad_normalise(gold)))


def says_yes_or_no(prediction: str, golds: Sequence[str]) -> float:
    """1 if the first yes or no in the prediction is the gold answer, else 0; for questions with such answers."""
    said = [word for word in squad_normalise(prediction).split() if word in ("yes", "no")]
    return float(bool(said) and said[0] in {squad_normalise(gold) for gold in golds})


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How near next-token distributions come to those of full prefill on the same answer.

    Attributes:
        kl: divergence KL(full prefill ‖ method), in nats, mean over the answer's tokens.
        agreement: share of the answer's tokens at which both have the same most likely token.
    """

    kl: float
    agreement: float


def fidelity(full: Tensor, method: Tensor) -> Fidelity:
    """Compare two sequences of next-token distributions over the whole vocabulary, in float32.

    Args:
        full: (tokens, vocabulary) logits of full prefill.
        method: (tokens, vocabulary) logits of the method, on the same tokens.
    """
    expected, found = torch.log_softmax(full.float(), -1), torch.log_softmax(method.float(), -1)
    kl = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
    same = (full.argmax(-1) == method.argmax(-1)).double()
    return Fidelity(float(kl.mean().clamp_min(0)), float(same.mean()))
