"""Arithmetic that LLVM turns into vector instructions: exp and log as polynomials, sums and maxima.

Numba calls the C library for `math.exp`, one element at a time; these run 16 at a time.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES = 16
# Without Numba's memory management: kernels allocate nothing, and counting references to arrays and their slices would cost
# more than the arithmetic on 21 labels.
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}
INLINE = {"forceinline": True, "_nrt": False}
kernel = njit(**_OPTIONS, fastmath={"contract"})
# Inlined, a function's arrays cost nothing; called, each is counted in and out.
jit = njit(**_OPTIONS, fastmath={"contract"}, forceinline=True)
# Sums may be reordered here, and only here: the rounding trick in exp would not survive it.
jit_sum = njit(**_OPTIONS, fastmath={"contract", "reassoc"}, forceinline=True)

_LOG2_E = np.float32(1.44269504)
_TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23: adding it leaves the nearest integer in the low bits
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_UNDERFLOW = np.float32(-87.0)
_BIAS = np.int32(127 << 23)
_MANTISSA = np.int32(23)
_ROOT_HALF = np.int32(0x3F3504F3)
NO_NAN = ("nnan", "nsz")  # only with these flags does LLVM turn a maximum into vector instructions


@jit
def padded(labels: int) -> int:
    """The number of lanes that hold `labels` values."""
    return -(-labels // LANES) * LANES


def width(labels: int, dtype: np.dtype) -> int | tuple[int, ...]:
    """What a kernel is compiled for: up to 32 labels in float32 it knows the number of lanes, and its loops unroll."""
    lanes = int(padded(labels))
    return (0,) * lanes if lanes <= 2 * LANES and dtype == np.float32 else lanes


def lanes_of(width):
    """The number of lanes: a constant for LLVM where the width's type tells it."""
    raise NotImplementedError


@overload(lanes_of, jit_options=INLINE)
def _lanes_of(width):
    if isinstance(width, types.BaseTuple):
        count = len(width)
        return lambda width: count
    return lambda width: width


def _bitcast(source: types.Type, target: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def cast(context, value):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), generate

    return cast


_float_bits = _bitcast(types.float32, types.int32, ir.IntType(32))
_bits_float = _bitcast(types.int32, types.float32, ir.FloatType())


@intrinsic
def _half_float(context, value):
    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _prefetch(context, array, index):
    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [pointer, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@jit
def fetch(values):
    """Start to bring a one-dimensional array into the cache: the tables of a column's edges lie further apart than a page."""
    for k in range(0, len(values), 64 // values.itemsize):
        _prefetch(values, k)


def widen(value):
    """A potential's number as it is stored, in a float that can be calculated with: uint16 holds bfloat16, int16 float16."""
    raise NotImplementedError


@overload(widen, jit_options=INLINE)
def _widen(value):
    if value == types.uint16:
        return lambda value: _bits_float(np.int32(np.uint32(value) << np.uint32(16)))
    if value == types.int16:
        return lambda value: _half_float(value)
    return lambda value: value


def number(value, like):
    """A literal in the float type of `like`: with a Python number, float32 arithmetic would go on in float64."""
    raise NotImplementedError


@overload(number, jit_options=INLINE)
def _number(value, like):
    kind = np.float64 if like == types.float64 else np.float32
    return lambda value, like: kind(value)


def exp(x):
    """e^x for x <= 88, 0 for -inf; relative error 8e-8 in float32."""
    raise NotImplementedError


@overload(exp, jit_options={"fastmath": {"contract"}, **INLINE})
def _exp(x):
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp32(x):
        shifted = x * _LOG2_E + _TO_INTEGER
        n = shifted - _TO_INTEGER
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1.0)
        power = _bits_float(np.int32((_float_bits(shifted) << _MANTISSA) + _BIAS))
        return p * power if x > _EXP_UNDERFLOW else np.float32(0.0)

    return exp32


def log(x):
    """The natural logarithm of a positive, normal x; absolute error 2e-7 in float32."""
    raise NotImplementedError


@overload(log, jit_options={"fastmath": {"contract"}, **INLINE})
def _log(x):
    if x != types.float32:
        return lambda x: math.log(x)

    def log32(x):
        bits = _float_bits(x)
        exponent = np.int32(bits - _ROOT_HALF) >> _MANTISSA
        m = _bits_float(np.int32(bits - (exponent << _MANTISSA))) - np.float32(1.0)
        p = np.float32(7.0376836292e-2)
        p = p * m + np.float32(-1.1514610310e-1)
        p = p * m + np.float32(1.1676998740e-1)
        p = p * m + np.float32(-1.2420140846e-1)
        p = p * m + np.float32(1.4249322787e-1)
        p = p * m + np.float32(-1.6668057665e-1)
        p = p * m + np.float32(2.0000714765e-1)
        p = p * m + np.float32(-2.4999993993e-1)
        p = p * m + np.float32(3.3333331174e-1)
        square = m * m
        e = np.float32(exponent)
        return m + (p * m * square + e * _LN2_LOW - np.float32(0.5) * square) + e * _LN2_HIGH

    return log32


def _chosen(comparison: str) -> Any:
    """max or min without a care for NaN."""

    @intrinsic
    def choose(context, a, b):
        def generate(context, builder, signature, args):
            first = builder.fcmp_ordered(comparison, *args, flags=NO_NAN)
            return builder.select(first, *args, flags=NO_NAN)

        return a(a, a), generate

    return choose


larger, smaller = _chosen(">"), _chosen("<")


@jit
def largest(values, count):
    """The maximum of the first `count` values, of which none is NaN."""
    best = values[0]
    for k in range(count):
        best = larger(best, values[k])
    return best


@jit
def smallest(values, count):
    """The minimum of the first `count` values, of which none is NaN."""
    best = values[0]
    for k in range(count):
        best = smaller(best, values[k])
    return best


@jit
def any_invalid(values, count):
    """Whether a NaN or +inf is among the first `count` values."""
    found = False
    for k in range(count):
        found |= not (values[k] < np.inf)
    return found


@jit_sum
def total(values, count):
    """The sum of the first `count` values."""
    result = number(0, values[0])
    for k in range(count):
        result += values[k]
    return result
