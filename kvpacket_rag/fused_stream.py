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
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_EXACT = ("contract",)  # one rounding for a product and its sum


class _Vectors:
    """Code for vectors of an array's numbers, where 16-bit integers hold the bits of bfloat16."""

    def __init__(self, builder: Any, number: Any) -> None:
        self.builder = builder
        self._has_bits = isinstance(number, types.Integer)
        self._type = _SHORTS if self._has_bits else _FLOATS
        self._bytes = 2 if self._has_bits else 4

    def load(self, array: Any, place: Any) -> Any:
        """The vector that begins at a place."""
        return self.builder.load(self._at(array, place), align=self._bytes)

    def stream(self, vector: Any, array: Any, place: Any) -> None:
        """Store a vector at a place past the caches."""
        store = self.builder.store(vector, self._at(array, place), align=self._bytes * LANES)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    def widen(self, vector: Any) -> Any:
        """Stored numbers as float32."""
        if not self._has_bits:
            return vector
        return self.builder.bitcast(self.builder.shl(self.builder.zext(vector, _INTS), _all(16)), _FLOATS)

    def narrow(self, vector: Any) -> Any:
        """float32 as it is stored, rounded to nearest, ties to even; what is no number stays none."""
        if not self._has_bits:
            return vector
        builder = self.builder
        bits = builder.bitcast(vector, _INTS)
        odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _all(0x7FFF))), _all(16))
        is_none = builder.fcmp_unordered("uno", vector, vector)
        return builder.trunc(builder.select(is_none, _all(0x7FC0), rounded), _SHORTS)

    def _at(self, array: Any, place: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [place]), self._type.as_pointer())


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _memory(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
    proxy: Any = cgutils
    return proxy.create_struct_proxy(signature.args[number])(context, builder, value=arguments[number]).data


@_as_code
def _turn_vectors(_: Any, target: Any, write: Any, source: Any, read: Any, cos: Any, sin: Any, k: Any) -> Any:
    """Turn the pairs k to k + 16, of which ``read`` and ``write`` say where both halves begin."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = [_memory(context, builder, signature, arguments, number) for number in (0, 2, 4, 5)]
        to, of, at = arguments[1], arguments[3], arguments[6]
        numbers, factors = _Vectors(builder, signature.args[0].dtype), _Vectors(builder, signature.args[4].dtype)
        first, second = (
            numbers.widen(numbers.load(place[1], builder.add(builder.extract_value(of, half), at))) for half in (0, 1)
        )
        c, s = factors.load(place[2], at), factors.load(place[3], at)
        turned = (
            builder.fsub(builder.fmul(first, c, _EXACT), builder.fmul(second, s, _EXACT), flags=_EXACT),
            builder.fadd(builder.fmul(second, c, _EXACT), builder.fmul(first, s, _EXACT), flags=_EXACT),
        )
        for half, vector in enumerate(turned):
            numbers.stream(numbers.narrow(vector), place[0], builder.add(builder.extract_value(to, half), at))
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
def turn_half(target: Any, out: Any, source: Any, into: Any, shape: Any, start: Any, cos: Any, sin: Any) -> None:
    """As :func:`kvpacket_rag.fused_loops.turn_half`."""
    pairs = np.uintp(cos.shape[0])
    for layer in range(shape[0]):
        for head in range(shape[1]):
            for token in range(shape[2]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2] + start)
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2] + start)
                for k in range(np.uintp(0), pairs, np.uintp(LANES)):
                    _turn_vectors(target, (write, write + pairs), source, (read, read + pairs), cos, sin, k)
    _fence()


@compiled
def copy(target: Any, out: Any, source: Any, into: Any, shape: Any) -> None:
    """As :func:`kvpacket_rag.fused_loops.copy`."""
    width = np.uintp(shape[3])
    for layer in range(shape[0]):
        for head in range(shape[1]):
            for token in range(shape[2]):
                read = np.uintp(layer * into[0] + head * into[1] + token * into[2])
                write = np.uintp(layer * out[0] + head * out[1] + token * out[2])
                for k in range(np.uintp(0), width, np.uintp(LANES)):
                    _copy_vector(target, write + k, source, read + k)
    _fence()


LOOPS: dict[str, Callable[..., None]] = {"half": turn_half, "copy": copy}
