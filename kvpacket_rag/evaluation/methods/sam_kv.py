"""SAM-KV (arXiv 2508.11661): the greater part of a chunk dropped, what is left recomputed and mixed with the cached.

Written after the packet paper's version of it, with two of its faults put right: query heads are averaged with
those that share their key-value head, and the question's own keys and values are mixed with nothing. As there, a
chunk's mean query stays at the positions it was stored at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.evaluation.case import Case
from kvpacket_rag.evaluation.methods.bench import CasePackets
from kvpacket_rag.evaluation.methods.narrow import Choice
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep

_STABLE_LAYERS = 4  # the last ones, whose attention varies least


@dataclass(frozen=True, slots=True)
class SamKVSettings:
    """What is kept.

    Attributes:
        initial: tokens at a chunk's beginning that always are.
        local: tokens at its end that always are.
        block: tokens between them that are kept or dropped together.
        fresh: share of the recomputed keys and values in what replaces the cached ones.
    """

    initial: int = 8
    local: int = 16
    block: int = 8
    fresh: float = 0.9


LARGE = SamKVSettings(64, 128, 64)


class SamKV(PartialMethod):
    """Keeps the two ends of every chunk and blocks between them that the question's queries match.

    Beside a chunk's packet it needs a vector a head for four layers, which is not counted among the stored bytes.

    Args:
        packets: see :class:`PartialMethod`.
        settings: the paper's small ones by default, for chunks of a hundred tokens; see :data:`LARGE`.
    """

    def __init__(self, packets: CasePackets, settings: SamKVSettings | None = None) -> None:
        super().__init__("sam-kv-large" if settings == LARGE else "sam-kv", packets)
        self._settings = settings or SamKVSettings()
        layers = packets.backbone.model.config.get_text_config(decoder=True).num_hidden_layers
        self._stable = range(max(0, layers - _STABLE_LAYERS), layers)
        self._profiles: dict[str | None, Tensor] = {}
        self._case: Case | None = None

    def prepare(self, case: Case) -> None:
        """Encode the chunks, and keep of each the mean query of its last tokens, (stable layers, heads, width)."""
        super().prepare(case)
        if case is self._case:
            return
        parts = {part.packet_id: part for part in self._packets.parts(case) if part.packet_id}
        self._profiles = {}
        for name, part in parts.items():
            step = PartialStep(self._packets.backbone, [self.load(part)], 0)
            try:
                with torch.inference_mode():
                    self._profiles[name] = self._queries(step, step.all[-self._settings.local :], None).mean(2)
            finally:
                self._packets.backbone.pool.give_back(step.context)
        self._case = case

    def _queries(self, step: PartialStep, numbers: Tensor, shown: Tensor | None) -> Tensor:
        """Run tokens; their queries, (stable layers, heads, tokens, width)."""
        found: dict[int, Tensor] = {}

        def watch(layer: int, queries: Tensor, keys: Tensor, scaling: float) -> None:
            found[layer] = queries.float()

        with step.observe(self._stable, watch):
            step.run(numbers, None, shown)
        if len({queries.shape for queries in found.values()}) > 1:
            raise UnsupportedModelError(f"{step.backbone.name} has heads of several widths; SAM-KV needs them alike")
        return torch.stack([found[layer] for layer in self._stable])

    def _recompute(self, step: PartialStep) -> Tensor:
        kept = self._kept(step)
        union = step.with_text(torch.cat([step.documents[:0], *kept]).unique())
        step.keep_only(union)
        left = [torch.searchsorted(union, torch.cat(kept[place:]).unique()) for place in range(len(kept))]
        choices: dict[int, Choice] = {
            layer: partial(step.with_text, numbers) for layer, numbers in zip(self._stable, left, strict=True)
        }
        choices.pop(self._stable[0])
        with _mixing(step, self._settings.fresh):
            return step.run(step.all, choices)

    def _kept(self, step: PartialStep) -> list[Tensor]:
        """Tokens of chunks each stable layer keeps."""
        initial, local = self._settings.initial, self._settings.local
        chunks = [(step.chunk == chunk).nonzero()[:, 0] for chunk in range(len(step.packet_ids))]
        bounds = [(min(initial, len(c)), max(min(initial, len(c)), len(c) - local)) for c in chunks]
        anchors = [torch.cat([c[:start], c[stop:]]) for c, (start, stop) in zip(chunks, bounds, strict=True)]
        matched = self._matched_queries(step, anchors)
        kept: list[list[Tensor]] = [[step.documents[:0], *anchors] for _ in self._stable]
        for queries, chunk, anchor, (start, stop) in zip(matched, chunks, anchors, bounds, strict=True):
            for layer, blocks in enumerate(self._blocks(step, queries, anchor, chunk[start:stop])):
                kept[layer] += blocks
        return [torch.cat(numbers) for numbers in kept]

    def _matched_queries(self, step: PartialStep, anchors: Sequence[Tensor]) -> list[Tensor]:
        """A query for every chunk, (stable layers, heads, width) each, from a first reading of text and anchors."""
        shown = step.chunk < 0
        text = shown.nonzero()[:, 0]
        for numbers in anchors:
            shown[numbers] = True
        queries = self._queries(step, text, shown)
        goal = queries[:, :, -len(step.question) :].mean(2)
        profiles = [self._profiles[name] for name in step.packet_ids]
        if len(step.preamble):
            profiles.insert(0, queries[:, :, : len(step.preamble)][:, :, -self._settings.local :].mean(2))
        if not step.packet_ids:
            return []
        return list(personalise(torch.stack(profiles), goal))[-len(step.packet_ids) :]

    def _blocks(self, step: PartialStep, queries: Tensor, anchor: Tensor, middle: Tensor) -> list[list[Tensor]]:
        """For each stable layer, the blocks of a chunk's middle that are kept."""
        if not len(middle):
            return [[] for _ in self._stable]
        blocks = middle.split(self._settings.block)
        scores, shares = [], []
        for layer, query in zip(self._stable, queries, strict=True):
            (keys,) = step.views(layer, "keys")
            if keys.shape[-1] != query.shape[-1]:
                raise UnsupportedModelError(
                    f"{step.backbone.name} caches keys of width {keys.shape[-1]} for queries of {query.shape[-1]}; "
                    "SAM-KV compares the two"
                )
            query = fold_heads(query, keys.shape[0])
            means = torch.stack([keys[:, numbers].float().mean(1) for numbers in (anchor, *blocks)])
            score = (means * query).sum((1, 2))  # anchors first, then blocks
            scores.append(score[1:])
            shares.append(keep_share(float(score[0]), score[1:]))
        count = int(len(blocks) * sum(shares) / len(shares))
        return [[blocks[i] for i in score.topk(count).indices.tolist()] for score in scores]


def personalise(profiles: Tensor, goal: Tensor) -> Tensor:
    """For each segment, the question's query and the mean of the other segments', weighted by their likeness to it.

    Args:
        profiles: (segments, layers, heads, width).
        goal: (layers, heads, width), of the question.

    Returns:
        (segments, layers, heads, width).
    """
    likeness = torch.cosine_similarity(profiles, goal[None], dim=-1).abs()
    weighted = likeness[..., None] * profiles
    others = weighted.sum(0, keepdim=True) - weighted
    return others / max(len(profiles) - 1, 1) + goal


def fold_heads(queries: Tensor, kv_heads: int) -> Tensor:
    """The mean of the query heads that share a key-value head: (heads, width) to (kv heads, width)."""
    return queries.view(kv_heads, -1, queries.shape[-1]).mean(1)


def keep_share(anchor: float, scores: Tensor) -> float:
    """How many of the blocks are worth keeping, given what the anchors score; 0 to 1."""
    lowest, highest = float(scores.min()), float(scores.max())
    return (highest - anchor) / (highest - lowest) if lowest < anchor <= highest else 0.0


@contextmanager
def _mixing(step: PartialStep, fresh: float) -> Iterator[None]:
    """Within it, what is written over a chunk's cached tensors is mixed with them."""
    layers = step.bound.cache.layers
    cached = {layer for group in step.backbone.plan.groups for layer in group.layers}

    def mixed(number: int, write: Any) -> Any:
        def update(*args: Any, **named: Any) -> Any:
            written: Any = step.bound.cursor.write
            numbers = written[step.chunk[written] >= 0]
            before = [view[:, numbers] for view in step.views(number)]
            shown = write(*args, **named)  # views of the context, so attention sees the mixture
            for view, old in zip(step.views(number), before, strict=True):
                view[:, numbers] = torch.lerp(old, view[:, numbers], fresh)
            return shown

        return update

    try:
        for number in cached:
            layers[number].update = mixed(number, layers[number].update)
        yield
    finally:
        for number in cached:
            vars(layers[number]).pop("update", None)
