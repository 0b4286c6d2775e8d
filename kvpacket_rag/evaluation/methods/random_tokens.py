"""Random tokens of the chunks recomputed: the control that every choice of tokens has to beat."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep


class RandomTokens(PartialMethod):
    """Recomputes a share of the chunks' tokens in every layer; equal prompts draw equal tokens.

    Args:
        ratio: share of all chunks' tokens, 0 to 1.
        packets: see :class:`PartialMethod`.
        seed: of the draw.
    """

    def __init__(self, ratio: float, packets: CasePackets, seed: int = 0) -> None:
        super().__init__(f"random-{ratio:g}", packets)
        self._ratio = ratio
        self._seed = seed

    def _recompute(self, step: PartialStep) -> Tensor:
        draw = random.Random(f"{self._seed} {step.ids.tolist()}")
        scores = torch.tensor([draw.random() for _ in range(len(step.documents))], device=step.ids.device)
        return step.run(step.with_text(step.top(scores, self._ratio)))
