"""What a model cached for one input, as tensors by layer and name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_BOOKKEEPING = ("_sliding_window_tensor", "cumulative_length")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a model cached for one input.

    Attributes:
        tensors: (layer, attribute) to tensor, (batch, heads, tokens, width) or (batch, tokens, width).
        states: names of cached tensors that have no token axis.
        layers: the cache layers themselves.
    """

    tensors: dict[tuple[int, str], Tensor]
    states: list[str]
    layers: list[Any]


def tensors_of(attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor among ``attributes``, nested containers included, with its dotted name."""
    for name, value in attributes.items():
        if isinstance(value, Tensor) and name not in _BOOKKEEPING and value.dim():
            yield prefix + name, value
        elif isinstance(value, dict):
            yield from tensors_of({str(k): v for k, v in value.items()}, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield from tensors_of({str(k): v for k, v in enumerate(value)}, f"{prefix}{name}.")
