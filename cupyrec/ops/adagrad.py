"""Adagrad (Duchi et al. 2011), on dense parameters and on embedding rows.

    g = scale * g                   scale: the clipping factor
    s += g^2
    w -= lr * g / (sqrt(s) + eps)

A row is [w (D), s (D)].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.clip_scale import scale_pointer, scale_value
from cupyrec.ops.embedding_rows import RowMemory, check_rows, row_at, row_kernel, update_rows

__all__ = ["adagrad_dense", "adagrad_rows"]

_ELEMENTS, _ROWS = 65536, 512  # a block


@cpu.exact_loop
def _update(w, s, g, lr, eps, scale):
    for i in range(g.size):
        x = g[i] * scale
        s[i] += x * x
        w[i] -= lr * x / (np.sqrt(s[i]) + eps)


@cpu.exact_loop
def _update_rows(memory, rows, g, lr, eps, scale):
    width = g.shape[1]
    for u in range(rows.size):
        row = row_at(memory, rows[u])
        _update(row[:width], row[width : 2 * width], g[u], lr, eps, scale)


_dense = Kernel(
    "adagrad.cu", "adagrad_dense",
    "float* w, float* s, const float* g, float lr, float eps, const float* scale, int64_t n",
    lambda N: Geometry(blocks(N, 1024), 256), optional="scale",
)  # fmt: skip
_rows = row_kernel("adagrad.cu", "adagrad_rows", "float lr, float eps")


def adagrad_dense(w: Any, s: Any, g: Any, *, lr: float, eps: float, scale: Any = 1.0) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, s, g : (N,) arrays of float32
        Parameters, sums of squares, gradient.
    lr, eps : float
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
    errors.vectors("adagrad_dense", w=w, s=s, g=g)
    xp = arrays.namespace("adagrad_dense", w, s, g)
    if xp is not np:
        g = xp.ascontiguousarray(g)
        macros = {"VECTOR": vector_width(4, w, s, g)}
        _dense(w, s, g, lr, eps, scale_pointer(xp, scale), w.size, macros=macros, N=w.size)
    elif not np.isnan(scale := scale_value(scale)):
        c = np.float32(lr), np.float32(eps), np.float32(scale)
        cpu.parallel(lambda i, j: _update(w[i:j], s[i:j], g[i:j], *c), w.size, _ELEMENTS)


def adagrad_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    eps: float,
    scale: Any = 1.0,
) -> None:
    """Update embedding rows and their state in place.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    g : (U, D) array of float32
    lr, eps : float
    scale : float, or (1,) array of float32 on the device of `g`
        Where it is NaN, nothing is updated.

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
    check_rows("adagrad_rows", memory, rows, g, parts=2)
    xp = arrays.namespace("adagrad_rows", memory.chunks, rows, g)
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, lr, eps, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        c = np.float32(lr), np.float32(eps), np.float32(scale)
        cpu.parallel(lambda i, j: _update_rows(memory, rows[i:j], g[i:j], *c), len(rows), _ROWS)
