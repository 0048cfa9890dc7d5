"""Stochastic gradient descent, on dense parameters and on embedding rows.

w -= lr * weight_decay * w + lr * scale * g             scale: the clipping factor
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.clip_scale import scale_pointer, scale_value
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

_ELEMENTS = 65536  # a block


@cpu.exact_inline
def _update(w, g, rate, decay):
    for i in range(g.size):
        w[i] -= decay * w[i] + rate * g[i]


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, rate, decay):
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w = read_vector(memory, words, g.shape[1], scratch)
        _update(w, vector_of(g, u), rate, decay)
        write_vector(memory, words, w, rounding, u)


_dense = Kernel(
    "sgd.cu", "sgd_dense",
    "float* w, const float* g, float rate, float decay, const float* scale, int64_t n",
    lambda N: Geometry(blocks(N, 1024), 256), optional="scale",
)  # fmt: skip
_rows = row_kernel("sgd.cu", "sgd_rows", "float rate, float decay")


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
    errors.vectors("sgd_dense", w=w, g=g)
    xp = arrays.namespace("sgd_dense", w, g)
    if xp is not np:
        g = xp.ascontiguousarray(g)
        macros = {"VECTOR": vector_width(4, w, g)}
        decay = lr * weight_decay
        _dense(w, g, lr, decay, scale_pointer(xp, scale), w.size, macros=macros, N=w.size)
    elif not np.isnan(scale := scale_value(scale)):
        c = np.float32(lr * scale), np.float32(lr * weight_decay)
        cpu.parallel(lambda i, j: _update(w[i:j], g[i:j], *c), w.size, _ELEMENTS)


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
    if xp is not np:
        c = lr, lr * weight_decay, scale_pointer(xp, scale)
        update_rows(xp, _rows, memory, rows, g, rounding, *c)
    elif not np.isnan(scale := scale_value(scale)):
        c = np.float32(lr * scale), np.float32(lr * weight_decay)
        update_rows_cpu(_update_rows, memory, rows, g, rounding, *c)
