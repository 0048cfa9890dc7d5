"""Adam (Kingma and Ba 2015), on dense parameters and, lazily, on embedding rows.

    g = scale * g                               scale: the clipping factor
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w -= lr * weight_decay * w                  AdamW (Loshchilov and Hutter 2019)
    w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

A row is [w (D), m (D), v (D)]. Lazy: only the rows of the batch move, t counts all steps. Where a
device alone knows t, since it skips steps, it keeps the two corrections 1 / (1 - beta1^t) and
1 / sqrt(1 - beta2^t): lr times the first is then rounded once more.
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
    state_at,
    update_rows,
    update_rows_cpu,
    write_vector,
)  # fmt: skip
from cupyrec.ops.vector_sums import vector_of

__all__ = ["adam_dense", "adam_rows", "update_adam_rows"]

_ELEMENTS = 65536  # a block


@cpu.exact_inline
def _update(w, m, v, g, constants):
    rate, beta1, rest1, beta2, rest2, inverse_root, eps, decay, scale = constants
    for i in range(g.size):
        x = g[i] * scale
        m[i] = beta1 * m[i] + rest1 * x
        v[i] = beta2 * v[i] + rest2 * (x * x)
        w[i] -= decay * w[i] + rate * m[i] / (np.sqrt(v[i]) * inverse_root + eps)


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, last, constants):
    n = g.shape[1]
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, state = read_vector(memory, words, n, scratch), state_at(memory, words, n)
        _update(w, state[:n], state[n : 2 * n], vector_of(g, u), constants)
        write_vector(memory, words, w, rounding, u)
        if last:
            state[2 * n : 2 * n + 1].view(np.int32)[0] = last


_CONSTANTS = (
    "float rate, float beta1, float rest1, float beta2, float rest2, float inverse_root, float eps,"
    " float decay, const float* corrections"
)
_dense = Kernel(
    "adam.cu", "adam_dense",
    f"float* w, float* m, float* v, const float* g, {_CONSTANTS}, const float* scale, int64_t n",
    lambda N: Geometry(blocks(N, 1024), 256), optional="corrections scale",
)  # fmt: skip
_rows = row_kernel("adam.cu", "adam_rows", f"int last, {_CONSTANTS}", optional="corrections")


def _constants(
    lr: float, beta1: float, beta2: float, eps: float, t: int, weight_decay: float,
    corrections: Any = None,
) -> tuple:  # fmt: skip
    """What loops and kernels take. 1 - beta is rounded once; 1 - float32(.999) is off by 1e-5."""
    if corrections is None:
        rate, inverse_root = lr / (1 - beta1**t), (1 - beta2**t) ** -0.5
    elif isinstance(corrections, np.ndarray):
        rate, inverse_root = np.float32(lr) * corrections[0], corrections[1]
    else:
        rate, inverse_root = lr, 1.0  # the kernel multiplies by them
    constants = (rate, beta1, 1 - beta1, beta2, 1 - beta2, inverse_root, eps, lr * weight_decay)
    return tuple(np.float32(c) for c in constants)


def adam_dense(
    w: Any,
    m: Any,
    v: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    t: int,
    weight_decay: float = 0.0,
    corrections: Any = None,
    scale: Any = 1.0,
) -> None:
    """Update dense parameters and their state in place.

    Parameters
    ----------
    w, m, v, g : (N,) arrays of float32
        Parameters, first and second moment, gradient.
    lr, beta1, beta2, eps : float
    t : int
        Number of this step, from 1.
    weight_decay : float
        Decoupled from the gradient.
    corrections : (2,) array of float32 on the device of `w`, optional
        As above, instead of those of `t`.
    scale : float, or (1,) array of float32 on the device of `w`
        Where it is NaN, nothing is updated.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> w, m, v = np.array([1.0], np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    >>> g = np.array([2.0], np.float32)
    >>> adam_dense(w, m, v, g, lr=0.25, beta1=0.9, beta2=0.999, eps=1e-8, t=1)
    >>> w.round(4)
    array([0.75], dtype=float32)
    """
    errors.vectors("adam_dense", w=w, m=m, v=v, g=g)
    xp = arrays.namespace("adam_dense", w, m, v, g)
    c = _constants(lr, beta1, beta2, eps, t, weight_decay, corrections)
    if xp is not np:
        g = xp.ascontiguousarray(g)
        macros = {"VECTOR": vector_width(4, w, m, v, g)}
        scale = scale_pointer(xp, scale)
        _dense(w, m, v, g, *c, corrections, scale, w.size, macros=macros, N=w.size)
    elif not np.isnan(scale := scale_value(scale)):
        c = (*c, np.float32(scale))
        cpu.parallel(lambda i, j: _update(w[i:j], m[i:j], v[i:j], g[i:j], c), w.size, _ELEMENTS)


def adam_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    t: int,
    weight_decay: float = 0.0,
    corrections: Any = None,
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
    lr, beta1, beta2, eps : float
    t : int
        Number of this step, from 1.
    weight_decay : float
        Decoupled from the gradient; rows that are not in the batch don't decay.
    corrections : (2,) array of float32 on the device of `g`, optional
        As above, instead of those of `t`.
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
    >>> adam_rows(memory, np.array([0]), np.array([[2.0]], np.float32), lr=0.25, beta1=0.9,
    ...           beta2=0.999, eps=1e-8, t=1)
    >>> chunk.round(4)
    array([[0.75 , 0.2  , 0.004, 0.   ]], dtype=float32)
    """
    update_adam_rows(
        "adam_rows", memory, rows, g, scale, rounding, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
        t=t, weight_decay=weight_decay, corrections=corrections,
    )  # fmt: skip


def update_adam_rows(
    where: str,
    memory: RowMemory,
    rows: Any,
    g: Any,
    scale: Any,
    rounding: Rounding | None,
    last: int = 0,
    corrections: Any = None,
    **constants: Any,
) -> None:
    """Do what `adam_rows` says; where `last` isn't 0 it is written behind v, an int32.

    Examples
    --------
    See `cupyrec.ops.catch_up_adam`.
    """
    xp = check_rows(where, memory, rows, g, rounding, parts=2, words=int(last > 0))
    c = _constants(**constants, corrections=corrections)
    if xp is not np:
        c = (*c, corrections, scale_pointer(xp, scale))
        update_rows(xp, _rows, memory, rows, g, rounding, last, *c)
    elif not np.isnan(scale := scale_value(scale)):
        c = (*c, np.float32(scale))
        update_rows_cpu(_update_rows, memory, rows, g, rounding, last, c)
