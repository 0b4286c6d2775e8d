"""The mean of adapters that were trained one from the other: nearer to the middle of what each step overshot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter, LowRank
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.training.checkpoint import differences


def average(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter with the mean of every number (model soups, Wortsman et al., arXiv 2203.05482).

    Args:
        adapters: of runs that went on from one another, or checkpoints of one run; those of runs that began apart have
            no mean that works.

    Returns:
        It says of itself what the last one does, and which were averaged; figures of validation are left out, for
        they were not measured on it.

    Raises:
        TrainingError: fewer than two, or they are built otherwise or were trained for other weights.
    """
    if len(adapters) < 2:
        raise TrainingError(f"a mean takes two adapters or more, found {len(adapters)}")
    for one, other in combinations(adapters, 2):
        if told := _difference(one, other):
            raise TrainingError(f"adapters that are built otherwise, or of other weights, have no mean: {told}")
    mean = _mean([{name: tensor.float() for name, tensor in adapter.tensors().items()} for adapter in adapters])
    last = adapters[-1]
    about = {key: value for key, value in last.metadata.items() if key not in ("validation_kl", "plain_kl", "step")}
    about["average_of"] = json.dumps([adapter.digest for adapter in adapters])
    modules = [name.removesuffix(".down") for name in mean if name.endswith(".down")]
    update = LowRank({module: (mean[f"{module}.down"], mean[f"{module}.up"]) for module in modules})
    return Adapter(mean["header"], mean["trailer"], about, deep=mean.get("deep"), low_rank=update if modules else None)


def _mean(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every tensor; an update that an adapter leaves out, for it changes nothing, counts as one of zero."""
    mean = {}
    for name in {name: None for found in parts for name in found}:
        there = [found[name] for found in parts if name in found]
        mean[name] = torch.stack(there).sum(0) / (len(parts) if name.endswith(".up") else len(there))
    return mean


def _difference(one: Adapter, other: Adapter) -> str:
    """In what two adapters differ that have no mean; nothing if they have one."""
    keys = ["architecture", "weights", "tokenizer", "header", "separators"]
    keys += [] if one.metadata.get("weights") and other.metadata.get("weights") else ["model"]
    pairs: list[tuple[str, object, object]] = [(key, one.metadata.get(key), other.metadata.get(key)) for key in keys]
    left, right = ({name: tuple(t.shape) for name, t in found.tensors().items()} for found in (one, other))
    # modules that an adapter leaves out change nothing
    names = [n for n in left | right if not n.endswith((".down", ".up")) or (n in left and n in right)]
    pairs += [(name, left.get(name), right.get(name)) for name in names]
    return differences(pairs, "{} is {} and {}")
