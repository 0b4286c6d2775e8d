"""How far packets of an adapter are from full prefill on rows that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.training.objective import Targets, join, kl_per_token
from kvpacket_rag.training.row import Row
from kvpacket_rag.training.student import student_logits
from kvpacket_rag.training.teacher import Teacher
from kvpacket_rag.training.workers import Workers


@torch.no_grad()
def compare(backbone: Backbone, adapter: Adapter, row: Row, targets: Sequence[Targets]) -> tuple[Tensor, Tensor]:
    """How far packets are from the teacher along its answers to one row.

    Returns:
        (answer tokens,) KL(teacher ‖ packets) in nats, and (answer tokens,) whether the most likely token is the same.
    """
    wanted = join(targets, backbone.device)
    with student_logits(backbone, adapter, [row], [[target.answer.tolist() for target in targets]]) as (logits, _):
        return kl_per_token(logits, wanted), logits.argmax(-1) == wanted.answer


def validate(
    backbone: Backbone, adapter: Adapter, rows: Sequence[Row], teacher: Teacher, workers: Workers | None = None
) -> dict[str, float]:
    """KL(teacher ‖ packets) in nats per answer token, over all rows ("all") and by domain.

    Args:
        backbone: the model.
        adapter: may be empty, which is plain concatenation.
        rows: to measure.
        teacher: answers them.
        workers: share the rows, if there are several.
    """
    workers = workers or Workers()
    domains = sorted({row.domain for row in rows})
    sums = torch.zeros(len(domains), 2, device=backbone.device)  # divergence and tokens
    for number in workers.mine(range(len(rows))):
        row = rows[number]
        divergence, _ = compare(backbone, adapter, row, teacher.answer(row))
        sums[domains.index(row.domain)] += torch.stack([divergence.sum(), torch.tensor(len(divergence)).to(divergence)])
    total, tokens = workers.sum(sums).cpu().unbind(1)
    by_domain = (total / tokens).tolist()
    return {"all": float(total.sum() / tokens.sum()), **dict(zip(domains, by_domain, strict=True))}
