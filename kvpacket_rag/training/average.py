"""The mean of adapters that were trained one from the other: nearer to the middle of what each step overshot."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from kvpacket_rag.adapter import Adapter, LowRank
from kvpacket_rag.errors import TrainingError


def average(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter with the mean of every number (model soups, Wortsman et al., arXiv 2203.05482).

    Args:
        adapters: of runs that went on from one another, or checkpoints of one run; those of runs that began apart have
            no mean that works.

    Returns:
        It says of itself what the last one does, and which were averaged; figures of validation are left out, for
        they were not measured on it.

    Raises:
        TrainingError: fewer than two, or they are built otherwise.
    """
    if len(adapters) < 2:
        raise TrainingError(f"a mean takes two adapters or more, found {len(adapters)}")
    for adapter in adapters:
        if _build(adapter) != _build(adapters[0]):
            raise TrainingError(
                f"adapters that are built otherwise have no mean: {adapters[0].summary}, and {adapter.summary}"
            )
    tensors = [adapter.tensors() for adapter in adapters]
    mean = {name: torch.stack([found[name].detach().float() for found in tensors]).mean(0) for name in tensors[0]}
    last = adapters[-1]
    about = {key: value for key, value in last.metadata.items() if key not in ("validation_kl", "plain_kl", "step")}
    about["average_of"] = json.dumps([adapter.digest for adapter in adapters])
    modules = [name.removesuffix(".down") for name in mean if name.endswith(".down")]
    update = LowRank({module: (mean[f"{module}.down"], mean[f"{module}.up"]) for module in modules})
    return Adapter(mean["header"], mean["trailer"], about, deep=mean.get("deep"), low_rank=update if modules else None)


def _build(adapter: Adapter) -> object:
    """What two adapters must share to have a mean."""
    about = [adapter.metadata.get(key) for key in ("model", "header", "separators")]
    return about, {name: tuple(tensor.shape) for name, tensor in adapter.tensors().items()}
