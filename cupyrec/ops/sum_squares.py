"""Sum of squares in float64, for the global gradient norm: sum over all elements of x^2."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["sum_squares"]

_ELEMENTS = 65536  # elements a block of the CPU
_TILE, _MOST_BLOCKS = 2048, 2048  # of a kernel: elements at a time, parts that one block adds


@cpu.loop
def _sum_squares_cpu(x):
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


_sum = Kernel(
    "sum_squares.cu", "sum_squares", "const float* x, int64_t n, double* sums",
    lambda N: Geometry(min(blocks(N, _TILE), _MOST_BLOCKS), 256),
)  # fmt: skip
_add = Kernel(
    "sum_squares.cu", "add_parts", "const double* parts, int64_t n, double* total",
    lambda: Geometry(1, 256),
)  # fmt: skip


def sum_squares(*xs: Any) -> Any:
    """Return the sum of the squares of all elements; NaN or inf if one isn't finite.

    Parameters
    ----------
    *xs : arrays of float32
        At least one, all on one device.

    Returns
    -------
    float, or (1,) array of float64 on the device of the arrays
        The host doesn't wait for it.

    Raises
    ------
    TypeError
        Another dtype, or several devices.

    Examples
    --------
    >>> sum_squares(np.array([3.0], np.float32), np.array([4.0], np.float32))
    25.0
    """
    xp = arrays.namespace("sum_squares", *xs)
    for x in xs:
        errors.dtype("sum_squares", "x", x, np.float32)
    return float(sum(map(_sum_squares, xs))) if xp is np else _sum_squares_kernels(xp, xs)


def _sum_squares(x: np.ndarray) -> float:
    flat = x.reshape(-1)
    parts = np.zeros(-(-flat.size // _ELEMENTS))

    def block(i: int, j: int) -> None:
        parts[i // _ELEMENTS] = _sum_squares_cpu(flat[i:j])

    cpu.parallel(block, flat.size, _ELEMENTS)
    return float(parts.sum())


def _sum_squares_kernels(xp: ModuleType, xs: Sequence[Any]) -> Any:
    """The parts of all arrays lie side by side, so that they are added at once."""
    xs = [xp.ascontiguousarray(x) for x in xs if x.size]
    ends = np.cumsum([0, *(_sum.geometry(N=x.size).grid for x in xs)]).tolist()
    if ends[-1] == 0:
        return xp.zeros(1, np.float64)
    parts = xp.empty(ends[-1], np.float64)
    for x, i, j in zip(xs, ends[:-1], ends[1:], strict=True):
        _sum(x, x.size, parts[i:j], macros={"VECTOR": vector_width(4, x)}, N=x.size)
    if parts.size == 1:
        return parts
    total = xp.empty(1, np.float64)
    _add(parts, parts.size, total, macros={"VECTOR": 4})
    return total
