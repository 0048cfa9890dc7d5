"""Sum of squares in float64, for the global gradient norm: sum over all elements of x^2."""

from __future__ import annotations

import numpy as np

from cupyrec import arrays, cpu, errors

__all__ = ["sum_squares"]

_ELEMENTS = 65536  # elements a block


@cpu.loop
def _sum_squares_cpu(x):
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


def sum_squares(x: np.ndarray) -> float:
    """Return the sum of the squares of all elements; NaN or inf if one isn't finite.

    Parameters
    ----------
    x : contiguous array of float32

    Raises
    ------
    TypeError
        Another dtype.

    Examples
    --------
    >>> sum_squares(np.array([3.0, 4.0], np.float32))
    25.0
    """
    arrays.namespace("sum_squares", x)
    errors.dtype("sum_squares", "x", x, np.float32)
    flat = x.reshape(-1)
    parts = np.zeros(-(-flat.size // _ELEMENTS))

    def block(i: int, j: int) -> None:
        parts[i // _ELEMENTS] = _sum_squares_cpu(flat[i:j])

    cpu.parallel(block, flat.size, _ELEMENTS)
    return float(parts.sum())
