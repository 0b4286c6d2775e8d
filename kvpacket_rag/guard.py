"""Notices when a model has become another function than the one its packets were made by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvpacket_rag.errors import PacketMismatchError, UnsupportedModelError
from kvpacket_rag.fingerprint import modules_of, peft_switches

_SAMPLES = 8  # of every parameter
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # so that NaN equals itself
_HARMLESS = ("kvpacket_rag", "transformers")  # ours last for one forward, theirs look on or act in training


class ModelGuard:
    """Compares a model with what it was when it was made the backbone.

    Edits of weights in place are counted by torch; those through ``.data`` are not, and a few numbers of every
    parameter are compared for them, which finds a merge or an overwrite, not one single number or row.

    Args:
        model: in evaluation mode.
        name: of the model, for errors.

    Raises:
        UnsupportedModelError: somebody's hooks take part in the forward.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = model
        self._name = name
        modules = modules_of(model)
        _refuse_hooks(name, modules)
        self._parameters, self._switches = _parameters(modules), peft_switches(modules)
        self._views = _views(model)
        self._samples = self._sample()
        self._dtype = _dtype(model)

    def check(self) -> None:
        """Refuse to go on with another function; what was only switched can be switched back.

        It takes about half a millisecond for a model of 30 layers, and several with PEFT's adapters on all of them.

        Raises:
            PacketMismatchError: packets made from here on would carry the identity of another function.
            UnsupportedModelError: somebody's hooks take part in the forward.
        """
        modules = modules_of(self._model)
        _refuse_hooks(self._name, modules)
        if any(module.training for module in modules):
            raise PacketMismatchError(
                f"{self._name} is in training mode, in which dropout acts; call model.eval() before packets are used"
            )
        if peft_switches(modules) != self._switches:
            raise PacketMismatchError(
                f"other PEFT adapters of {self._name} are active, merged or scaled than when it was loaded; switch "
                "back, or make an engine of its own for each"
            )
        if _parameters(modules) != self._parameters or not self._same_samples():
            raise PacketMismatchError(self._edited())

    def _edited(self) -> str:
        if (now := _dtype(self._model)) != self._dtype:
            return (
                f"{self._name} was loaded in {self._dtype} and is now in {now}; "
                "load the engine again with the dtype you want"
            )
        return (
            f"the weights of {self._name} were edited, replaced or moved after loading; load the engine again, "
            "so that old packets are not mistaken for those of the new weights"
        )

    def _sample(self) -> list[Tensor]:
        return [torch.cat(views) for views in self._views]

    def _same_samples(self) -> bool:
        return all(map(torch.equal, self._sample(), self._samples))


def _refuse_hooks(name: str, modules: Sequence[nn.Module]) -> None:
    """Refuse a model with forward hooks of others, such as steering vectors or a press of kvpress.

    Args:
        name: of the model, for the error.
        modules: of the model.

    Raises:
        UnsupportedModelError: what hooks do is in no fingerprint, so their packets would pass for those of the
            bare model.
    """
    hooked = [module for module in modules if module._forward_pre_hooks or module._forward_hooks]
    for module in hooked:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if str(getattr(hook, "__module__", "")).partition(".")[0] not in _HARMLESS:
                raise UnsupportedModelError(
                    f"{name} has a forward hook on a {type(module).__name__} ({getattr(hook, '__qualname__', hook)}), "
                    "and no packet could tell what it does; remove it"
                )


def _parameters(modules: Sequence[nn.Module]) -> list[tuple[int, int, int]]:
    """Changes whenever torch counts an edit, or a parameter or its memory is replaced."""
    return [
        (id(p), 0 if p.is_inference() else p._version, p.data_ptr())
        for module in modules
        for p in module._parameters.values()
        if p is not None
    ]


def _views(model: nn.Module) -> list[list[Tensor]]:
    """A few numbers of every parameter, as they are in memory, and together those that can be read together."""
    found: dict[tuple[torch.device, int], list[Tensor]] = {}
    for parameter in model.parameters():
        if not parameter.numel():
            continue
        extent = 1 + sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
        count = min(_SAMPLES, extent)
        few = parameter.detach().as_strided((count,), (extent // count,), parameter.storage_offset())
        key = parameter.device, parameter.element_size()
        found.setdefault(key, []).append(few.view(_AS_BITS[parameter.element_size()]))
    return list(found.values())


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
