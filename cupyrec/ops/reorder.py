"""Numbers in another order or repeated, in memory that the CPU has used before."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors

__all__ = ["by_field", "repeat", "take"]

_SAMPLES, _TILE = 1024, 64  # a block; what of it stays in the L1 cache
_VALUES = 1 << 16  # a block


@cpu.exact_loop
def _by_field_cpu(ids, first, out):
    for start in range(0, len(ids), _TILE):
        for f in range(len(out)):
            for b in range(start, min(start + _TILE, len(ids))):
                out[f, first + b] = ids[b, f]


def by_field(ids: Any) -> Any:
    """Return ids field after field: number f * B + b is that of sample b and field f.

    Parameters
    ----------
    ids : (B, F) array

    Returns
    -------
    (F * B,) array

    Raises
    ------
    ValueError, TypeError
        Another number of axes, or no array.

    Examples
    --------
    >>> by_field(np.array([[1, 2], [3, 4], [5, 6]]))
    array([1, 3, 5, 2, 4, 6])
    """
    xp = arrays.namespace("by_field", ids)
    errors.axes("by_field", ids=(ids, "B F"))
    if xp is not np:
        return xp.ascontiguousarray(ids.T).reshape(-1)
    out = arrays.empty(ids.shape[::-1], ids.dtype)
    cpu.parallel(lambda i, j: _by_field_cpu(ids[i:j], i, out), len(ids), _SAMPLES)
    return out.reshape(-1)


def repeat(x: np.ndarray, times: int) -> np.ndarray:
    """Return each number so many times, as `numpy.repeat`.

    Parameters
    ----------
    x : (M,) array
    times : int

    Examples
    --------
    >>> repeat(np.array([5, 6]), 3)
    array([5, 5, 5, 6, 6, 6])
    """
    out = arrays.empty((len(x), times), x.dtype)
    out[:] = x[:, None]
    return out.reshape(-1)


@cpu.exact_loop
def _copy_cpu(x, index, out):
    for i in range(index.size):
        out[i] = x[index[i]]


def take(x: Any, index: Any) -> Any:
    """Return x[index].

    Parameters
    ----------
    x : (M,) array
    index : (N,) array of int64
        Not checked.

    Examples
    --------
    >>> take(np.array([5, 6, 7]), np.array([2, 0]))
    array([7, 5])
    """
    if arrays.namespace("take", x, index) is not np:
        return x[index]
    out = arrays.empty(index.size, x.dtype)
    cpu.parallel(lambda i, j: _copy_cpu(x, index[i:j], out[i:j]), index.size, _VALUES)
    return out
