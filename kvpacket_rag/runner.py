"""Calls the model. With ``cache_layers`` the only file that speaks transformers' cache API.

The model is handed cache layers that write into a context's buffers, at the slots it is told, so
nothing is concatenated: text lands between packets in one forward, decoding appends in place.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from kvpacket_rag.assemble import Context
from kvpacket_rag.cache_layers import AllWritten, ContextLayer, Cursor, OffsetLayer
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.shared_keys import shared_keys
from kvpacket_rag.snapshot import Snapshot, tensors_of

Mask = Tensor | dict[str, Tensor] | None

_KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)


class ModelRunner:
    """One model, called by one thread at a time.

    Args:
        model: a causal language model in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.lock = threading.RLock()
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters or open_ended
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._layers: list[Any] = []
        self._windows: dict[str, int | None] = {"": None}

    @property
    def device(self) -> torch.device:
        """Where the model's inputs live."""
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's floating-point parameters."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding windows of its layers, in tokens; empty if every layer sees all that comes before."""
        return tuple(window for window in self._windows.values() if window is not None)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor | None = None,
        cache: Any = None,
        mask: Mask = None,
        wanted: Tensor | Literal["last", "all"] = "last",
        keep: bool = True,
    ) -> tuple[Tensor, Any]:
        """One call of the model.

        Args:
            inputs: (batch, tokens) ids, or (batch, tokens, hidden) embeddings.
            positions: (batch, tokens), or None for the model's own count.
            cache: a transformers cache, or None to have the model build one.
            mask: 2D, additive 4D, or one 4D a layer type.
            wanted: the tokens whose logits are computed, (n,) places that hold for every row of the batch.
            keep: have keys and values cached.

        Returns:
            Logits (batch, wanted tokens, vocabulary) and the cache.
        """
        arguments: dict[str, Any] = {"use_cache": keep, self._cache_name: cache, "attention_mask": mask}
        arguments["inputs_embeds" if inputs.is_floating_point() else "input_ids"] = inputs
        if positions is not None and self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep and wanted == "last":  # by its place: behind a slice, torch copies all of lm_head
            arguments["logits_to_keep"] = torch.tensor([-1], device=inputs.device)  # a layer may leave tokens out
        elif self._takes_logits_to_keep and not isinstance(wanted, str):
            arguments["logits_to_keep"] = wanted
        with self.lock, shared_keys(inputs.device):
            output = self.model(**arguments)
        logits = output.logits
        if not isinstance(wanted, str) and not self._takes_logits_to_keep:
            logits = logits[:, wanted]
        return logits, getattr(output, self._cache_name, None) if keep else None

    def snapshot(self, inputs: Tensor, first_position: int = 0, move_slots: bool = False) -> Snapshot:
        """Run ``inputs`` from ``first_position`` with the model's own cache, and look into it.

        Args:
            inputs: (batch, tokens) ids.
            first_position: of the first token.
            move_slots: have the cache count that many tokens before, too, as it does when serving.

        Raises:
            UnsupportedModelError: the model returns no cache of the common kind.
        """
        length = inputs.shape[1]
        positions = torch.arange(first_position, first_position + length, device=inputs.device)
        empty = self._stand_in(lambda number: OffsetLayer(first_position)) if move_slots else None
        _, cache = self.forward(inputs, positions.repeat(inputs.shape[0], 1), empty)
        layers = getattr(cache, "layers", None)
        if layers is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} returns no cache with layers; packets need one")
        tensors: dict[tuple[int, str], Tensor] = {}
        states: list[str] = []
        for number, layer in enumerate(layers):
            for name, tensor in tensors_of(vars(layer)):
                token_axis = tensor.dim() - 2
                if tensor.is_floating_point() and token_axis > 0 and tensor.shape[token_axis] == length:
                    tensors[number, name] = tensor
                elif tensor.numel():
                    states.append(name)
        outside = {key: value for key, value in vars(cache).items() if key != "layers"}
        states += [name for name, tensor in tensors_of(outside) if tensor.numel() > 1]
        return Snapshot(tensors, states, list(layers))

    def learn_layers(self, snapshot: Snapshot) -> None:
        """Remember the structure of the model's cache, so that contexts can stand in for it.

        Raises:
            UnsupportedModelError: a layer is of a class this file does not know how to fill.
        """
        unknown = {type(layer).__name__ for layer in snapshot.layers if type(layer) not in _KNOWN_LAYERS}
        if unknown:
            raise UnsupportedModelError(
                f"the cache of {type(self.model).__name__} has layers of class {', '.join(sorted(unknown))}; "
                f"packets can fill {', '.join(c.__name__ for c in _KNOWN_LAYERS)}"
            )
        self._layers = snapshot.layers
        self._windows = self._find_windows()

    def _find_windows(self) -> dict[str, int | None]:
        """Layer type to sliding window; one entry with an empty name when all layers are alike."""
        windows = [
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in self._layers
        ]
        if len(set(windows)) <= 1:
            return {"": windows[0] if windows else None}
        kinds = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None)
        if not kinds or len(kinds) != len(windows):
            return {"full_attention": None, "sliding_attention": next(w for w in windows if w is not None)}
        found: dict[str, int | None] = {}
        for kind, window in zip(kinds, windows, strict=True):
            found[kind] = found.get(kind) or window  # layers that share another's cache show no window of their own
        return found

    def bind(self, context: Context) -> BoundContext:
        """Stand a context in for the model's cache."""
        cursor = Cursor(slice(0, 0), 0, 0)
        by_layer: dict[int, dict[str, Tensor]] = {}
        for group, buffer in zip(context.plan.groups, context.buffers, strict=True):
            for row, layer in enumerate(group.layers):
                view = buffer[row] if group.has_heads else buffer[row][:, 0]
                by_layer.setdefault(layer, {})[group.name] = view
        cache = self._stand_in(lambda number: ContextLayer(by_layer.get(number, {}), cursor))
        return BoundContext(self, cache, cursor)

    def _stand_in(self, make_layer: Callable[[int], DynamicLayer]) -> DynamicCache:
        """A cache of the learned structure, of layers made from their number."""
        cache = DynamicCache()
        cache.layers = [
            DummyLayer() if isinstance(layer, DummyLayer) else make_layer(number)
            for number, layer in enumerate(self._layers)
        ]
        return cache

    def masks(self, slots: Tensor, visible: int) -> Mask:
        """Additive masks for tokens at ``slots`` that see every earlier slot, within the layer's window."""
        distance = slots[:, None] - torch.arange(visible, device=slots.device)[None, :]
        return self.additive(distance >= 0, distance)

    def additive(self, allowed: Tensor, distance: Tensor) -> Mask:
        """Additive masks of what is allowed and lies within the layer's window.

        Args:
            allowed: (queries, keys), True where a query may look.
            distance: (queries, keys), how far back a key lies.
        """
        found: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            seen = allowed if window is None else allowed & (distance < window)
            blank = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
            found[kind] = blank.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]
        return found.get("", found)


@dataclass(frozen=True, slots=True)
class BoundContext:
    """A context in the shape the model takes as its cache."""

    runner: ModelRunner
    cache: Any
    cursor: Cursor

    def run(
        self,
        inputs: Tensor,
        slots: slice | Tensor,
        positions: Tensor,
        visible: int,
        mask: Mask = None,
        wanted: Tensor | Literal["last", "all"] = "last",
    ) -> Tensor:
        """Forward ``inputs`` into ``slots``; they see the first ``visible`` slots as the mask allows.

        Args:
            inputs: (batch, tokens) ids or (batch, tokens, hidden) embeddings.
            slots: where their keys and values go.
            positions: (batch, tokens).
            visible: slots shown to the model, the new ones included.
            mask: None for plain causal order.
            wanted: see :meth:`ModelRunner.forward`.

        Returns:
            (batch, vocabulary): logits of the last token; (batch, wanted tokens, vocabulary) if others are wanted.
        """
        with self.runner.lock:
            self._point(slots, visible, inputs.shape[1])
            logits, _ = self.runner.forward(inputs, positions, self.cache, mask, wanted)
        return logits[:, -1] if isinstance(wanted, str) and wanted == "last" else logits

    def fill(self, inputs: Tensor, slots: slice | Tensor, positions: Tensor, visible: int, mask: Mask = None) -> None:
        """As :meth:`run` without logits: the forward ends once the last keys and values are written.

        What the last layer does with them, and all that follows, would be thrown away: one layer's work in each
        forward, and more where late layers share the keys of earlier ones.
        """
        with self.runner.lock:
            self._point(slots, visible, inputs.shape[1])
            layers = [layer for layer in self.cache.layers if isinstance(layer, ContextLayer)]
            self.cursor.awaited = {(id(layer), name) for layer in layers for name in layer.tensors}
            try:
                self.runner.forward(inputs, positions, self.cache, mask)
            except AllWritten:
                pass
            finally:
                self.cursor.awaited = None

    def _point(self, slots: slice | Tensor, visible: int, num_tokens: int) -> None:
        self.cursor.write, self.cursor.visible, self.cursor.first = slots, visible, visible - num_tokens
