"""Loops of ``fused`` that write past the processor's caches; importing them needs numba.

An ordinary store first reads the line it is about to replace: a third of the traffic of a copy, and all of it useless
for a context, which is larger than the caches and read much later. A *non-temporal* store does not. LLVM vectorises no
loop that holds one, so the vectors are written out here, as its intermediate code: sixteen pairs of channels at once,
which every processor's backend cuts to its own width. Places have to be multiples of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kvpacket_rag.fused_loops import compiled

_as_code: Callable[[Any], Any] = extending.intrinsic
LANES = 16
_UPPER = 0xFFFF0000
_EXACT = ("contract",)  # one rounding for a product and its sum


class _Vectors:
    """Code for ``LANES`` numbers of an array at once, where 16-bit integers hold the bits of bfloat16.

    Two of those make a word, whose halves become float32 by a shift and by a mask: half the work of spreading the
    numbers out and packing them again. So even and odd numbers are turned apart, by factors in that order.
    """

    def __init__(self, builder: Any, number: Any) -> None:
        self.builder = builder
        self._has_bits = isinstance(number, types.Integer)
        self._bytes = 2 if self._has_bits else 4
        words = LANES * self._bytes // 4
        self._words, self._floats = ir.VectorType(ir.IntType(32), words), ir.VectorType(ir.FloatType(), words)

    def load(self, array: Any, place: Any) -> Any:
        """The numbers from a place on, as words."""
        return self.builder.load(self._at(array, place, self._words), align=self._bytes)

    def stream(self, words: Any, array: Any, place: Any) -> None:
        """Store words at a place past the caches."""
        store = self.builder.store(words, self._at(array, place, self._words), align=self._bytes * LANES)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    def widen(self, words: Any) -> list[Any]:
        """The numbers as float32: in one vector, or the even ones and the odd ones."""
        builder, halves = self.builder, [words]
        if self._has_bits:
            halves = [builder.shl(words, self._all(16)), builder.and_(words, self._all(_UPPER))]
        return [builder.bitcast(half, self._floats) for half in halves]

    def narrow(self, floats: list[Any]) -> Any:
        """What :meth:`widen` gave as words again, rounded to nearest, ties to even; what is no number stays none."""
        builder, halves = self.builder, [self.builder.bitcast(vector, self._words) for vector in floats]
        if not self._has_bits:
            return halves[0]
        even, odd = (self._round(half) for half in halves)
        return builder.or_(builder.lshr(even, self._all(16)), builder.and_(odd, self._all(_UPPER)))

    def factors(self, array: Any, place: Any) -> list[Any]:
        """float32 factors of the numbers from a place on, in as many vectors as :meth:`widen` gives."""
        offsets = range(0, LANES, self._floats.count)
        places = [self.builder.add(place, ir.Constant(place.type, offset)) for offset in offsets]
        return [self.builder.load(self._at(array, one, self._floats), align=4) for one in places]

    def _round(self, bits: Any) -> Any:
        """Bits of float32 with the nearest bfloat16 in their upper halves.

        What is no number is so in its upper half alone, as the bfloat16 that it comes from, or is the processor's own.
        """
        builder = self.builder
        tie = builder.and_(builder.lshr(bits, self._all(16)), self._all(1))
        return builder.add(builder.add(bits, self._all(0x7FFF)), tie)

    def _at(self, array: Any, place: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [place]), kind.as_pointer())

    def _all(self, value: int) -> Any:
        return ir.Constant(self._words, [value] * self._words.count)


def _memory(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
    proxy: Any = cgutils
    return proxy.create_struct_proxy(signature.args[number])(context, builder, value=arguments[number]).data


@_as_code
def _turn_vectors(_: Any, target: Any, write: Any, source: Any, read: Any, cos: Any, sin: Any, k: Any) -> Any:
    """Turn the pairs k to k + 16, of which ``read`` and ``write`` say where both halves begin."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = [_memory(context, builder, signature, arguments, number) for number in (0, 2, 4, 5)]
        to, of, at = arguments[1], arguments[3], arguments[6]
        numbers = _Vectors(builder, signature.args[0].dtype)
        first, second = (
            numbers.widen(numbers.load(place[1], builder.add(builder.extract_value(of, half), at))) for half in (0, 1)
        )
        c, s = (numbers.factors(factors, at) for factors in place[2:])

        def mixed(join: Callable[..., Any], one: list[Any], other: list[Any]) -> list[Any]:
            return [
                join(builder.fmul(x, cos, _EXACT), builder.fmul(y, sin, _EXACT), flags=_EXACT)
                for x, y, cos, sin in zip(one, other, c, s, strict=True)
            ]

        for half, turned in enumerate((mixed(builder.fsub, first, second), mixed(builder.fadd, second, first))):
            numbers.stream(numbers.narrow(turned), place[0], builder.add(builder.extract_value(to, half), at))
        return context.get_dummy_value()

    return types.void(target, write, source, read, cos, sin, k), code


@_as_code
def _copy_vector(_: Any, target: Any, write: Any, source: Any, read: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = _Vectors(builder, signature.args[0].dtype)
        to, of = (_memory(context, builder, signature, arguments, number) for number in (0, 2))
        numbers.stream(numbers.load(of, arguments[3]), to, arguments[1])
        return context.get_dummy_value()

    return types.void(target, write, source, read), code


@_as_code
def _fence(_: Any) -> Any:
    """Let other threads see what was streamed before anything that comes after."""

    def code(context: Any, builder: Any, *_: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@compiled
def _in_order(factors: Any, target: Any) -> Any:
    """Factors in the order in which ``_Vectors`` takes them for an array's numbers."""
    if target.itemsize == 4:
        return factors
    ordered = np.empty_like(factors)
    for k in range(len(factors)):
        ordered[k // LANES * LANES + k % 2 * (LANES // 2) + k % LANES // 2] = factors[k]
    return ordered


@compiled
def turn_half(
    first: Any, last: Any, target: Any, out: Any, source: Any, into: Any, shape: Any, start: Any, cos: Any, sin: Any
) -> None:
    """As :func:`kvpacket_rag.fused_loops.turn_half`."""
    pairs = np.uintp(cos.shape[0])
    cos, sin = _in_order(cos, target), _in_order(sin, target)
    for layer in range(first, last):
        for head in range(shape[0]):
            for token in range(shape[1]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2] + start)
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2] + start)
                for k in range(np.uintp(0), pairs, np.uintp(LANES)):
                    _turn_vectors(target, (write, write + pairs), source, (read, read + pairs), cos, sin, k)
    _fence()


@compiled
def copy(first: Any, last: Any, target: Any, out: Any, source: Any, into: Any, shape: Any) -> None:
    """As :func:`kvpacket_rag.fused_loops.copy`."""
    width = np.uintp(shape[2])
    for layer in range(first, last):
        for head in range(shape[0]):
            for token in range(shape[1]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2])
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2])
                for k in range(np.uintp(0), width, np.uintp(LANES)):
                    _copy_vector(target, write + k, source, read + k)
    _fence()


LOOPS: dict[str, Callable[..., None]] = {"half": turn_half, "copy": copy}
