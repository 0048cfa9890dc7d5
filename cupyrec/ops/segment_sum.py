"""Sum of the gradient rows of each unique key. N rows, U unique keys, D width.

out[u] = sum over i in positions[offsets[u] : offsets[u + 1]], in that order, of x[i]
"""

from __future__ import annotations

import numpy as np

from cupyrec import arrays, cpu, errors

__all__ = ["segment_sum"]

_SEGMENTS = 256  # segments a block


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


def segment_sum(x: np.ndarray, offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the sum of each segment, added up in the order of `positions`.

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
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> x = np.array([[1.0], [2.0], [4.0]], np.float32)
    >>> segment_sum(x, np.array([0, 2, 3]), np.array([0, 2, 1]))
    array([[5.],
           [2.]], dtype=float32)
    """
    arrays.namespace("segment_sum", x, offsets, positions)
    errors.dtype("segment_sum", "x", x, np.float32)
    errors.dtype("segment_sum", "offsets", offsets, np.int64)
    errors.dtype("segment_sum", "positions", positions, np.int64)
    errors.axes("segment_sum", x=(x, "N D"), positions=(positions, "N"), offsets=(offsets, "U"))
    x = np.ascontiguousarray(x)
    out = arrays.empty((len(offsets) - 1, x.shape[1]), x.dtype)

    def block(i: int, j: int) -> None:
        _segment_sum_cpu(x, offsets[i : j + 1], positions, out[i:j])

    cpu.parallel(block, len(out), _SEGMENTS)
    return out
