"""The loops of ``fused``; importing them needs numba. Compiled at the first call, then kept on disk.

Arrays are one-dimensional, strides are numbers, and places are unsigned, for only then does the
compiler know that channels lie side by side and that no place counts from the end, and turns eight
or sixteen pairs at once. The walk over tokens stands here once for each layout: shared by both, it ran
at a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}  # contract: one rounding for a product and its sum


def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """The loop compiled, and kept on disk unless neither this folder nor the user's can be written."""
    try:
        return njit(cache=True, **_OPTIONS)(loop)  # type: ignore[no-any-return]
    except RuntimeError:
        return njit(**_OPTIONS)(loop)  # type: ignore[no-any-return]


def _widen(number: Any) -> Any:
    """A stored number as float32; an integer holds the bits of a bfloat16."""


def _narrow(value: Any, like: Any) -> Any:
    """A float32 as it is stored where ``like`` came from, rounded to nearest, ties to even."""


@overload(_widen, strict=False)
def _widen_for(number: Any) -> Callable[[Any], Any]:
    if isinstance(number, types.Integer):
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


@overload(_narrow, strict=False)
def _narrow_for(value: Any, like: Any) -> Callable[[Any, Any], Any]:
    if isinstance(like, types.Integer):
        return _round
    return lambda value, like: value


def _round(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)  # what is no number stays none


@compiled
def turn_half(
    first: Any, last: Any, target: Any, out: Any, source: Any, into: Any, shape: Any, start: Any, cos: Any, sin: Any
) -> None:
    """Turn pairs of channels k and k + n in layers ``first`` to ``last``.

    ``out`` and ``into`` are the strides of (layers, heads, tokens), ``shape`` is (heads, tokens).
    """
    pairs = np.uintp(cos.shape[0])
    for layer in range(first, last):
        for head in range(shape[0]):
            for token in range(shape[1]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2] + start)
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2] + start)
                for k in range(pairs):
                    one, other = _widen(source[read + k]), _widen(source[read + pairs + k])
                    target[write + k] = _narrow(one * cos[k] - other * sin[k], target[0])
                    target[write + pairs + k] = _narrow(other * cos[k] + one * sin[k], target[0])


@compiled
def turn_interleaved(
    first: Any, last: Any, target: Any, out: Any, source: Any, into: Any, shape: Any, start: Any, cos: Any, sin: Any
) -> None:
    """Turn pairs of channels 2k and 2k + 1; arguments as of :func:`turn_half`."""
    pairs, two = np.uintp(cos.shape[0]), np.uintp(2)
    for layer in range(first, last):
        for head in range(shape[0]):
            for token in range(shape[1]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2] + start)
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2] + start)
                for k in range(pairs):
                    one, other = _widen(source[read + two * k]), _widen(source[read + two * k + np.uintp(1)])
                    target[write + two * k] = _narrow(one * cos[k] - other * sin[k], target[0])
                    target[write + two * k + np.uintp(1)] = _narrow(other * cos[k] + one * sin[k], target[0])


@compiled
def copy(first: Any, last: Any, target: Any, out: Any, source: Any, into: Any, shape: Any) -> None:
    """Copy ``shape`` (heads, tokens, width) in layers ``first`` to ``last``; strides as of :func:`turn_half`."""
    width = np.uintp(shape[2])
    for layer in range(first, last):
        for head in range(shape[0]):
            for token in range(shape[1]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2])
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2])
                for k in range(width):
                    target[write + k] = source[read + k]


LOOPS: dict[str, Callable[..., None]] = {"half": turn_half, "interleaved": turn_interleaved, "copy": copy}
