"""Queries and keys as attention sees them: after projection, normalisation and rotation, in any architecture.

Models ask transformers' AttentionInterface for their attention function in every layer. What it hands out is
wrapped for the time of an observation, so no config is touched, masks are made as always, and a model keeps
whichever function it has, its own one included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from kvpacket_rag.attach import decoder_layers
from kvpacket_rag.errors import UnsupportedModelError

Watch = Callable[[int, Tensor, Tensor, float], None]

_observing = threading.Lock()  # the interface is one for all models of the process


@contextmanager
def observed(model: nn.Module, layers: Collection[int], watch: Watch) -> Iterator[None]:
    """Within it, attention of ``model`` is watched; hold the model's lock all the while.

    Args:
        model: of which forwards are watched, and of no other.
        layers: numbers of the decoder layers to watch.
        watch: called with the layer, queries (heads, tokens, width), keys (kv heads, keys, width) and
            the factor on their products, for the first row of a batch.

    Raises:
        UnsupportedModelError: a layer did not ask the interface for its attention.
    """
    numbers = {module: n for n, layer in enumerate(decoder_layers(model)) if n in layers for module in layer.modules()}
    seen: set[int] = set()

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: nn.Module, query: Tensor, key: Tensor, *others: Any, **named: Any) -> Any:
            if module in numbers:
                scaling = named.get("scaling") or query.shape[-1] ** -0.5
                seen.add(numbers[module])
                watch(numbers[module], query[0], key[0], scaling)
            return attend(module, query, key, *others, **named)

        return attention

    with _observing:
        original = AttentionInterface.get_interface
        AttentionInterface.get_interface = lambda *args, **named: wrap(original(*args, **named))  # type: ignore[method-assign]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]
    if missing := set(layers) - seen:
        raise unseen(model, missing)


def unseen(model: nn.Module, layers: Collection[int]) -> UnsupportedModelError:
    """The error for layers that were run and not observed."""
    return UnsupportedModelError(
        f"layers {sorted(layers)} of {type(model).__name__} do not take their attention from transformers' "
        "AttentionInterface, so their queries cannot be seen; A3 and SAM-KV need them"
    )
