"""Realignment in one pass over memory, compiled by numba: read, turn in float32, round, write.

torch needs several passes, for every operation of a turn reads and writes whole blocks; the loop
below touches each number once and so runs at the speed of a memory copy. ``rope`` asks it first
and does the same work by torch where it does not apply: without numba, on other devices, in other
number formats. bfloat16 is handled by its bits, the upper half of a float32's.

What is only copied goes by the same threads, see :func:`in_threads`. torch's own wait for more work for
about 3 ms after each of its copies, without giving way, and so would take a core from the next turn.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

_Loops = Mapping[str, Callable[..., None]]
_MIN_BYTES_A_THREAD = 16 << 20  # a millisecond of one thread's work; a system under load may take as long to wake one
_MIN_BYTES_STREAMED = 1 << 20  # of a tensor; below, a context may lie in the caches and is read from there


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
    cos, sin = (part.numpy() for part in turn)
    loop = _loop(layout, target, start, len(cos))
    if loop is None:
        return False
    loop(*_flat(target), *_flat(source), tuple(target.shape[:3]), start, cos, sin)
    return True


def copy_into(target: Tensor, source: Tensor) -> bool:
    """Copy ``source`` into ``target`` if a compiled loop fits; else do nothing.

    Args:
        target: (layers, heads, tokens, width), channels side by side, any other strides.
        source: the same shape; not touched.

    Returns:
        Whether it was done.
    """
    if not (_fits(target) and _fits(source)) or target.dtype != source.dtype:
        return False
    loop = _loop("copy", target, 0, target.shape[3])
    if loop is None:
        return False
    loop(*_flat(target), *_flat(source), tuple(target.shape))
    return True


def in_threads(work: Callable[[int, int], None], num_bytes: int) -> None:
    """Call ``work(part, parts)`` for every part of some bytes, by several threads where that pays.

    Each takes the next part that is left, so a thread that the system is slow to wake costs nothing.
    """
    threads = max(1, min(torch.get_num_threads(), num_bytes // _MIN_BYTES_A_THREAD)) if _loops()[0] else 1
    left = iter(range(threads))

    def take() -> None:
        for part in left:
            work(part, threads)

    others = [_threads().submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:  # whatever happened: nobody may write any more when this returns
        at_work = [other for other in others if not other.cancel()]
        wait(at_work)
    for other in at_work:
        other.result()


def _loop(name: str, target: Tensor, start: int, length: int) -> Callable[..., None] | None:
    """The compiled loop: one that writes past the caches where the target is large and its places are whole vectors."""
    ordinary, streaming, lanes = _loops()
    places = (*target.stride()[:3], start, length)
    fits = lanes and not any(place % lanes for place in places) and target.data_ptr() % (lanes * target.itemsize) == 0
    if fits and target.nbytes >= _MIN_BYTES_STREAMED and name in streaming:
        return streaming[name]
    return ordinary.get(name)


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
def _loops() -> tuple[_Loops, _Loops, int]:
    """The compiled loops, those that write past the caches, and how many numbers these take at once; else nothing."""
    try:
        from kvpacket_rag import fused_loops, fused_stream
    except ImportError:
        return {}, {}, 0
    return fused_loops.LOOPS, fused_stream.LOOPS, fused_stream.LANES
