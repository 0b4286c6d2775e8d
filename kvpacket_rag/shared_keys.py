"""Attention that reads keys shared by several query heads where they lie.

Where a mask is given, as for a question behind a context, transformers copies keys and values for
every head that shares them before it attends: at 4,000 tokens a third of the time to the first
token. torch's CPU kernel needs no copies, mask or not, with the same numbers as a result; a switch
of transformers, read at every call, has them left out. On CUDA masks and shared keys together mean a slow kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_SWITCH = "TRANSFORMERS_SDPA_FORCE_GQA"
_lock = Lock()
_users = 0


@contextmanager
def shared_keys(device: torch.device) -> Iterator[None]:
    """Within it, models on a CPU copy no keys; a switch that is set already stays as it is."""
    global _users
    if device.type != "cpu":
        yield
        return
    with _lock:
        if not _users and _SWITCH in os.environ:
            ours = False
        else:
            ours = True
            _users += 1
            os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        if ours:
            with _lock:
                _users -= 1
                if not _users:
                    os.environ.pop(_SWITCH, None)
