"""Row-wise Adagrad on embedding rows: one sum of squares a row (U rows, D width).

    g = scale * g                               scale: the clipping factor
    s += mean over the row of g^2
    w -= lr * weight_decay * w                  decoupled
    w -= lr / (sqrt(s) + eps) * g

FBGEMM's and TorchRec's EXACT_ROWWISE_ADAGRAD. A row is [w (D), s (1)].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import cpu
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

__all__ = ["rowwise_adagrad_rows"]


@cpu.loop
def _mean_square(g, scale):
    total = np.float32(0)
    for d in range(g.size):
        x = g[d] * scale
        total += x * x
    return total / np.float32(g.size)


@cpu.exact_loop
def _update_rows(memory, addresses, g, scratch, rounding, lr, eps, decay, scale):
    width = g.shape[1]
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, s = read_vector(memory, words, width, scratch), state_at(memory, words, width)
        x = vector_of(g, u)
        s[0] += _mean_square(x, scale)
        rate = lr / (np.sqrt(s[0]) + eps)
        for d in range(width):
            w[d] -= decay * w[d] + rate * (x[d] * scale)
        write_vector(memory, words, w, rounding, u)


def _lanes(D: int, vector: int) -> int:
    """Threads that share a row: enough for its pieces, at most a warp."""
    return min(32, 1 << (D // vector - 1).bit_length())


_rows = row_kernel(
    "rowwise_adagrad.cu", "rowwise_adagrad_rows", "float lr, float eps, float decay", _lanes
)


def rowwise_adagrad_rows(
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
    >>> chunk = np.array([[1, 2, 0, 0]], np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> g = np.array([[1.0, 7.0]], np.float32)
    >>> rowwise_adagrad_rows(memory, np.array([0]), g, lr=0.25, eps=0.0)
    >>> chunk
    array([[ 0.95,  1.65, 25.  ,  0.  ]], dtype=float32)
    """
    xp = check_rows("rowwise_adagrad_rows", memory, rows, g, rounding, words=1)
    c = tuple(np.float32(x) for x in (lr, eps, lr * weight_decay))
    if xp is not np:
        update_rows(xp, _rows, memory, rows, g, rounding, *c, scale_pointer(xp, scale))
    elif not np.isnan(scale := scale_value(scale)):
        update_rows_cpu(_update_rows, memory, rows, g, rounding, *c, np.float32(scale))
