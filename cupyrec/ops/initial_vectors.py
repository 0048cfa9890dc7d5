"""Initial vectors of embedding rows, a function of (seed, table, id, column) alone.

    words = philox4x32(counter = (id low, id high, table, column // 4), key = seed)
    u = (words[column % 4] >> 8) * 2^-24                    in [0, 1), exact
    x = low + u * (high - low)                              each operation rounded once

So a row has the same first vector, bit for bit, on every rank, tier and device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.hash_table import check_keys
from cupyrec.random import philox4x32

__all__ = ["uniform_vectors"]

_ROWS = 512  # rows a block
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@cpu.exact_loop
def _uniform_cpu(tables, ids, seed, low, span, out):
    width = out.shape[1]
    for i in range(ids.size):
        key = np.uint64(ids[i])
        for n in range(0, width, 4):
            words = philox4x32(
                key & _LOW, key >> _32, np.uint64(tables[i]), np.uint64(n // 4),
                seed & _LOW, seed >> _32,
            )  # fmt: skip
            for m in range(min(4, width - n)):
                u = np.float32(words[m] >> np.uint64(8)) * np.float32(2.0**-24)
                out[i, n + m] = low + u * span


_uniform = Kernel(
    "initial_vectors.cu", "uniform_vectors",
    "const uint32_t* tables, const int64_t* ids, uint64_t seed, float low, float span, float* x,"
    " int64_t n",
    lambda N, D: Geometry(blocks(N * blocks(D, 4), 256), 256),
)  # fmt: skip


def uniform_vectors(tables: Any, ids: Any, width: int, seed: int, low: float, high: float) -> Any:
    """Return a vector for each key, uniform from `low` to `high`.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    width : int
        D, the length of a vector.
    seed : int
        0 <= seed < 2**64.
    low, high : float

    Returns
    -------
    (N, D) array of float32 on the device of the keys

    Raises
    ------
    ValueError, TypeError
        Keys of another shape or dtype.

    Examples
    --------
    >>> uniform_vectors(np.array([0], np.uint32), np.array([-1]), 2, seed=1, low=0, high=1).shape
    (1, 2)
    """
    n = check_keys("uniform_vectors", tables, ids)
    xp = arrays.namespace("uniform_vectors", tables, ids)
    out = xp.empty((n, errors.positive("uniform_vectors", "width", width)), np.float32)
    low, high = np.float32(low), np.float32(high)
    if xp is not np:
        tables, ids = xp.ascontiguousarray(tables), xp.ascontiguousarray(ids)
        macros = {"DIM": width, "VECTOR": vector_width(width, out)}
        _uniform(tables, ids, seed, low, high - low, out, n, macros=macros, N=n, D=width)
        return out

    def block(i: int, j: int) -> None:
        _uniform_cpu(tables[i:j], ids[i:j], np.uint64(seed), low, high - low, out[i:j])

    cpu.parallel(block, n, _ROWS)
    return out
