"""Floats of 16 bits for embedding rows, rounded at random from float32 and widened to it again.

A value between two neighbours goes to the upper one as often as it is near to it, so that updates
much smaller than their distance count on average:

    words = philox4x32(counter = (id low, id high, table, step),
                       key = seed + (column // 8 + 1) * 0x9E3779B97F4A7C15 mod 2^64)
    r = low or high (odd columns) 16 bits of words[column % 8 // 2]
    a = the bits of |x|
    BFLOAT16    code = (a + r) >> 16
    FLOAT16     code = (a + (r >> 3) >> 13) - 2^10 * 112        from the least normal, 2^-14, on
                code = (int(2^40 * |x|) + r) >> 16              below

and the sign of x. What 16 bits hold stays as it is; the mean over r is x, for FLOAT16 below 2^-14
up to 2^-40. A finite x beyond the largest number becomes that, NaN the quiet one without a sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.random import philox4x32

__all__ = [
    "BFLOAT16", "FLOAT16", "FLOAT32", "check_counters", "draw_chances", "round_rows",
    "round_vector", "widen_vector", "widened",
]  # fmt: skip

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # as in kernels/stochastic_rounding.cuh

_ROWS = 512  # a block
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW, _16, _32 = np.uint64(0xFFFFFFFF), np.uint64(16), np.uint64(32)
_SIGN, _INFINITE = np.uint32(0x80000000), np.uint32(0x7F800000)


@cpu.exact_loop
def _rounded(x, r, value):
    """The code of x, given 16 random bits."""
    bits = np.float32(x).view(np.uint32)
    a = bits & ~_SIGN
    if value == BFLOAT16:
        infinity, code = np.uint32(0x7F80), (a + r) >> np.uint32(16)
    else:
        infinity = np.uint32(0x7C00)
        if a >= np.uint32(0x38800000):
            code = ((a + (r >> np.uint32(3))) >> np.uint32(13)) - np.uint32(112 << 10)
        else:
            code = (np.uint32(abs(x) * np.float32(2.0**40)) + r) >> np.uint32(16)
    if a > _INFINITE:
        return infinity | (infinity >> np.uint32(1))
    code = infinity if a == _INFINITE else min(code, infinity - np.uint32(1))
    return code | (bits & _SIGN) >> np.uint32(16)


@cpu.exact_loop
def draw_chances(table, key, seed, step, r) -> None:
    """Write the 16 random bits of each column of a key's row to an array of uint16.

    Examples
    --------
    >>> r, zero = np.empty(3, np.uint16), np.uint64(0)
    >>> draw_chances(np.uint32(0), 7, zero, zero, r)
    >>> r
    array([23658, 26546, 29201], dtype=uint16)
    """
    low, high = np.uint64(key) & _LOW, np.uint64(key) >> _32
    for start in range(0, r.size, 8):
        k = seed + np.uint64(start // 8 + 1) * _ODD
        words = philox4x32(low, high, np.uint64(table), step, k & _LOW, k >> _32)
        for m in range(min(8, r.size - start)):
            r[start + m] = words[m // 2] >> np.uint64(m % 2 * 16) & np.uint64(0xFFFF)


@cpu.exact_loop
def round_vector(x, table, key, seed, step, value, codes) -> None:
    """Round a vector of float32 to codes of FLOAT16 or BFLOAT16, by the formula above.

    Parameters
    ----------
    x : (D,) array of float32
    table, key : uint32 and int64
        The key of the row.
    seed, step : uint64
    value : int
    codes : (at least D,) array of uint16

    Examples
    --------
    >>> codes = np.empty(1, np.uint16)
    >>> x, zero = np.array([-2.0], np.float32), np.uint64(0)
    >>> round_vector(x, np.uint32(0), 7, zero, zero, FLOAT16, codes)
    >>> codes.view(np.float16)
    array([-2.], dtype=float16)
    """
    draw_chances(table, key, seed, step, codes[: x.size])
    for d in range(x.size):
        codes[d] = _rounded(x[d], np.uint32(codes[d]), value)


@cpu.exact_inline
def widened(code, value) -> np.uint32:
    """The bits of the float32 that a code of FLOAT16 or BFLOAT16 stands for."""
    if value == BFLOAT16:
        return np.uint32(code) << np.uint32(16)
    sign = (np.uint32(code) & np.uint32(0x8000)) << np.uint32(16)
    exponent, bits = code & np.uint32(0x7C00), (code & np.uint32(0x7FFF)) << np.uint32(13)
    if exponent == 0:  # by way of normal numbers: subnormal ones take ten times as long
        small = np.uint32(bits + np.uint32(113 << 23)).view(np.float32) - np.float32(2.0**-14)
        return np.uint32(np.float32(small).view(np.uint32) | sign)
    bits += np.uint32(224 << 23 if exponent == np.uint32(0x7C00) else 112 << 23)
    return np.uint32(bits | sign)


@cpu.exact_loop
def widen_vector(codes, value, x) -> None:
    """Write the float32 that codes of FLOAT16 or BFLOAT16 stand for to `x`.

    Parameters
    ----------
    codes : (at least D,) array of uint16
    value : int
    x : (D,) array of float32

    Examples
    --------
    >>> x = np.empty(2, np.float32)
    >>> widen_vector(np.array([-2.0, 0.1], np.float16).view(np.uint16), FLOAT16, x)
    >>> x
    array([-2.        ,  0.09997559], dtype=float32)
    """
    bits = x.view(np.uint32)
    for d in range(x.size):
        bits[d] = widened(codes[d], value)


@cpu.exact_loop
def _round_cpu(x, tables, ids, seed, step, value, codes):
    for i in range(ids.size):
        round_vector(x[i], tables[i], ids[i], seed, step, value, codes[i])


_round = Kernel(
    "stochastic_rounding.cu", "round_rows",
    "const float* x, const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step,"
    " uint16_t* codes, int64_t n",
    lambda N, D: Geometry(blocks(N * blocks(D, 8), 256), 256),
)  # fmt: skip


def check_counters(where: str, seed: int, step: int) -> None:
    """Raise ValueError unless a seed has 64 bits and a step 32.

    Examples
    --------
    >>> check_counters("f", 0, 2**32)
    Traceback (most recent call last):
        ...
    ValueError: f: 'step' must lie in [0, 2**32), got 4294967296.
    """
    for name, number, bits in [("seed", seed, 64), ("step", step, 32)]:
        if not 0 <= number < 2**bits:
            raise ValueError(f"{where}: '{name}' must lie in [0, 2**{bits}), got {number}.")


def round_rows(x: Any, tables: Any, ids: Any, seed: int, step: int, value: int) -> Any:
    """Round a vector for each key to 16 bits, by the formula above.

    Parameters
    ----------
    x : (N, D) array of float32
    tables : (N,) array of uint32
    ids : (N,) array of int64
    seed : int
        0 <= seed < 2**64.
    step : int
        0 <= step < 2**32; 0 for initial vectors.
    value : int
        FLOAT16 or BFLOAT16.

    Returns
    -------
    (N, D) array of uint16
        The numbers' bits.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, D = 0, a seed or step out of range.

    Examples
    --------
    >>> x = np.full((10000, 1), 1 + 2**-11, np.float32)  # amid two numbers of float16
    >>> codes = round_rows(x, np.zeros(10000, np.uint32), np.arange(10000), 1, 0, FLOAT16)
    >>> np.unique(codes.view(np.float16)).astype(float)
    array([1.        , 1.00097656])
    >>> round(float(codes.view(np.float16).mean(dtype=float)), 4)
    1.0005
    """
    where = "round_rows"
    for name, array, dtype in [("x", x, np.float32), ("tables", tables, np.uint32)]:
        errors.dtype(where, name, array, dtype)
    errors.dtype(where, "ids", ids, np.int64)
    errors.axes(where, tables=(tables, "N"), ids=(ids, "N"), x=(x, "N D"))
    errors.columns(where, "x", x)
    check_counters(where, seed, step)
    xp = arrays.namespace(where, x, tables, ids)
    x, tables, ids = (xp.ascontiguousarray(array) for array in (x, tables, ids))
    codes = xp.empty(x.shape, np.uint16)
    count, width = x.shape
    if xp is not np:
        macros = {"DIM": width, "VECTOR": vector_width(width, x), "VALUE": value}
        _round(x, tables, ids, seed, step, codes, count, macros=macros, N=count, D=width)
        return codes
    constants = np.uint64(seed), np.uint64(step), value

    def block(i: int, j: int) -> None:
        _round_cpu(x[i:j], tables[i:j], ids[i:j], *constants, codes[i:j])

    cpu.parallel(block, count, _ROWS)
    return codes
