"""Sum of the gradient rows of each unique key. N rows, U unique keys, D width.

out[u] = sum over i in positions[offsets[u] : offsets[u + 1]] of x[i]

The CPU adds up in that order, devices by a tree over chunks of 32 positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["segment_sum"]

_SEGMENTS = 256  # segments a block of the CPU loop
_CHUNK = 32  # rows


@cpu.exact_loop
def _segment_sum_cpu(x, offsets, positions, out):
    """One block of segments."""
    width = out.shape[1]
    for u in range(out.shape[0]):
        first = positions[offsets[u]]
        for d in range(width):
            out[u, d] = x[first, d]
        for at in range(offsets[u] + 1, offsets[u + 1]):
            i = positions[at]
            for d in range(width):
                out[u, d] += x[i, d]


_sum = Kernel(
    "segment_sum.cu", "segment_sum",
    "const float* x, const int64_t* offsets, const int64_t* positions, float* heads,"
    " int64_t* owners, float* out, int64_t segments, int64_t n",
    lambda N, lanes: Geometry(blocks(N, _CHUNK * 256 // lanes), 256),
)  # fmt: skip
_combine = Kernel(
    "segment_sum.cu",
    "combine_heads",
    "const float* x, const int64_t* segments, float* heads, int64_t* owners, float* out, int64_t n",
    lambda N, lanes: Geometry(blocks(N, _CHUNK * 32 // lanes), 32),
)


def _segment_sum_device(xp: Any, x: Any, offsets: Any, positions: Any, out: Any) -> None:
    rows, width = x.shape
    vector = vector_width(width, x, out)
    lanes = min(32, max(4, 1 << (width // vector - 1).bit_length()))
    macros = {"DIM": width, "VECTOR": vector, "LANES": lanes}
    launch, below = _sum, (x, offsets, positions)
    sizes: tuple[int, ...] = (len(out), rows)
    while True:
        chunks = blocks(rows, _CHUNK)
        heads, owners = xp.empty((chunks, width), x.dtype), xp.empty(chunks, np.int64)
        launch(*below, heads, owners, out, *sizes, macros=macros, N=rows, lanes=lanes)
        if chunks <= 1:
            return
        rows, launch, below, sizes = chunks, _combine, (heads, owners), (chunks,)


def segment_sum(x: Any, offsets: Any, positions: Any) -> Any:
    """Return the sum of each segment, added up in a fixed order.

    Parameters
    ----------
    x : (N, D) array of float32
    offsets : (U + 1,) array of int64
        Ascending from 0 to N, no segment empty, as `unique_keys` returns them.
    positions : (N,) array of int64

    Returns
    -------
    (U, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, D = 0.

    Examples
    --------
    >>> x = np.array([[1.0], [2.0], [4.0]], np.float32)
    >>> segment_sum(x, np.array([0, 2, 3]), np.array([0, 2, 1]))
    array([[5.],
           [2.]], dtype=float32)
    """
    xp = arrays.namespace("segment_sum", x, offsets, positions)
    errors.dtype("segment_sum", "x", x, np.float32)
    errors.dtype("segment_sum", "offsets", offsets, np.int64)
    errors.dtype("segment_sum", "positions", positions, np.int64)
    errors.axes("segment_sum", x=(x, "N D"), positions=(positions, "N"), offsets=(offsets, "U"))
    errors.columns("segment_sum", "x", x)
    x = xp.ascontiguousarray(x)
    if xp is not np:
        out = xp.empty((len(offsets) - 1, x.shape[1]), x.dtype)
        offsets, positions = xp.ascontiguousarray(offsets), xp.ascontiguousarray(positions)
        _segment_sum_device(xp, x, offsets, positions, out)
        return out
    out = arrays.empty((len(offsets) - 1, x.shape[1]), x.dtype)

    def block(i: int, j: int) -> None:
        _segment_sum_cpu(x, offsets[i : j + 1], positions, out[i:j])

    cpu.parallel(block, len(out), _SEGMENTS)
    return out
