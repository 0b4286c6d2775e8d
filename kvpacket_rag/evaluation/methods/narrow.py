"""Fewer and fewer tokens as a forward goes up the layers.

A hook in front of every decoder layer takes from its inputs the rows of the tokens that are left, whatever the
inputs are called, and has the cache written at their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kvpacket_rag.attach import decoder_layers
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.runner import BoundContext

Choice = Callable[[], Tensor]


class Narrowing:
    """One forward that loses tokens on its way.

    Args:
        bound: the context it writes to.
        slots: (tokens,) of the tokens it begins with, ascending.
        choices: layer to a function that gives the slots left from that layer on, ascending. It is called when the
            layers below are done.
    """

    def __init__(self, bound: BoundContext, slots: Tensor, choices: Mapping[int, Choice]) -> None:
        self._bound = bound
        self._first = slots
        self._choices = choices
        self._left = slots
        self.by_layer: dict[int, Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, the model's next forward is this one; hold the model's lock all the while.

        Raises:
            UnsupportedModelError: the model's layers cannot be fed fewer tokens than it was given itself.
        """
        model = self._bound.runner.model
        hooks: list[Any] = []
        try:
            for number, layer in enumerate(decoder_layers(model) if self._choices else ()):
                hooks.append(layer.register_forward_pre_hook(self._hook(number), with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if missing := self._choices.keys() - self.by_layer.keys():
            self._refuse(f"never called layers {sorted(missing)}")

    def _hook(self, number: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            hidden = args[0] if args else named.get("hidden_states")
            if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[1] != len(self._left):
                self._refuse(f"does not hand layer {number} hidden states of (1, {len(self._left)}, width)")
            if number in self._choices:
                hidden = self._choose(number, hidden)
            if self._left is self._first:
                return None
            others = [self._take(value) for value in args[1:]]
            changed = {name: self._take(value) for name, value in named.items() if name != "hidden_states"}
            return ((hidden, *others), changed) if args else ((), changed | {"hidden_states": hidden})

        return hook

    def _choose(self, number: int, hidden: Tensor) -> Tensor:
        left = self._choices[number]()
        hidden = hidden[:, torch.searchsorted(self._left, left)]
        self._left = self.by_layer[number] = left
        cursor = self._bound.cursor
        cursor.write, cursor.first = left, cursor.visible - len(left)
        return hidden

    def _take(self, value: Any) -> Any:
        """The rows of an input that belong to the tokens left."""
        if isinstance(value, tuple | list):
            return type(value)(self._take(entry) for entry in value)
        if isinstance(value, dict):
            return {key: self._take(entry) for key, entry in value.items()}
        if not isinstance(value, Tensor):
            return value
        axis = {3: 1, 4: 2}.get(value.dim(), -1)  # (1, tokens, width), masks (1, 1, tokens, keys)
        if value.dtype in (torch.int32, torch.int64):
            axis = -1  # positions, in one dimension or several
        if value.shape[axis] == len(self._first):
            return value.index_select(axis, torch.searchsorted(self._first, self._left))
        if len(self._first) in value.shape[:axis]:
            self._refuse(f"hands its layers a tensor of shape {tuple(value.shape)}, with tokens in an unknown place")
        return value

    def _refuse(self, found: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{type(self._bound.runner.model).__name__} {found}; CacheBlend, A3 and SAM-KV need decoder layers that "
            "take hidden states, mask and positions of the common shapes"
        )
