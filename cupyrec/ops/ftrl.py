"""FTRL-Proximal (McMahan et al. 2013), on dense parameters and, lazily, on embedding rows.

    g = scale * g                               scale: the clipping factor
    r = sqrt(n);  n += g^2;  c = beta + sqrt(n) + lr * lambda2
    z += lr * g - (sqrt(n) - r) * w + lr * weight_decay * c * w
    w = (sign(z) * lr * lambda1 - z) / c        0 where |z| <= lr * lambda1

z is lr times the paper's. So without penalties a schedule changes what steps add, not what weights
are already; lr * lambda1 and lr * lambda2 are of the current lr, which all of z meets.
It starts from 0; where it is 0 and w is not, before a weight's first update, it becomes
-(beta + r) * w: an initial weight is the first proximal centre, which the paper has at 0, and both
penalties pull at it from the first step on.
Weight decay is decoupled: it takes lr * weight_decay * w off each weight that is not 0 after the
step, and z, of which weights are made anew, knows. lr = 0 updates nothing.

A row is [w (D), n (D), z (D)]. Lazy: only the rows of the batch move.
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

__all__ = ["ftrl_dense", "ftrl_rows"]


@cpu.exact_inline
def _update(w, n, z, g, constants):
    lr, lasso, ridge, beta, decay, scale = constants
    for i in range(g.size):
        x = g[i] * scale
        before = np.sqrt(n[i])
        n[i] += x * x
        root = np.sqrt(n[i])
        if z[i] == 0 and w[i] != 0:
            z[i] = -(beta + before) * w[i]
        c = beta + root + ridge
        z[i] += lr * x + (decay * c - (root - before)) * w[i]
        edge = lasso if z[i] > 0 else -lasso
        w[i] = np.float32(0) if abs(z[i]) <= lasso else (edge - z[i]) / c


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, constants):
    width = g.shape[1]
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, state = read_vector(memory, words, width, scratch), state_at(memory, words, width)
        _update(w, state[:width], state[width : 2 * width], vector_of(g, u), constants)
        write_vector(memory, words, w, rounding, u)


_CONSTANTS = "float lr, float lasso, float ridge, float beta, float decay"
_dense = dense_kernel("ftrl.cu", "ftrl_dense", "w n z", _CONSTANTS)
_rows = row_kernel("ftrl.cu", "ftrl_rows", _CONSTANTS)


def _constants(
    lr: float, lambda1: float, lambda2: float, beta: float, weight_decay: float
) -> tuple[np.float32, ...]:
    """What loops and kernels take."""
    return tuple(np.float32(c) for c in (lr, lr * lambda1, lr * lambda2, beta, lr * weight_decay))


def ftrl_dense(
    w: Any,
    n: Any,
    z: Any,
    g: Any,
    *,
    lr: float,
    lambda1: float = 0.0,
    lambda2: float = 0.0,
    beta: float = 0.0,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, n, z, g : (N,) arrays of float32
        Parameters, sums of squares, sums of what moves the parameters, gradient.
    lr : float
        The paper's alpha.
    lambda1, lambda2, beta : float
        Weights of the L1 and of the L2 penalty, added to the root of the sum of squares.
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
    >>> w, n, z = (np.zeros(2, np.float32) for _ in range(3))
    >>> ftrl_dense(w, n, z, np.array([2.0, 0.5], np.float32), lr=0.5, lambda1=1.0)
    >>> w, n, z
    (array([-0.25,  0.  ], dtype=float32), array([4.  , 0.25], dtype=float32), \
array([1.  , 0.25], dtype=float32))
    """
    xp = check_dense("ftrl_dense", w=w, n=n, z=z, g=g)
    c = _constants(lr, lambda1, lambda2, beta, weight_decay)
    if lr != 0:
        update_dense(xp, _dense, _update, (w, n, z, g), scale, *c)


def ftrl_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    lambda1: float = 0.0,
    lambda2: float = 0.0,
    beta: float = 0.0,
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
    lr, lambda1, lambda2, beta, weight_decay : float
        See `ftrl_dense`.
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
    >>> chunk = np.zeros((1, 4), np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> ftrl_rows(memory, np.array([0]), np.array([[2.0]], np.float32), lr=0.5, lambda1=1.0)
    >>> chunk
    array([[-0.25,  4.  ,  1.  ,  0.  ]], dtype=float32)
    """
    xp = check_rows("ftrl_rows", memory, rows, g, rounding, parts=2)
    c = _constants(lr, lambda1, lambda2, beta, weight_decay)
    if lr == 0:
        return
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, rounding, *c, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        update_rows_cpu(_update_rows, memory, rows, g, rounding, (*c, np.float32(scale)))
