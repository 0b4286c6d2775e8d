"""Leaves tokens out of packets: looks on while a chunk is encoded, scores, keeps the best of every head."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvpacket_rag.compress.compression import Compression
from kvpacket_rag.compress.kept import pack_positions
from kvpacket_rag.compress.press import (
    KeyDiffPress,
    LayerView,
    MixKVPress,
    Press,
    RandomPress,
    RereadPress,
    attend,
    turn,
)
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.rope import RotaryPlan

_SHORTEST = 16  # tokens; of fewer all are kept, for presses work with windows and statistics
_TOLERANCE = 0.02  # relative; rounding to bfloat16 twice stays below, another rotation or norm does not


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an attention module was given, and what it made of it."""

    module: nn.Module
    hidden: Tensor | None
    angles: tuple[Tensor, Tensor] | None
    output: Tensor


class Compressor:
    """Compresses packets of one model.

    Args:
        compression: which press, and how much.
        model: whose attention modules are looked at.
        plan: of the model.
        windows: sliding windows of its layers, if any.

    Raises:
        UnsupportedModelError: the press cannot work with this model; says why.
        MissingExtraError: the press needs a library that is not installed.
        ModelNotFoundError: the press needs weights that are not there.
    """

    def __init__(
        self, compression: Compression, model: nn.Module, plan: RotaryPlan, windows: Sequence[int] = ()
    ) -> None:
        self.compression = compression
        self._plan = plan
        self._press = _make_press(compression, model)
        self._name = type(model).__name__
        self._layers = sorted({layer for group in plan.groups for layer in group.layers})
        self._modules = {} if self._press.needs == "tensors" else self._find_modules(model)
        self._is_proved = self._press.needs != "projections"
        self._check_tensors(windows)

    @property
    def settings(self) -> str:
        """What a packet's signature says of it."""
        protected = ", soft tokens kept" if self.compression.protect_adapter else ""
        return f"{self._press.settings}, ratio {self.compression.ratio}{protected}"

    def _find_modules(self, model: nn.Module) -> dict[int, nn.Module]:
        """Attention modules by the number of their layer."""
        found = {
            module.layer_idx: module
            for module in model.modules()
            if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
        }
        missing = [layer for layer in self._layers if layer not in found]
        if missing:
            raise self._refusal(f"no attention module is found for its layers {missing[:8]}")
        return {layer: found[layer] for layer in self._layers}  # type: ignore[index]

    def _check_tensors(self, windows: Sequence[int]) -> None:
        narrow = [window for window in windows if window < self._plan.max_positions]
        if narrow:
            raise self._refusal(
                f"its layers see {min(narrow)} tokens back, which is counted wrongly where some are gone"
            )
        if len({group.heads for group in self._plan.groups}) > 1:
            kinds = ", ".join(f"{group.heads} heads of {group.name}" for group in self._plan.groups)
            raise self._refusal(f"it caches {kinds}, and one choice of tokens does not fit all")
        whole = {(group.name, layer) for group in self._plan.groups if group.has_heads for layer in group.layers}
        if any((name, layer) not in whole for layer in self._layers for name in ("keys", "values")):
            raise self._refusal("it does not cache keys and values by head")

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the press {self.compression.press!r} cannot work with {self._name}: {reason}; "
            "leave its packets uncompressed, or quantise them"
        )

    @contextmanager
    def watching(self) -> Iterator[dict[int, _Seen]]:
        """Within it, a forward leaves what each attention module was given, and its output."""
        seen: dict[int, _Seen] = {}
        hooks = [
            module.register_forward_hook(_remember(seen, layer), with_kwargs=True)
            for layer, module in self._modules.items()
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def compress(
        self, tensors: Sequence[Tensor], seen: Mapping[int, _Seen], ids: Sequence[int], soft: Tensor
    ) -> tuple[Tensor, ...]:
        """Keep the best tokens of a packet.

        Args:
            tensors: one a group of the plan, (layers, heads, tokens, width), on the host.
            seen: of the forward they come from; it may have read more in front of them.
            ids: tokens of the chunk, which are all that chance depends on.
            soft: (tokens,) True for the adapter's own.

        Returns:
            The tensors with fewer tokens, and last the positions that were kept, as the packet stores them.

        Raises:
            UnsupportedModelError: the press misreads the model, or gives scores that are no numbers.
        """
        num_tokens = tensors[0].shape[2]
        num_kept = max(self.compression.num_kept(num_tokens), int(soft.sum()) * self.compression.protect_adapter)
        if num_tokens < _SHORTEST:
            num_kept = num_tokens
        seed = int.from_bytes(hashlib.sha256(str(list(ids)).encode()).digest()[:8], "little") >> 1
        chosen = {}
        with torch.random.fork_rng(_cuda(seen)):  # leverage scores and others draw from the global generator
            torch.manual_seed(seed)
            for view in self._views(tensors, seen):
                scores = self._scores(view, num_kept, seed, seen.get(view.number))
                if self.compression.protect_adapter:
                    scores[:, soft] = torch.inf
                chosen[view.number] = scores.topk(num_kept, dim=-1).indices.sort().values
        kept = []
        for tensor, group in zip(tensors, self._plan.groups, strict=True):
            positions = torch.stack([chosen[layer] for layer in group.layers])[..., None]  # (layers, heads, kept, 1)
            kept.append(tensor.gather(2, positions.expand(-1, -1, -1, tensor.shape[3])))
        return (*kept, pack_positions(torch.stack([chosen[layer] for layer in self._layers]), num_tokens))

    def _scores(self, view: LayerView, num_kept: int, seed: int, seen: _Seen | None) -> Tensor:
        """(heads, tokens) on the host."""
        heads, num_tokens = view.keys.shape[1:3]
        if num_kept == num_tokens:
            return torch.zeros(heads, num_tokens)
        if not self._is_proved and seen is not None:
            self._prove(view, seen)
        scores = self._press.score(view, num_kept, seed).float().cpu()
        if scores.shape != (heads, num_tokens) or scores.isnan().any():
            raise self._refusal(
                f"its scores have shape {tuple(scores.shape)} and {int(scores.isnan().sum())} of them are no numbers, "
                f"expected {(heads, num_tokens)}"
            )
        return scores

    def _prove(self, view: LayerView, seen: _Seen) -> None:
        """See that the press reads the model right.

        What it takes for keys, before they are turned, have to be those that were cached; and its queries, turned, have
        to give what the attention module gave, so that nothing else is done to attention.
        """
        whole = replace(view, hidden=seen.hidden, cos=seen.angles[0], sin=seen.angles[1])  # type: ignore[index]
        try:
            keys = turn(self._press.project_keys(view), view.cos, view.sin)  # type: ignore[arg-type]
            error, what = _difference(keys, view.keys), "keys"
            if error < _TOLERANCE:
                made = attend(whole)
                error, what = _difference(made, seen.output[:, -made.shape[1] :]), "outputs of attention"
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error_found:
            raise self._refusal(f"it does not attend as the press expects ({error_found})") from error_found
        if not error < _TOLERANCE:
            raise self._refusal(
                f"{what} computed as the press does differ from those in layer {view.number} by {error:.0%}"
            )
        self._is_proved = view.number == self._layers[-1]

    def _views(self, tensors: Sequence[Tensor], seen: Mapping[int, _Seen]) -> Iterator[LayerView]:
        rows = {
            (group.name, layer): tensor[row : row + 1]
            for tensor, group in zip(tensors, self._plan.groups, strict=True)
            for row, layer in enumerate(group.layers)
        }
        for layer in self._layers:
            keys, values = rows["keys", layer], rows["values", layer]
            if self._press.needs == "tensors":
                yield LayerView(layer, keys, values)
                continue
            given = seen.get(layer)
            if given is None or given.hidden is None or given.angles is None:
                raise self._refusal(
                    f"the attention of layer {layer} was not given hidden_states and a pair of position_embeddings"
                )
            num_tokens, device = keys.shape[2], given.hidden.device
            cos, sin = (angle[:, :num_tokens] for angle in given.angles)  # packets begin at position 0
            hidden = given.hidden[:, -num_tokens:]
            yield LayerView(layer, keys.to(device), values.to(device), given.module, hidden, cos, sin)


def _make_press(compression: Compression, model: nn.Module) -> Press:
    own: dict[str, Callable[[], Press]] = {
        "random": RandomPress,
        "reread": RereadPress,
        "keydiff": KeyDiffPress,
        "mixkv": MixKVPress,
    }
    if compression.press in own:
        return own[compression.press]()
    from kvpacket_rag.compress.kvpress_scores import KVPress, KVzapPress  # late: it loads transformers' models

    if compression.press == "kvzap":
        config: Any = getattr(model, "config", None)
        name = str(getattr(config, "name_or_path", "")).rstrip("/").rpartition("/")[2]
        return KVzapPress(compression.weights or f"nvidia/KVzap-mlp-{name}")
    return KVPress(compression.press, compression.ratio)


def _remember(seen: dict[int, _Seen], layer: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        hidden = named.get("hidden_states", args[0] if args else None)
        angles = named.get("position_embeddings")
        is_pair = isinstance(angles, tuple) and len(angles) == 2
        made = output[0] if isinstance(output, tuple) else output
        seen[layer] = _Seen(module, hidden, angles if is_pair else None, made)

    return hook


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def _cuda(seen: Mapping[int, _Seen]) -> list[torch.device]:
    """Devices whose random state has to be put back."""
    devices = {given.hidden.device for given in seen.values() if given.hidden is not None}
    return [device for device in devices if device.type == "cuda"]
