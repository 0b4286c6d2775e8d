"""Floating-point operations of a prefill, counted by the formulae of the packet paper's code.

The output layer is not counted, a token is charged for every key it is shown whether or not the mask hides
some, and an expert layer counts as a dense one of the config's intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.rope import RotaryPlan


@dataclass(frozen=True, slots=True)
class Flops:
    """What a prefill cost, by what it was spent on.

    Attributes:
        rotate: moving packets to their positions.
        recompute: tokens of chunks that the model read.
        query: tokens outside of chunks, the preamble and text between chunks included.
    """

    rotate: float = 0.0
    recompute: float = 0.0
    query: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.rotate + self.recompute + self.query

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.rotate + other.rotate, self.recompute + other.recompute, self.query + other.query)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A decoder layer's price for one token: ``fixed``, and ``per_key`` for every key it is shown."""

    fixed: float
    per_key: float
    layers: int

    @classmethod
    def of(cls, backbone: Backbone) -> LayerCost:
        """From the sizes in the model's config and the heads found in its cache; means, where layers differ."""
        config: Any = backbone.model.config.get_text_config(decoder=True)
        layers: Sequence[Any] = getattr(config, "per_layer_config", None) or [config]
        hidden = config.hidden_size
        heads = _mean([layer.num_attention_heads for layer in layers])
        inner = _mean([getattr(layer, "intermediate_size", None) or 4 * hidden for layer in layers])
        kept = [group for group in backbone.plan.groups if group.name == "keys" for _ in group.layers]
        width = _mean([group.width for group in kept]) if kept else hidden / heads
        both = width * (heads + (_mean([group.heads for group in kept]) if kept else heads))
        fixed = 4 * hidden * both + 3 * both + 6 * hidden * inner + 10 * hidden
        if any(name.endswith("q_norm") for name, _ in backbone.model.named_modules()):
            fixed += 4 * both
        return cls(fixed, 4 * width * heads, config.num_hidden_layers)

    def of_tokens(self, num_tokens: float, num_keys: int) -> float:
        """That many tokens through one layer, each shown ``num_keys`` keys, its own included."""
        return num_tokens * (self.fixed + self.per_key * num_keys)


def _mean(sizes: Sequence[Any]) -> float:
    """Of whole numbers, or of lists with one for each layer."""
    flat = [size for entry in sizes for size in (entry if isinstance(entry, list | tuple) else [entry])]
    return float(sum(flat) / len(flat))


def of_rotation(plan: RotaryPlan, num_slots: int) -> float:
    """Moving packets of that many slots together."""
    return sum(
        len(group.layers) * (4 + 3 * group.heads) * num_slots * 2 * len(group.rotation.frequencies)
        for group in plan.groups
        if group.rotation is not None
    )
