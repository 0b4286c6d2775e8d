"""A3 (arXiv 2511.17560): the tokens recomputed that the question attends to in the first layer.

There cached keys are exact once they are realigned, so the choice costs no more than one layer.
"""

from __future__ import annotations

from torch import Tensor

from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.observe import unseen
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep


class A3(PartialMethod):
    """Recomputes a share of the chunks' tokens above layer 0, and all of them there.

    A share too small for one token leaves nothing to choose, and nothing is recomputed.

    Args:
        ratio: share of all chunks' tokens, 0 to 1.
        packets: see :class:`PartialMethod`.
    """

    def __init__(self, ratio: float, packets: CasePackets) -> None:
        super().__init__(f"a3-{ratio:g}", packets)
        self._ratio = ratio

    def _recompute(self, step: PartialStep) -> Tensor:
        if not step.count(self._ratio):
            return step.run_text()
        scores: list[Tensor] = []

        def watch(layer: int, queries: Tensor, keys: Tensor, scaling: float) -> None:
            scores.append(attention_received(queries[:, step.question], keys[:, step.documents], scaling))

        def choose() -> Tensor:
            if not scores:
                raise unseen(step.backbone.model, [0])
            return step.with_text(step.top(scores[0], self._ratio))

        with step.observe([0], watch):
            return step.run(step.all, {1: choose})


def attention_received(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention that keys get from queries which all see them, summed over queries and their heads.

    Args:
        queries: (heads, queries, width).
        keys: (kv heads, keys, width); query head h looks at kv head h // (heads / kv heads).
        scaling: of their products.

    Returns:
        (keys,), in float32.
    """
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0).float()
    products = queries.float() @ keys.transpose(1, 2) * scaling  # (heads, queries, keys)
    return products.softmax(-1).sum((0, 1))
