"""EPIC, LegoLink-n (arXiv 2410.15332): the first tokens of every chunk recomputed, in every layer.

A chunk that was encoded alone has its attention sink on its own first tokens. Read in their place, they see what
comes before and stop being one. Chunks carry no beginning-of-sequence token of their own here, for every method
is given the same tokens; in the authors' scripts they do, and it counts as the first of the n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep


class Epic(PartialMethod):
    """Recomputes the first ``first`` tokens of each chunk, or all of a shorter one.

    Args:
        first: tokens of a chunk.
        packets: see :class:`PartialMethod`.
    """

    def __init__(self, first: int, packets: CasePackets) -> None:
        super().__init__(f"epic-{first}", packets)
        self._first = first

    def _recompute(self, step: PartialStep) -> Tensor:
        numbers = [(step.chunk == chunk).nonzero()[: self._first, 0] for chunk in range(len(step.packet_ids))]
        return step.run(step.with_text(torch.cat([step.documents[:0], *numbers])))
