"""Lets the deep parts of an adapter act on a model for the time of one forward.

The model's weights are never changed: hooks add to what passes by, at the tokens of packets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.errors import AdapterError, UnsupportedModelError

OUTSIDE = -1  # the role of a token that belongs to no packet


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's decoder layers, in order.

    Raises:
        UnsupportedModelError: they cannot be told from the rest.
    """
    config: Any = getattr(model, "config", None)
    count = config.get_text_config(decoder=True).num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} holds no list of its {count} decoder layers")


@contextmanager
def attached(adapter: Adapter, model: nn.Module, roles: Tensor) -> Iterator[None]:
    """Within it, forwards of ``model`` are those of the adapter's encoder.

    Hold the model's lock all the while: every forward is affected, whoever calls it.

    Args:
        adapter: may have no deep parts; then nothing is done.
        model: whose decoder layers the adapter was made for.
        roles: (batch, tokens), as :meth:`Adapter.roles` gives them, and OUTSIDE for tokens of no packet.

    Raises:
        AdapterError: the adapter names modules or layers the model does not have.
    """
    hooks = []
    try:
        if adapter.deep is not None:
            hooks += _hook_layers(adapter.deep, model, roles)
        if adapter.low_rank is not None:
            within = (roles != OUTSIDE)[..., None]
            inside = None if within.all() else within  # then a part of the row may be projected alone, too
            low_rank = adapter.low_rank
            for name, down, up in zip(low_rank.names, low_rank.down, low_rank.up, strict=True):
                hooks.append(_linear(model, name, down, up).register_forward_hook(_add_low_rank(down, up, inside)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Within it, decoder layers keep no activations and compute them again in the backward pass.

    Raises:
        UnsupportedModelError: the model does not know how to.
    """
    layers = decoder_layers(model)
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    except ValueError as error:
        raise UnsupportedModelError(f"{type(model).__name__} has no gradient checkpointing: {error}") from error
    try:
        for layer in layers:
            layer.training = True  # of the layer alone: what is in it goes on as in evaluation, without dropout
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.activation_checkpointing_disable()  # type: ignore[operator]
        model.disable_input_require_grads()  # type: ignore[operator]


def _hook_layers(deep: Tensor, model: nn.Module, roles: Tensor) -> list[Any]:
    layers = decoder_layers(model)
    if len(deep) != len(layers) - 1:
        raise AdapterError(f"the adapter has deep vectors for {len(deep) + 1} layers, the model has {len(layers)}")
    soft = (roles >= 0) & (roles < deep.shape[1])
    where, which = soft.nonzero(as_tuple=True), roles[soft]
    return [
        layer.register_forward_pre_hook(_add_vectors(vectors, where, which), with_kwargs=True)
        for layer, vectors in zip(list(layers)[1:], deep, strict=True)
    ]


def _add_vectors(vectors: Tensor, where: tuple[Tensor, ...], which: Tensor) -> Any:
    def hook(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = args[0] if args else named["hidden_states"]
        moved = hidden.index_put(where, vectors.to(hidden)[which], accumulate=True)
        return ((moved, *args[1:]), named) if args else ((), named | {"hidden_states": moved})

    return hook


def _add_low_rank(down: Tensor, up: Tensor, inside: Tensor | None) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        inputs = args[0]
        update = inputs @ down.to(inputs).T
        if inside is not None:
            update = update * inside.view(*inputs.shape[:-1], 1)
        if type(module) is nn.Linear and output.dtype == inputs.dtype == update.dtype and output.is_contiguous():
            rows = output.view(-1, output.shape[-1])
            rows.addmm_(update.view(-1, up.shape[1]), up.to(inputs).T)  # fresh memory, so in a single pass
            return output
        added: Tensor = output + update @ up.to(inputs).T
        return added

    return hook


def _linear(model: nn.Module, name: str, down: Tensor, up: Tensor) -> nn.Linear:
    module: Any
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    found = tuple(getattr(module, "weight", torch.empty(0)).shape)
    if not isinstance(module, nn.Linear) or found != (up.shape[0], down.shape[1]):
        raise AdapterError(
            f"the adapter updates {name!r} of (outputs, inputs) {(up.shape[0], down.shape[1])}; "
            f"this model has {found or 'no such module'} there; use an adapter that was trained for it"
        )
    return module
