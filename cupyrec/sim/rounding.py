"""Floating point as PTX fixes it: fused multiply-add, directed rounding, flushing, 16-bit formats.

A result that must be rounded once to less than 53 bits is first formed in float64 *rounded to odd*:
truncated, with the last bit set where anything was lost. Rounding that to a format at least two
bits narrower equals rounding the exact value (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba.extending import intrinsic

from cupyrec import cpu

__all__ = [
    "flush", "from_half", "fused", "multiply_add", "odd_product_sum", "round_float32", "saturate",
    "to_half", "to_odd",
]  # fmt: skip


@intrinsic
def _fma(typing, a, b, c):
    """The processor's fused multiply-add, or the C library's: one rounding either way."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return a(a, b, c), generate


@cpu.elementwise("float32(float32)")
def _flush(x):
    """Return x, a signed zero in place of a subnormal."""
    return np.copysign(np.float32(0), x) if abs(x) < np.float32(1.1754943508222875e-38) else x


@cpu.elementwise("float32(float32,float32,float32)")
def _flushed_multiply_add(a, b, c):
    tiny, zero = np.float32(1.1754943508222875e-38), np.float32(0)
    a = np.copysign(zero, a) if abs(a) < tiny else a
    b = np.copysign(zero, b) if abs(b) < tiny else b
    c = np.copysign(zero, c) if abs(c) < tiny else c
    x = _fma(a, b, c)
    return np.copysign(zero, x) if abs(x) < tiny else x


@cpu.elementwise("float32(float32,float32,float32)", "float64(float64,float64,float64)")
def _multiply_add(a, b, c):
    """Return a * b + c, rounded once to nearest."""
    return _fma(a, b, c)


flush, multiply_add = _flush, _multiply_add


def odd_product_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32 or narrower values as float64, rounded to odd."""
    p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)  # exact
    s = np.asarray(p + c)
    back = s - p
    return to_odd(s, (p - (s - back)) + (c - back))


def to_odd(s: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return float64 s, or its odd neighbour on the side of what was lost if it is even."""
    bits = s.view(np.int64)
    wrong = (lost != 0) & np.isfinite(s) & np.isfinite(lost) & (bits & 1 == 0)
    step = np.where((lost > 0) == (s > 0), 1, -1)
    return np.where(wrong, bits + step, bits).view(np.float64)


def round_float32(x: np.ndarray, mode: str) -> np.ndarray:
    """Round float64 once to float32, ``rn``, ``rz``, ``rm`` or ``rp``."""
    x = np.asarray(x)
    return _directed(x, x.astype(np.float32), mode)


def _directed(x: np.ndarray, y: np.ndarray, mode: str) -> np.ndarray:
    """Move y, the float nearest to x, to the one that the mode of rounding asks for."""
    if mode == "rn":
        return y
    infinity = y.dtype.type(np.inf)
    down, up = np.nextafter(y, -infinity), np.nextafter(y, infinity)
    finite, near = np.isfinite(x), y.astype(x.dtype)
    above, below = finite & (near > x), finite & (near < x)
    if mode == "rz":
        above, below = above & (x > 0), below & (x < 0)
    elif mode == "rm":
        below = False
    elif mode == "rp":
        above = False
    return np.where(above, down, np.where(below, up, y))


def fused(ftz: bool) -> Callable:
    """Return the function (a, b, c) -> a * b + c of float32, rounded to nearest."""
    return _flushed_multiply_add if ftz else multiply_add


def saturate(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.clip(np.nan_to_num(x, nan=0.0, posinf=1.0, neginf=0.0), 0, 1)


def from_half(bits: np.ndarray, kind: str) -> np.ndarray:
    """Widen uint16 bits of ``f16`` or ``bf16`` to float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_half(x: np.ndarray, kind: str, mode: str = "rn") -> np.ndarray:
    """Round float64 once to uint16 bits of ``f16`` or ``bf16``: ``rn``, ``rz``, ``rm``, ``rp``."""
    x = np.asarray(x, np.float64)
    if kind == "f16":
        y = _directed(x, x.astype(np.float16), mode)
        return np.where(np.isnan(x), np.uint16(0x7FFF), y.view(np.uint16))
    down = round_float32(x, "rz")
    bits = down.view(np.uint32) | (down.astype(np.float64) != x)  # to odd
    if mode == "rn":
        bits = bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)
    elif mode != "rz":
        away = np.signbit(x) == (mode == "rm")
        bits = bits + np.where(away, np.uint32(0xFFFF), np.uint32(0))
    return np.where(np.isnan(x), np.uint16(0x7FFF), (bits >> 16).astype(np.uint16))
