"""Adagrad (Duchi et al. 2011), on dense parameters and on embedding rows.

    g = scale * g                   scale: the clipping factor
    s += g^2
    w -= lr * weight_decay * w + lr * g / (sqrt(s) + eps)

A row is [w (D), s (D)].
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
)  # fmt: skip
from cupyrec.ops.vector_sums import vector_of

__all__ = ["adagrad_dense", "adagrad_rows"]


@cpu.exact_inline
def _update(w, s, g, constants):
    lr, eps, decay, scale = constants
    for i in range(g.size):
        x = g[i] * scale
        s[i] += x * x
        w[i] -= decay * w[i] + lr * x / (np.sqrt(s[i]) + eps)


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, constants):
    width = g.shape[1]
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, s = read_vector(memory, words, width, scratch), state_at(memory, words, width)
        _update(w, s, vector_of(g, u), constants)
        write_vector(memory, words, w, rounding, u)


_CONSTANTS = "float lr, float eps, float decay"
_dense = dense_kernel("adagrad.cu", "adagrad_dense", "w s", _CONSTANTS)
_rows = row_kernel("adagrad.cu", "adagrad_rows", _CONSTANTS)


def _constants(lr: float, eps: float, weight_decay: float) -> tuple[np.float32, ...]:
    """What loops and kernels take."""
    return np.float32(lr), np.float32(eps), np.float32(lr * weight_decay)


def adagrad_dense(
    w: Any,
    s: Any,
    g: Any,
    *,
    lr: float,
    eps: float,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, s, g : (N,) arrays of float32
        Parameters, sums of squares, gradient.
    lr, eps : float
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
    >>> w, s = np.array([1.0], np.float32), np.zeros(1, np.float32)
    >>> adagrad_dense(w, s, np.array([2.0], np.float32), lr=0.25, eps=0.0)
    >>> w, s
    (array([0.75], dtype=float32), array([4.], dtype=float32))
    """
    xp = check_dense("adagrad_dense", w=w, s=s, g=g)
    update_dense(xp, _dense, _update, (w, s, g), scale, *_constants(lr, eps, weight_decay))


def adagrad_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    eps: float,
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
    lr, eps : float
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
    >>> chunk = np.array([[1, 0, 0, 0]], np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> adagrad_rows(memory, np.array([0]), np.array([[2.0]], np.float32), lr=0.25, eps=0.0)
    >>> chunk
    array([[0.75, 4.  , 0.  , 0.  ]], dtype=float32)
    """
    xp = check_rows("adagrad_rows", memory, rows, g, rounding, parts=1)
    c = _constants(lr, eps, weight_decay)
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, rounding, *c, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        update_rows_cpu(_update_rows, memory, rows, g, rounding, (*c, np.float32(scale)))
