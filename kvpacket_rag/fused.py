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
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Condition
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]
_Loops = Mapping[str, Callable[..., None]]
_MIN_BYTES_A_THREAD = 4 << 20  # a third of a millisecond; a thread that wakes later finds nothing left to do
_MIN_BYTES_A_STEP = 2 << 20
_MIN_BYTES_STREAMED = 1 << 20  # of a tensor; below, a context may lie in the caches and is read from there


def turning(target: Tensor, source: Tensor, layout: str, start: int, turn: tuple[Tensor, Tensor]) -> list[Step]:
    """Steps that turn the rotary channels of ``source`` into ``target``; none if no compiled loop fits.

    They write into different layers, so they may be done in any order and by several threads.

    Args:
        target: (layers, heads, tokens, width), channels side by side, any other strides.
        source: the same shape; not touched.
        layout: ``"half"`` or ``"interleaved"``, as in ``rope.Rotation``.
        start: first rotary channel.
        turn: cosine and sine of each pair, (n,) float32.
    """
    if not (_fits(target) and _fits(source)):
        return []
    cos, sin = (part.numpy() for part in turn)
    loop = _loop(layout, target, source, start, len(cos))
    if loop is None:
        return []
    return _cut(loop, target, source, tuple(target.shape[1:3]), start, cos, sin)


def copying(target: Tensor, source: Tensor) -> list[Step]:
    """Steps that copy ``source`` into ``target``, as those of :func:`turning`; none if no compiled loop fits."""
    if not (_fits(target) and _fits(source)) or target.dtype != source.dtype:
        return []
    loop = _loop("copy", target, source, 0, target.shape[3])
    if loop is None:
        return []
    return _cut(loop, target, source, tuple(target.shape[1:]))


def in_threads(steps: deque[Step], num_bytes: int) -> None:
    """Do all steps, by several threads where that pays for as many bytes; each is let go of once it is done.

    A thread takes the next step that is left, so one that the system is slow to wake costs nothing.
    """
    threads = min(torch.get_num_threads(), num_bytes // _MIN_BYTES_A_THREAD, len(steps)) if _loops()[0] else 1

    at_work, changed = 0, Condition()

    def take() -> None:
        nonlocal at_work
        with changed:
            at_work += 1
        try:
            while step := _next(steps):
                step()
        except BaseException:
            steps.clear()
            raise
        finally:
            with changed:
                at_work -= 1
                changed.notify_all()

    others: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no more threads can be had
            others += (_threads().submit(take) for _ in range(threads - 1))
        take()
    finally:  # whatever happened: nobody may write any more when this returns
        begun = [other for other in others if not other.cancel()]
        with changed:
            changed.wait_for(lambda: not at_work)
    for other in begun:
        other.result()


def _next(steps: deque[Step]) -> Step | None:
    with suppress(IndexError):  # another thread was quicker
        return steps.popleft()
    return None


def _loop(name: str, target: Tensor, source: Tensor, start: int, length: int) -> Callable[..., None] | None:
    """The compiled loop: one that writes past the caches where the target is large and its places are whole vectors.

    Such a loop knows one number format; packets that were restored from few bits are wider than their context.
    """
    ordinary, streaming, lanes = _loops()
    places = (*target.stride()[:3], start, length)
    fits = lanes and not any(place % lanes for place in places) and target.data_ptr() % (lanes * target.itemsize) == 0
    if fits and target.dtype == source.dtype and target.nbytes >= _MIN_BYTES_STREAMED and name in streaming:
        return streaming[name]
    return ordinary.get(name)


def _cut(loop: Callable[..., None], target: Tensor, source: Tensor, *arguments: Any) -> list[Step]:
    """A loop over some layers at a time, so that there is work for several threads."""
    count, arrays = len(target), (*_flat(target), *_flat(source))
    size = max(1, count * _MIN_BYTES_A_STEP // target.nbytes)
    return [partial(loop, first, min(first + size, count), *arrays, *arguments) for first in range(0, count, size)]


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
