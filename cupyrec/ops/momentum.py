"""Gradient descent with momentum (Polyak 1964), on dense parameters and on embedding rows.

    g = scale * g                               scale: the clipping factor
    m = momentum * m + g
    w -= lr * weight_decay * w + lr * m

Nesterov's (Sutskever et al. 2013) has g + momentum * m in place of the last m.

A row is [w (D), m (D)]. Lazy: only the rows of the batch move.
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
    state_at,
    update_rows,
    update_rows_cpu,
    write_vector,
)
from cupyrec.ops.vector_sums import vector_of

__all__ = ["momentum_dense", "momentum_rows"]


@cpu.exact_inline
def _update(w, m, g, constants):
    lr, momentum, nesterov, decay, scale = constants
    for i in range(g.size):
        x = g[i] * scale
        m[i] = momentum * m[i] + x
        w[i] -= decay * w[i] + lr * (x + momentum * m[i] if nesterov else m[i])


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, constants):
    width = g.shape[1]
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, m = read_vector(memory, words, width, scratch), state_at(memory, words, width)
        _update(w, m, vector_of(g, u), constants)
        write_vector(memory, words, w, rounding, u)


_CONSTANTS = "float lr, float momentum, bool nesterov, float decay"
_dense = dense_kernel("momentum.cu", "momentum_dense", "w m", _CONSTANTS)
_rows = row_kernel("momentum.cu", "momentum_rows", _CONSTANTS)


def _constants(lr: float, momentum: float, nesterov: bool, weight_decay: float) -> tuple:
    """What loops and kernels take."""
    return np.float32(lr), np.float32(momentum), bool(nesterov), np.float32(lr * weight_decay)


def momentum_dense(
    w: Any,
    m: Any,
    g: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, m, g : (N,) arrays of float32
        Parameters, momentum, gradient.
    lr, momentum : float
    nesterov : bool
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
    >>> w, m = np.array([1.0], np.float32), np.array([2.0], np.float32)
    >>> momentum_dense(w, m, np.array([3.0], np.float32), lr=0.25, momentum=0.5)
    >>> w, m
    (array([0.], dtype=float32), array([4.], dtype=float32))
    """
    xp = check_dense("momentum_dense", w=w, m=m, g=g)
    c = _constants(lr, momentum, nesterov, weight_decay)
    update_dense(xp, _dense, _update, (w, m, g), scale, *c)


def momentum_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    momentum: float,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    rounding: Rounding | None = None,
) -> None:
    """Update embedding rows and their state in place.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    g : (U, D) array of float32
    lr, momentum : float
    nesterov : bool
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
    >>> chunk = np.array([[1, 2, 0, 0]], np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> g = np.array([[3.0]], np.float32)
    >>> momentum_rows(memory, np.array([0]), g, lr=0.25, momentum=0.5, nesterov=True)
    >>> chunk
    array([[-0.25,  4.  ,  0.  ,  0.  ]], dtype=float32)
    """
    xp = check_rows("momentum_rows", memory, rows, g, rounding, parts=1)
    c = _constants(lr, momentum, nesterov, weight_decay)
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, rounding, *c, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        update_rows_cpu(_update_rows, memory, rows, g, rounding, (*c, np.float32(scale)))
