"""Copies and sums of whole arrays, on the CPU by all threads and in memory used before.

NumPy's own are one thread's, and of new memory the system first clears every page: between ops that
take a few milliseconds on all cores, either would be most of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, cpu

__all__ = ["add", "concatenate", "contiguous", "placed", "scattered"]

_NUMBERS = 1 << 16  # a block, and those of an array that one thread does as fast


def _fill(shape: tuple[int, ...], dtype: Any, write: Callable[[Any, slice], None]) -> np.ndarray:
    """Return a new array of which ``write(rows, place)`` has written each block of rows."""
    out = arrays.empty(shape, dtype)

    def block(i: int, j: int) -> None:
        write(out[i:j], slice(i, j))

    if out.size:
        cpu.parallel(block, len(out), max(1, _NUMBERS * len(out) // out.size))
    return out


def _is_large(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0 and x.size > _NUMBERS


def contiguous(x: Any) -> Any:
    """Return x of any device in rows side by side, itself where it is.

    Examples
    --------
    >>> contiguous(np.ones((2, 3))[:, :2]).flags.c_contiguous
    True
    """
    if not _is_large(x):
        return arrays.namespace("contiguous", x).ascontiguousarray(x)
    if x.flags.c_contiguous:
        return x
    return _fill(x.shape, x.dtype, lambda out, rows: np.copyto(out, x[rows]))


def add(a: Any, b: Any) -> Any:
    """Return a + b of arrays of one shape and dtype, of any device.

    Examples
    --------
    >>> add(np.ones(2), np.ones(2))
    array([2., 2.])
    """
    if not _is_large(a):
        return a + b
    return _fill(a.shape, a.dtype, lambda out, rows: np.add(a[rows], b[rows], out=out))


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    """Return arrays of one device side by side along `axis`, as `numpy.concatenate`.

    Examples
    --------
    >>> concatenate([np.zeros((1, 2)), np.ones((1, 1))], axis=1)
    array([[0., 0., 1.]])
    """
    same = len({getattr(x, "dtype", None) for x in parts}) == 1
    if not same or not all(map(_is_large, parts)) or axis % parts[0].ndim == 0:
        return np.concatenate(parts, axis=axis)
    axis %= parts[0].ndim
    shape = list(parts[0].shape)
    shape[axis] = sum(x.shape[axis] for x in parts)
    if any(x.shape[:1] != parts[0].shape[:1] for x in parts):
        return np.concatenate(parts, axis=axis)  # which says what is wrong

    def write(out: np.ndarray, rows: slice) -> None:
        np.concatenate([x[rows] for x in parts], axis=axis, out=out)

    return _fill(tuple(shape), parts[0].dtype, write)


def placed(values: Any, key: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros of a shape with `values` at ``[key]``, whose first slice takes all rows.

    Examples
    --------
    >>> placed(np.ones((2, 1)), (slice(None), slice(1)), (2, 3))
    array([[1., 0., 0.],
           [1., 0., 0.]])
    """

    def write(out: np.ndarray, rows: slice) -> None:
        out[...] = 0
        out[key] = values[rows]

    return _fill(shape, values.dtype, write)


def scattered(values: Any, rows: Any, count: int) -> Any:
    """Return `count` rows of zeros, but `values` at the numbers `rows`, of which none comes twice.

    Examples
    --------
    >>> scattered(np.ones((2, 1)), np.array([3, 0]), 4)
    array([[1.],
           [0.],
           [0.],
           [1.]])
    """
    xp, shape = arrays.namespace("scattered", values, rows), (count, *values.shape[1:])
    if xp is not np:
        out = xp.zeros(shape, values.dtype)
        out[rows] = values
        return out
    out = _fill(shape, values.dtype, lambda block, _: block.fill(0))

    def write(i: int, j: int) -> None:
        out[rows[i:j]] = values[i:j]

    cpu.parallel(write, len(rows), _NUMBERS // 16)
    return out
