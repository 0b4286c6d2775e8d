"""Realignment in one pass over memory, compiled by numba: read, turn in float32, round, write.

torch needs several passes, for every operation of a turn reads and writes whole blocks; the loop
below touches each number once and so runs at the speed of a memory copy. ``rope`` asks it first
and does the same work by torch where it does not apply: without numba, on other devices, in other
number formats. bfloat16 is handled by its bits, the upper half of a float32's.

What is only copied goes by the same threads. torch's own wait for more work for about 3 ms after
each of its copies, without giving way, and so would take a core from the next turn.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MIN_BYTES_A_THREAD = 1 << 20  # below, waking a thread takes longer than the work


def realign_into(target: Tensor, source: Tensor, layout: str, start: int, turn: tuple[Tensor, Tensor]) -> bool:
    """Turn the rotary channels of ``source`` into ``target`` if a compiled loop fits; else do nothing.

    Args:
        target: (layers, heads, tokens, width), channels side by side, any other strides.
        source: the same shape; not touched.
        layout: ``"half"`` or ``"interleaved"``, as in ``rope.Rotation``.
        start: first rotary channel.
        turn: cosine and sine of each pair, (n,) float32.

    Returns:
        Whether it was done.
    """
    if not (_fits(target) and _fits(source)):
        return False
    loop = _loops().get(layout)
    if loop is None:
        return False
    cos, sin = (part.numpy() for part in turn)
    _in_threads(
        target,
        source,
        lambda out, block: loop(*_flat(out), *_flat(block), tuple(block.shape[:3]), start, cos, sin),
    )
    return True


def copy_into(target: Tensor, source: Tensor) -> bool:
    """Copy ``source`` into ``target`` by several threads if there are some to use; else do nothing.

    Args:
        target: (layers, heads, tokens, width), channels side by side, any other strides.
        source: the same shape; not touched.

    Returns:
        Whether it was done.
    """
    if not (_fits(target) and _fits(source)) or target.dtype != source.dtype or _workers(source) == 1:
        return False
    _in_threads(target, source, lambda out, block: np.copyto(_array(out), _array(block)))
    return True


def _workers(source: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), source.nbytes // _MIN_BYTES_A_THREAD, len(source)))


def _in_threads(target: Tensor, source: Tensor, work: Callable[[Tensor, Tensor], None]) -> None:
    """Do the work on parts of the first axis at once."""
    workers = _workers(source)
    bounds = [len(source) * number // workers for number in range(workers + 1)]
    parts = [(target[lo:hi], source[lo:hi]) for lo, hi in itertools.pairwise(bounds)]
    others = [_threads().submit(work, *part) for part in parts[1:]]
    work(*parts[0])
    for other in others:
        other.result()


def _fits(tensor: Tensor) -> bool:
    known = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)
    return known and tensor.dim() == 4 and tensor.stride(3) == 1 and tensor.numel() > 0 and not tensor.requires_grad


def _flat(tensor: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The memory from a tensor's first number to its last, in one dimension, and the strides to find them by."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _array(tensor.as_strided((length,), (1,))), tensor.stride()[:3]


def _array(tensor: Tensor) -> Any:
    """The same memory for numpy, bfloat16 by its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvpacket-realign")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live on in a forked process


@functools.cache
def _loops() -> Mapping[str, Callable[..., None]]:
    """The compiled loops by layout; none without numba."""
    try:
        from kvpacket_rag.fused_loops import LOOPS
    except ImportError:
        return {}
    return LOOPS
