"""Stochastic gradient descent, on dense parameters and on embedding rows.

w -= lr * weight_decay * w + lr * scale * g             scale: the clipping factor
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import cpu
from cupyrec.ops.clip_scale import scale_pointer, scale_value
from cupyrec.ops.dense_parameters import check_dense, dense_kernel, update_dense
from cupyrec.ops.embedding_rows import (
    Rounding,
    RowMemory,
    check_rows,
    read_vector,
    row_kernel,
    row_of,
    update_rows,
    update_rows_cpu,
    write_vector,
)  # fmt: skip
from cupyrec.ops.vector_sums import vector_of

__all__ = ["sgd_dense", "sgd_rows"]


@cpu.exact_inline
def _update(w, g, constants):
    lr, decay, scale = constants
    rate = lr * scale
    for i in range(g.size):
        w[i] -= decay * w[i] + rate * g[i]


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, constants):
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w = read_vector(memory, words, g.shape[1], scratch)
        _update(w, vector_of(g, u), constants)
        write_vector(memory, words, w, rounding, u)


_CONSTANTS = "float rate, float decay"
_dense = dense_kernel("sgd.cu", "sgd_dense", "w", _CONSTANTS)
_rows = row_kernel("sgd.cu", "sgd_rows", _CONSTANTS)


def sgd_dense(w: Any, g: Any, *, lr: float, weight_decay: float = 0.0, scale: Any = 1.0) -> None:
    """Update dense parameters in place.

    Parameters
    ----------
    w, g : (N,) arrays of float32
        Parameters and their gradient.
    lr : float
    weight_decay : float
        Decoupled from the gradient.
    scale : float, or (1,) array of float32 on the device of `w`
        Where it is NaN, nothing is updated.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> w = np.array([1.0], np.float32)
    >>> sgd_dense(w, np.array([2.0], np.float32), lr=0.25)
    >>> w
    array([0.5], dtype=float32)
    """
    xp = check_dense("sgd_dense", w=w, g=g)
    update_dense(xp, _dense, _update, (w, g), scale, np.float32(lr), np.float32(lr * weight_decay))


def sgd_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    rounding: Rounding | None = None,
) -> None:
    """Update embedding rows in place.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    g : (U, D) array of float32
    lr : float
    weight_decay : float
        Decoupled from the gradient; rows that are not in the batch don't decay.
    scale : float, or (1,) array of float32 on the device of `g`
        Where it is NaN, nothing is updated.
    rounding : Rounding, optional
        Needed just where rows are of 16 bits.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.ones((1, 4), np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> sgd_rows(memory, np.array([0]), np.array([[2.0, 4.0]], np.float32), lr=0.25)
    >>> chunk
    array([[0.5, 0. , 1. , 1. ]], dtype=float32)
    """
    xp = check_rows("sgd_rows", memory, rows, g, rounding)
    c = np.float32(lr), np.float32(lr * weight_decay)
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, rounding, *c, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        update_rows_cpu(_update_rows, memory, rows, g, rounding, (*c, np.float32(scale)))
