"""What a press is, what it may look at, and the presses that need no other library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, normalize

Needs = Literal["tensors", "hidden", "projections"]
BLOCK = 256  # queries whose attention is in memory at once


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of one packet, as presses see it; what the packet leaves out is left out here, too.

    Attributes:
        number: of the layer.
        keys: (1, heads, tokens, width), rotated from position 0.
        values: (1, heads, tokens, width).
        module: the attention module; None for presses that need tensors alone, and so are the rest.
        hidden: (1, tokens, hidden) that it read.
        cos: (1, tokens, width) of the positions from 0.
        sin: the same.
    """

    number: int
    keys: Tensor
    values: Tensor
    module: Any = None
    hidden: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class Press(Protocol):
    """Scores the tokens of a packet; those with the highest scores of their head are kept."""

    @property
    def needs(self) -> Needs:
        """What it looks at: cached tensors alone; what the attention modules read; or their projections of it, too."""

    @property
    def settings(self) -> str:
        """All that its scores depend on beside the packet and the ratio; part of the signature."""

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """Scores of a layer.

        Args:
            layer: of one packet.
            num_kept: tokens that will be kept.
            seed: for what is drawn; the same for every layer of the packet.

        Returns:
            (heads, tokens); infinity for tokens that have to stay.
        """

    def project_keys(self, layer: LayerView) -> Tensor:
        """(1, heads, tokens, width): keys before rotation, computed the way this press computes queries.

        Turned, they have to be the cached ones, or the press would misread the model.
        """


class RandomPress:
    """Keeps random tokens: the control that every other press has to beat.

    The same ones in every layer and others in every head, as kvpress's with a seed.
    """

    needs: Needs = "tensors"
    settings = "random"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        return torch.rand(layer.keys.shape[1:3], generator=torch.Generator().manual_seed(seed))

    def project_keys(self, layer: LayerView) -> Tensor:
        """Not needed."""
        raise NotImplementedError


class KeyDiffPress:
    """Keeps tokens whose keys are least like the others (KeyDiff, arXiv 2504.15364)."""

    needs: Needs = "tensors"
    settings = "keydiff"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        units = normalize(layer.keys[0].float(), dim=-1)
        mean = units.mean(1, keepdim=True)
        return -(units * normalize(mean, dim=-1)).sum(-1)

    def project_keys(self, layer: LayerView) -> Tensor:
        """Not needed."""
        raise NotImplementedError


class RereadPress:
    """Keeps the tokens that would add most, were the chunk read again behind itself.

    What a token adds to a query's output is its attention times the size of its value; the root mean square of that
    over all queries of a head is the score. Attention alone would rate tokens highest that serve as sinks, and their
    values are close to nothing (VATP, arXiv 2406.12335). A second reading stands for questions that are not known yet
    (KVzip, arXiv 2505.23416). The model reads once only: the queries of that reading are turned on, the first to where
    the last one was, and there see all tokens of the packet and nothing else.
    """

    needs: Needs = "projections"
    settings = "reread"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        keys = layer.keys[0].float()[:, None]  # (heads, 1, tokens, width)
        queries = _turn_behind(_queries(layer), layer)
        squares = torch.zeros(layer.keys.shape[1:3], device=keys.device)
        for some in queries.split(BLOCK, dim=2):
            squares += (some @ keys.transpose(-1, -2) * _scaling(layer)).softmax(-1).square().sum((1, 2))
        size: Tensor = layer.values[0].float().norm(dim=-1)
        return squares.div(queries.shape[1] * queries.shape[2]).sqrt() * size

    def project_keys(self, layer: LayerView) -> Tensor:
        """See :meth:`Press.project_keys`."""
        return _project(layer.module, layer.hidden, "k", layer.keys.shape[3])


class MixKVPress:
    """Mixes importance and diversity, the more of the latter the more alike a head's keys are (arXiv 2510.20707).

    Importance is the attention of the last tokens, the window, and the size of the value; diversity is unlikeness to
    the mean key. Both are brought to one scale. The window itself is kept.
    """

    needs: Needs = "projections"

    def __init__(self, window: int = 32, kernel: int = 5) -> None:
        self._window = window
        self._kernel = kernel
        self.settings = f"mixkv, window {window}, kernel {kernel}"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        keys, values = layer.keys[0].float(), layer.values[0].float()
        num_tokens = keys.shape[1]
        window = clamp_window(self._window, num_tokens, num_kept)
        candidates = num_tokens - window
        attention = _window_attention(layer, window)
        pooled = avg_pool1d(attention, self._kernel, 1, self._kernel // 2)[:, :candidates]
        scale = pooled.mean(-1, keepdim=True)
        importance = pooled + _match(values[:, :candidates].norm(dim=-1), scale)
        units = normalize(keys, dim=-1)
        mean = units.mean(1, keepdim=True)
        diversity = _match(-(units[:, :candidates] * mean).sum(-1), scale)
        squared = mean.square().sum(-1)  # (heads, 1)
        redundancy = (num_tokens * squared - 1) / (num_tokens - 1)  # mean cosine of two different keys
        scores = redundancy * diversity + (1 - redundancy) * importance
        return torch.nn.functional.pad(scores, (0, window), value=torch.inf)

    def project_keys(self, layer: LayerView) -> Tensor:
        """See :meth:`Press.project_keys`."""
        return _project(layer.module, layer.hidden, "k", layer.keys.shape[3])


def clamp_window(window: int, num_tokens: int, num_kept: int) -> int:
    """At most half of the tokens, and half of those that are kept, so that others have a chance."""
    return max(1, min(window, num_tokens // 2, num_kept // 2))


def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (1, heads, tokens, width) by angles (1, tokens, width); channel k is paired with k + width / 2."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def attend(layer: LayerView) -> Tensor:
    """What an attention module should give for the last tokens it read, if it does what presses take it to do.

    Args:
        layer: with all that the module read.

    Returns:
        (1, up to 256 tokens, hidden).
    """
    heads, width = layer.keys.shape[1], layer.keys.shape[3]
    keys = turn(_project(layer.module, layer.hidden, "k", width), layer.cos, layer.sin)[0]  # type: ignore[arg-type]
    values: Tensor = layer.module.v_proj(layer.hidden).unflatten(-1, (heads, -1)).transpose(1, 2)[0]
    attention = _attention(_queries(layer)[:, :, -BLOCK:], keys, _scaling(layer))
    mixed = (attention @ values.float()[:, None]).flatten(0, 1).transpose(0, 1).flatten(1)
    made: Tensor = layer.module.o_proj(mixed.to(layer.hidden.dtype)[None])  # type: ignore[union-attr]
    return made


def _window_attention(layer: LayerView, window: int) -> Tensor:
    """(heads, tokens - window): attention of the last tokens to all before, the mean over them and a head's queries."""
    attention = _attention(_queries(layer)[:, :, -window:], layer.keys[0], _scaling(layer))
    return attention[..., :-window].mean((1, 2))


def _attention(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Of the last queries to the keys of all tokens up to their own.

    Args:
        queries: (heads, queries a head, the last tokens, width) in float32.
        keys: (heads, tokens, width).
        scaling: of their products.
    """
    weights = queries @ keys.float()[:, None].transpose(-1, -2) * scaling
    later = torch.ones_like(weights, dtype=torch.bool).triu(keys.shape[1] - queries.shape[2] + 1)
    attention: Tensor = weights.masked_fill(later, -torch.inf).softmax(-1)
    return attention


def _queries(layer: LayerView) -> Tensor:
    """(heads, queries a head, tokens, width) in float32, turned to their positions."""
    heads, _, width = layer.keys.shape[1:]
    queries = turn(_project(layer.module, layer.hidden, "q", width), layer.cos, layer.sin)  # type: ignore[arg-type]
    grouped: Tensor = queries[0].float().unflatten(0, (heads, -1))
    return grouped


def _turn_behind(queries: Tensor, layer: LayerView) -> Tensor:
    """Queries at positions from 0, moved so that the first is where the last was."""
    cos, sin = layer.cos[:, -1:].float(), layer.sin[:, -1:].float()  # type: ignore[index]
    scale = torch.hypot(cos, sin)  # of models that scale attention by their angles; it is in the queries already
    return turn(queries, cos / scale, sin / scale)


def _scaling(layer: LayerView) -> float:
    """What a layer multiplies queries by keys with."""
    return float(getattr(layer.module, "scaling", layer.keys.shape[3] ** -0.5))


def _project(module: nn.Module, hidden: Tensor | None, which: Literal["q", "k"], width: int) -> Tensor:
    """(1, heads, tokens, width) queries or keys before rotation."""
    projected: Tensor = getattr(module, f"{which}_proj")(hidden).unflatten(-1, (-1, width)).transpose(1, 2)
    norm = getattr(module, f"{which}_norm", None)
    return projected if norm is None else norm(projected)


def _match(values: Tensor, scale: Tensor) -> Tensor:
    """(heads, tokens) brought to [0, 1], then to a mean of ``scale``."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    unit = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    return unit * scale / (unit.mean(-1, keepdim=True) + 1e-8)
