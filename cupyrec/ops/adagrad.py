"""Adagrad (Duchi et al. 2011), on dense parameters and on embedding rows.

    g = scale * g                   scale: the clipping factor
    s += g^2
    w -= lr * g / (sqrt(s) + eps)

A row is [w (D), s (D)].
"""

from __future__ import annotations

import numpy as np

from cupyrec import cpu, errors
from cupyrec.ops.embedding_rows import RowMemory, check_rows, row_at

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


def adagrad_dense(
    w: np.ndarray, s: np.ndarray, g: np.ndarray, *, lr: float, eps: float, scale: float = 1.0
) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, s, g : (N,) arrays of float32
        Parameters, sums of squares, gradient.
    lr, eps, scale : float

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
    c = np.float32(lr), np.float32(eps), np.float32(scale)
    cpu.parallel(lambda i, j: _update(w[i:j], s[i:j], g[i:j], *c), w.size, _ELEMENTS)


def adagrad_rows(
    memory: RowMemory,
    rows: np.ndarray,
    g: np.ndarray,
    *,
    lr: float,
    eps: float,
    scale: float = 1.0,
) -> None:
    """Update embedding rows and their state in place.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    g : (U, D) array of float32
    lr, eps, scale : float

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
    c = np.float32(lr), np.float32(eps), np.float32(scale)
    cpu.parallel(lambda i, j: _update_rows(memory, rows[i:j], g[i:j], *c), len(rows), _ROWS)
