"""CacheBlend (arXiv 2405.16444): the tokens recomputed whose keys and values change most when read in place.

Three versions are in use. This is the one the packet paper compares with: layers 0 and 1 read everything, the
change of keys and values together is measured in layer 1, and one choice holds for all layers above. The authors'
own code measures values alone, LMCache's keys alone; neither filters further from layer to layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep

_CHECKED = 1  # the first layer whose keys and values depend on what stands before a token


class CacheBlend(PartialMethod):
    """Recomputes a share of the chunks' tokens above layer 1, and all of them up to there.

    A share too small for one token leaves nothing to choose, and nothing is recomputed.

    Args:
        ratio: share of all chunks' tokens, 0 to 1.
        packets: see :class:`PartialMethod`.
    """

    def __init__(self, ratio: float, packets: CasePackets) -> None:
        super().__init__(f"cacheblend-{ratio:g}", packets)
        self._ratio = ratio

    def _recompute(self, step: PartialStep) -> Tensor:
        if not step.count(self._ratio):
            return step.run_text()
        documents, views = step.documents, step.views(_CHECKED)
        before = [view[:, documents] for view in views]

        def choose() -> Tensor:
            pairs = zip(before, views, strict=True)
            changes = [(view[:, documents].float() - old.float()).square().sum((0, 2)) for old, view in pairs]
            return step.with_text(step.top(torch.stack(changes).sum(0), self._ratio))

        return step.run(step.all, {_CHECKED + 1: choose})
