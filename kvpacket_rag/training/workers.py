"""The processes that train together; one, unless accelerate started more."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from kvpacket_rag.errors import MissingExtraError


class Workers:
    """Which process this is, and sums over all of them.

    Start several with ``accelerate launch`` or ``torchrun``; accelerate then finds them and their devices.
    """

    def __init__(self) -> None:
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if importlib.util.find_spec("accelerate") is None:
                raise MissingExtraError(
                    "training in several processes needs accelerate: pip install 'kvpacket-rag[train]'"
                )
            from accelerate import PartialState

            self._state = PartialState(cpu=not torch.cuda.is_available())

    @property
    def number(self) -> int:
        """Of this process, from 0."""
        return int(self._state.process_index) if self._state else 0

    @property
    def count(self) -> int:
        """Of all processes."""
        return int(self._state.num_processes) if self._state else 1

    @property
    def device(self) -> str | None:
        """Where this process should train, when accelerate decided it."""
        return str(self._state.device) if self._state else None

    def mine(self, rows: range) -> range:
        """The share of this process."""
        return rows[self.number :: self.count]

    def sum(self, tensor: Tensor) -> Tensor:
        """Of a tensor over all processes, in each of them."""
        if not self._state:
            return tensor
        from accelerate.utils import reduce

        total: Tensor = reduce(tensor, reduction="sum")
        return total

    def close(self) -> None:
        """Wait for the others and leave them: a process that ends while another still talks to it can abort that one.

        For the end of a program; nothing can be summed afterwards.
        """
        if self._state:
            self._state.wait_for_everyone()
            self._state.destroy_process_group()
