"""Looks at the hidden states behind one decoder layer while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvpacket_rag.attach import decoder_layers


def middle_layer(model: nn.Module) -> int:
    """Number of the layer in the middle."""
    return len(decoder_layers(model)) // 2


@contextmanager
def captured(model: nn.Module, layer: int) -> Iterator[list[Tensor]]:
    """Within it, every forward appends the (batch, tokens, hidden) that leaves ``layer`` to what is yielded."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hook = decoder_layers(model)[layer].register_forward_hook(look)
    try:
        yield seen
    finally:
        hook.remove()
