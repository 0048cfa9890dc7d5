"""Operations of floats rounded up, down or to zero, for which the processor has no switch here.

The result to nearest is taken first, then the sign of what it lacks, its *excess* over the result:
by fused multiply-add where no part can underflow, by fractions for the few others.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from cupyrec.sim import rounding
from cupyrec.sim.rounding import multiply_add

__all__ = ["float32", "float64", "whole_to_float64"]

SMALL, LARGE = 2.0**-900, 2.0**1000
NEAREST = {
    "add": np.add, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "fma": multiply_add,
}  # fmt: skip


def _sum_excess(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> np.ndarray:
    back = y - a
    return (a - (y - back)) + (b - back)


def _fma_excess(a: np.ndarray, b: np.ndarray, c: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Boldo and Muller's: the error of a fused multiply-add as a sum of two, their sign is its."""
    high = a * b
    low = multiply_add(a, b, -high)
    tail = c + low
    tail_rest = _sum_excess(c, low, tail)
    top = high + tail
    top_rest = _sum_excess(high, tail, top)
    first = (top - y) + top_rest
    return first + tail_rest


def _excess(root: str, y: np.ndarray, *x: np.ndarray) -> np.ndarray:
    """A number of the sign of the exact result less y; 0 where operands are not finite."""
    a, b, c = (*x, y, y)[:3]
    if root == "add":
        rest, safe = _sum_excess(a, b, y), np.ones(y.shape, bool)
    elif root == "mul":
        rest = multiply_add(a, b, -y)
        safe = (np.abs(y) >= SMALL) | (a == 0) | (b == 0)
    elif root == "div":
        rest = multiply_add(-y, b, a) * np.copysign(1.0, b)
        safe = ((np.abs(y) >= SMALL) & (np.abs(a) >= SMALL)) | (a == 0)
    elif root == "sqrt":
        rest, safe = multiply_add(-y, y, a), (a >= SMALL) | (a == 0)
    else:
        rest, p = _fma_excess(a, b, c, y), np.abs(a * b)
        safe = (p >= SMALL) & (p < LARGE) & (np.abs(c) < LARGE) | (a == 0) | (b == 0)
        rest = np.where((a == 0) | (b == 0), 0, rest)
    finite = np.isfinite(a) & ~np.isnan(y)
    for other in x[1:]:
        finite &= np.isfinite(other)
    if root == "div":
        finite &= b != 0
    rest = np.where(np.isinf(y), -y, rest)  # too large
    for i in np.flatnonzero(finite & ~safe & np.isfinite(y)):
        rest[i] = _exact_excess(root, *(float(v[i]) for v in (y, *x)))
    return np.where(finite, rest, 0)


def _exact_excess(root: str, y: float, *x: float) -> int:
    near, (a, *more) = Fraction(y), map(Fraction, x)
    if root == "sqrt":
        exact, near = a, near * near
    elif root == "div":
        exact = a / more[0]
    else:
        exact = a * more[0] + (more[1] if root == "fma" else 0)
    return (exact > near) - (exact < near)


def _operation(root: str, x: list[np.ndarray]) -> tuple[str, list[np.ndarray]]:
    """The operation by one of those above."""
    if root == "sub":
        return "add", [x[0], -x[1]]
    if root == "rcp":
        return "div", [np.ones_like(x[0]), x[0]]
    return "fma" if root == "mad" else root, x


def _nearest(root: str, x: list[np.ndarray], mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The result to nearest and its excess; a sum that is exactly zero is -0 when rounded down."""
    root, x = _operation(root, x)
    x = [np.array(v, np.float64, ndmin=1) for v in np.broadcast_arrays(*x)]
    y = NEAREST[root](*x)
    rest = _excess(root, y, *x)
    if mode == "rm" and root in {"add", "fma"}:
        p = x[0] * x[1] if root == "fma" else x[0]
        differ = np.signbit(p) != np.signbit(x[-1])
        y = np.where((y == 0) & (rest == 0) & differ, -0.0, y)
    return y, rest


def _step(y: np.ndarray, rest: np.ndarray, mode: str) -> np.ndarray:
    down, up = rest < 0, rest > 0
    if mode == "rz":
        down, up = down & (y > 0), up & (y < 0)
    elif mode == "rm":
        up = False
    else:
        down = False
    return np.where(down, np.nextafter(y, -np.inf), np.where(up, np.nextafter(y, np.inf), y))


def float64(root: str, mode: str) -> Callable | None:
    """Return an operation of float64 rounded by ``rz``, ``rm`` or ``rp``."""
    if root not in NEAREST and root not in {"sub", "rcp", "mad"}:
        return None
    return lambda *x: _step(*_nearest(root, list(x), mode), mode)


def float32(root: str, mode: str) -> Callable | None:
    """Return an operation of float32 rounded by ``rz``, ``rm`` or ``rp``."""
    if root not in NEAREST and root not in {"sub", "rcp", "mad"}:
        return None

    def function(*x: np.ndarray) -> np.ndarray:
        y, rest = _nearest(root, [v.astype(np.float64) for v in x], mode)
        return rounding.round_float32(rounding.to_odd(y, rest), mode)

    return function


def whole_to_float64(a: np.ndarray, mode: str) -> np.ndarray:
    """Round 64-bit whole numbers to float64."""
    high, low = (a >> a.dtype.type(32)).astype(np.float64), (a & a.dtype.type(0xFFFFFFFF))
    return _step(*_nearest("add", [high * 2.0**32, low.astype(np.float64)], "rz"), mode)
