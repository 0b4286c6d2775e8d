"""What packets are compared with: transformers alone, as its users call it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpacket_rag.backbone import Backbone


@torch.inference_mode()
def prefill(backbone: Backbone, ids: Sequence[int]) -> DynamicCache:
    """Read a prompt in full and pick the first token; its cache."""
    cache = DynamicCache()
    _forward(backbone, ids, cache).argmax(-1)
    return cache


@torch.inference_mode()
def prefill_behind(backbone: Backbone, cache: DynamicCache, ids: Sequence[int]) -> Tensor:
    """The first token of a question behind a context that was read before, as transformers reuses a prefix."""
    return _forward(backbone, ids, copy.deepcopy(cache)).argmax(-1)


@torch.inference_mode()
def prefill_batch(backbone: Backbone, rows: Sequence[Sequence[int]]) -> None:
    """Read several texts at once, padded on the right."""
    lengths = torch.tensor([len(row) for row in rows])
    inputs = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(backbone.device)
    backbone.model(
        input_ids=inputs.to(backbone.device),
        attention_mask=None if mask.all() else mask,
        cache=DynamicCache(),
        use_cache=True,
        logits_to_keep=1,
    )


@torch.inference_mode()
def greedy(backbone: Backbone, ids: Sequence[int], tokens: int) -> list[float]:
    """A plain greedy loop of ``tokens`` tokens; seconds from each token to the next."""
    cache = DynamicCache()
    token = int(_forward(backbone, ids, cache).argmax(-1))
    times = [time.perf_counter()]
    for _ in range(tokens - 1):
        token = int(_forward(backbone, [token], cache).argmax(-1))
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _forward(backbone: Backbone, ids: Sequence[int], cache: DynamicCache) -> Tensor:
    inputs = torch.tensor([list(ids)], device=backbone.device)
    return backbone.model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # type: ignore[no-any-return]
