"""Attention over a row of packets, each of which sees itself alone.

A mask says the same, at the price of scores for every pair of tokens. Here packets attend within
themselves and only text attends to all, which is most of the work of a training step saved. The
result is that of the masked attention, which stays the path for models that do not attend by
transformers' own scaled-dot-product function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from kvpacket_rag.errors import UnsupportedModelError

_NAME = "kvpacket_blocks"


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Packets of a row, the tokens of no packet, and where each token ends up when the two are joined."""

    packets: tuple[slice, ...]
    text: Tensor
    places: Tensor


_active: dict[int, _Blocks] = {}  # by the identity of a config; a backward pass may look from another thread


def text_tokens(length: int, packets: Sequence[slice], device: torch.device) -> Tensor:
    """The (n,) tokens of a row that belong to no packet."""
    outside = torch.ones(length, dtype=torch.bool, device=device)
    for packet in packets:
        outside[packet] = False
    return outside.nonzero()[:, 0]


def attends_by_blocks(model: PreTrainedModel) -> bool:
    """Whether the model's attention is the function that the one here stands in for."""
    return all(config._attn_implementation == "sdpa" for config in _configs(model))


@contextmanager
def block_attention(model: PreTrainedModel, packets: Sequence[slice], text: Tensor) -> Iterator[None]:
    """Within it, forwards of one row attend by blocks; the mask they are given is that of ``text`` alone.

    Hold the model's lock all the while.

    Args:
        model: see :func:`attends_by_blocks`.
        packets: of the row.
        text: all other tokens, in order.
    """
    order = torch.cat([*(torch.arange(p.start, p.stop, device=text.device) for p in packets), text])
    configs = _configs(model)
    blocks = _Blocks(tuple(packets), text, order.argsort())
    try:
        for config in configs:
            _active[id(config)] = blocks
            config._attn_implementation = _NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"
            _active.pop(id(config), None)


def _configs(model: PreTrainedModel) -> list[Any]:
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: queries (1, heads, tokens, width) to (1, tokens, heads, width)."""
    if position_bias is not None:
        raise UnsupportedModelError(
            "the model's attention adds a bias by position, so packets cannot be trained for it"
        )
    blocks = _active[id(module.config)]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # query head h reads key head h // groups
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    pieces = []
    for packet in blocks.packets:
        mask = _window(packet.stop - packet.start, sliding_window, query)
        q, k, v = query[:, :, packet], key[:, :, packet], value[:, :, packet]
        pieces.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling))
    pieces.append(
        scaled_dot_product_attention(query[:, :, blocks.text], key, value, attn_mask=attention_mask, scale=scaling)
    )
    return torch.cat(pieces, dim=2)[:, :, blocks.places].transpose(1, 2).contiguous(), None


def _window(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """The mask of a packet that is longer than the layer's window; None when plain causal order says it all."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=like.device)
    distance = place[:, None] - place[None]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(_NAME, _attend)
