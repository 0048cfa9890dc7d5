"""Sum of the gradient rows of each unique key. N rows, U unique keys, D width.

    out[u] = sum over i in positions[offsets[u] : offsets[u + 1]] of x[i]

or of weights[i] * x[index[i]], where values share rows of x. The CPU adds up in that order, devices
by a tree: chunks of 32 positions, blocks of chunks, all blocks. Of 16 bits, x is widened, and sums
are float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.halves import value_macros
from cupyrec.ops.vector_sums import AHEAD, add_vectors, vector_of
from cupyrec.scratch import stamped

__all__ = ["segment_sum"]

_POSITIONS = 4096  # a block of the CPU loop has the segments that begin in so many
_CHUNK = 32  # rows


@cpu.exact_loop
def _segment_sum_cpu(x, offsets, positions, index, weights, out):
    """One block of segments, with the positions of these."""
    addresses, factors = np.zeros(positions.size + AHEAD, np.uint64), weights
    if weights is not None:
        factors = weights[positions]
    for at in range(positions.size):
        i = positions[at] if index is None else index[positions[at]]
        addresses[at] = x.ctypes.data + 4 * i * x.shape[1]
    for u in range(out.shape[0]):
        first, stop = offsets[u] - offsets[0], offsets[u + 1] - offsets[0]
        sums = vector_of(out, u)
        for d in range(sums.size):
            sums[d] = -np.float32(0)  # to which a vector is added without changing its bits
        add_vectors(addresses, factors, first, stop, sums)


_sum = Kernel(
    "segment_sum.cu", "segment_sum",
    "const value_t* x, const int64_t* offsets, const int64_t* positions, const int64_t* index,"
    " const float* weights, float* heads, uint64_t* arrived, uint64_t stamp, float* out,"
    " int64_t segments, int64_t n",
    lambda N, lanes: Geometry(blocks(N, _CHUNK * 256 // lanes), 256), optional="index weights",
)  # fmt: skip


def _segment_sum_device(
    xp: Any, x: Any, offsets: Any, positions: Any, index: Any, weights: Any, out: Any
) -> None:
    width, n = x.shape[1], len(positions)
    vector = math.gcd(4, width, arrays.address(x) // x.dtype.itemsize, arrays.address(out) // 4)
    lanes = min(32, max(4, 1 << (width // vector - 1).bit_length()))
    macros = {
        "DIM": width, "VECTOR": vector, "LANES": lanes,
        "INDEXED": int(index is not None), "WEIGHTED": int(weights is not None),
        **value_macros(x.dtype),
    }  # fmt: skip
    count = _sum.geometry(N=n, lanes=lanes).grid
    heads, arrived = xp.empty((count, width), np.float32), stamped(xp, count)
    _sum(
        arrays.bits(x), offsets, positions, index, weights, heads, *arrived, out, len(out), n,
        macros=macros, N=n, lanes=lanes,
    )  # fmt: skip


def segment_sum(
    x: Any, offsets: Any, positions: Any, *, index: Any = None, weights: Any = None
) -> Any:
    """Return the sum of each segment, added up in a fixed order.

    Parameters
    ----------
    x : (N, D) array of float32, float16 or bfloat16
    offsets : (U + 1,) array of int64
        Ascending from 0 to P, no segment empty, as `unique_keys` returns them.
    positions : (P,) array of int64
    index : (number of values,) array of int64, optional
        The row of `x` that a position stands for; by default each for its own.
    weights : (number of values,) array of float32, optional
        The factor of each position.

    Returns
    -------
    (U, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, D = 0. Positions are not checked.

    Examples
    --------
    >>> x = np.array([[1.0], [2.0], [4.0]], np.float32)
    >>> segment_sum(x, np.array([0, 2, 3]), np.array([0, 2, 1]))
    array([[5.],
           [2.]], dtype=float32)
    >>> segment_sum(x, np.array([0, 2, 3]), np.array([0, 2, 1]), index=np.array([2, 0, 2]))
    array([[8.],
           [1.]], dtype=float32)
    """
    given = [array for array in (index, weights) if array is not None]
    xp = arrays.namespace("segment_sum", x, offsets, positions, *given)
    _check(x, offsets, positions, index, weights)
    x, offsets, positions = map(xp.ascontiguousarray, (x, offsets, positions))
    index, weights = (a if a is None else xp.ascontiguousarray(a) for a in (index, weights))
    if xp is not np:
        out = xp.empty((len(offsets) - 1, x.shape[1]), np.float32)
        _segment_sum_device(xp, x, offsets, positions, index, weights, out)
        return out
    out, x = arrays.empty((len(offsets) - 1, x.shape[1]), np.float32), x.astype("f4", copy=False)

    starts = np.arange(0, len(positions) + _POSITIONS, _POSITIONS)
    borders = np.searchsorted(offsets[:-1], starts)

    def block(i: int, _: int) -> None:
        u, v = borders[i // _POSITIONS : i // _POSITIONS + 2]
        own = positions[offsets[u] : offsets[v]]
        _segment_sum_cpu(x, offsets[u : v + 1], own, index, weights, out[u:v])

    cpu.parallel(block, len(positions), _POSITIONS)
    return out


def _check(x: Any, offsets: Any, positions: Any, index: Any, weights: Any) -> None:
    errors.dtype("segment_sum", "x", x, np.float32, *arrays.HALVES)
    errors.dtype("segment_sum", "offsets", offsets, np.int64)
    errors.dtype("segment_sum", "positions", positions, np.int64)
    errors.axes("segment_sum", x=(x, "N D"), positions=(positions, "P"), offsets=(offsets, "U"))
    errors.columns("segment_sum", "x", x)
    values = {}
    if index is not None:
        errors.dtype("segment_sum", "index", index, np.int64)
        values["index"] = index, "values"
    if weights is not None:
        errors.dtype("segment_sum", "weights", weights, np.float32)
        values["weights"] = weights, "values"
    (count,) = errors.axes("segment_sum", **values) or (len(x),)
    if len(positions) > count:
        raise ValueError(
            f"segment_sum: 'positions' must be at most {count}, one a value, "
            f"got shape {positions.shape}."
        )
