"""A digest of embedding rows that does not depend on their order: N rows of W 32-bit words.

    h = lane + W, then h = mix(h ^ x) for x = id, table and the words in pairs
    digest[lane] = sum of h over all rows, mod 2^64

`mix` is MurmurHash3's 64-bit finalizer. Since rows are added, the digest of a store is the sum of
the digests of its blocks, in whatever order they come; a row that is there twice counts twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.ops.hash_key import check_keys

__all__ = ["row_digest"]

_ROWS = 512  # a block
_32, _33 = np.uint64(32), np.uint64(33)
_LANES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


@cpu.exact_loop
def _mix(h):
    h = (h ^ (h >> _33)) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> _33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> _33)


@cpu.exact_loop
def _digest(tables, ids, words, sums):
    width = words.shape[1]
    first, second = _LANES[0] + np.uint64(width), _LANES[1] + np.uint64(width)
    for i in range(ids.size):
        a, b = _mix(first ^ np.uint64(ids[i])), _mix(second ^ np.uint64(ids[i]))
        a, b = _mix(a ^ np.uint64(tables[i])), _mix(b ^ np.uint64(tables[i]))
        for j in range(0, width, 2):
            x = np.uint64(words[i, j])
            if j + 1 < width:
                x |= np.uint64(words[i, j + 1]) << _32
            a, b = _mix(a ^ x), _mix(b ^ x)
        sums[0] += a
        sums[1] += b


def row_digest(tables: Any, ids: Any, values: Any) -> np.ndarray:
    """Return a digest of rows and their keys, the same in whatever order they come.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    values : (N, W) array of uint32 or float32
        Floats count by their bits: -0.0 is not 0.0, and a NaN is what it is.

    Returns
    -------
    (2,) array of uint64
        Digests of parts add up to that of the whole.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, arrays that are not on the host.

    Examples
    --------
    >>> tables, ids = np.zeros(2, np.uint32), np.array([7, -7])
    >>> values = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    >>> whole = row_digest(tables, ids, values)
    >>> (whole == row_digest(tables, ids[::-1], values[::-1])).all()
    np.True_
    >>> (whole == sum(row_digest(tables[:1], ids[i], values[i]) for i in ([0], [1]))).all()
    np.True_
    """
    if arrays.namespace("row_digest", tables, ids, values) is not np:
        raise TypeError(f"row_digest: arrays must be on the host, got {type(values).__name__}.")
    check_keys("row_digest", tables, ids)
    errors.dtype("row_digest", "values", values, np.uint32, np.float32)
    errors.axes("row_digest", ids=(ids, "N"), values=(values, "N W"))
    tables, ids, words = map(np.ascontiguousarray, (tables, ids, values.view(np.uint32)))
    sums = np.zeros((-(-len(ids) // _ROWS), 2), np.uint64)
    cpu.parallel(
        lambda i, j: _digest(tables[i:j], ids[i:j], words[i:j], sums[i // _ROWS]), len(ids), _ROWS
    )
    return sums.sum(axis=0)
