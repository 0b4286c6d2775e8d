"""Cache layers that stand in for the model's own: over the buffers of a context, and over nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer


class AllWritten(Exception):
    """Ends a forward of which only keys and values are wanted."""


@dataclass(slots=True)
class Cursor:
    """Where the next forward writes, and how much of the buffers it sees.

    Attributes:
        awaited: the layers, by ``id``, and names of the tensors after whose writing a forward has nothing more to do,
            or None to have it run to its end.
    """

    write: slice | Tensor
    first: int
    visible: int
    awaited: set[tuple[int, str]] | None = None

    def written(self, layer: ContextLayer, *names: str) -> None:
        """Count tensors of a layer as written.

        Raises:
            AllWritten: they were the last that were awaited.
        """
        if self.awaited is not None:
            self.awaited.difference_update((id(layer), name) for name in names)
            if not self.awaited:
                raise AllWritten


class ContextLayer(DynamicLayer):
    """A cache layer over a context's buffers: writes at the cursor, shows everything up to it.

    Attributes:
        tensors: by name, where it writes; none if the model never fills this layer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self._cursor = cursor
        self.is_initialized = bool(tensors)  # a layer the model never fills must look it
        self.keys, self.values = (tensors[n][..., :0, :] if n in tensors else None for n in ("keys", "values"))

    def _write(self, name: str, new: Tensor) -> Tensor:
        if name not in self.tensors:  # a tensor of no width, as a latent cache without a rotary part has
            return new.new_empty((*new.shape[:-2], self._cursor.visible, new.shape[-1]))
        buffer, where = self.tensors[name], self._cursor.write
        if isinstance(where, slice):
            buffer[..., where, :] = new
        else:
            buffer.index_copy_(-2, where, new.to(buffer.dtype))
        return buffer[..., : self._cursor.visible, :].to(new.dtype)  # an indexer may work in float32 in any model

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._write("keys", key_states), self._write("values", value_states)
        self._cursor.written(self, "keys", "values")
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        shown = self._write("indexer_keys", indexer_key_states)
        self._cursor.written(self, "indexer_keys")
        return shown

    def get_seq_length(self) -> int:
        return self._cursor.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursor.visible, 0


class OffsetLayer(DynamicIndexedLayer):
    """A cache layer that claims ``first`` earlier tokens and shows none of them."""

    def __init__(self, first: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = first

    def get_seq_length(self) -> int:
        return self._first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self._first
