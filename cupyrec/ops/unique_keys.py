"""Unique keys of a batch, in the order of their first occurrence. N keys, U unique ones.

    unique[inverse[i]] = key[i]
    positions[offsets[u] : offsets[u + 1]] = the i of unique key u, ascending

A hash table of this batch alone, small enough for the cache, does it in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyrec import arrays, cpu
from cupyrec.ops.hash_table import check_keys, hash_key

__all__ = ["UniqueKeys", "unique_keys"]


class UniqueKeys(NamedTuple):
    """Result of `unique_keys`.

    Attributes
    ----------
    tables : (U,) array of uint32
    ids : (U,) array of int64
    inverse : (N,) array of int64
    offsets : (U + 1,) array of int64
    positions : (N,) array of int64

    Examples
    --------
    See `unique_keys`.
    """

    tables: np.ndarray
    ids: np.ndarray
    inverse: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray


@cpu.exact_loop
def _unique_cpu(tables, ids, slots, unique_tables, unique_ids, inverse, offsets):
    """Fill all but `positions`; offsets[u + 1] counts key u. Return U."""
    mask = np.uint64(slots.size - 1)
    unique = 0
    for i in range(ids.size):
        at = hash_key(tables[i], ids[i]) & mask
        while True:
            u = slots[at]
            if u < 0:
                u = unique
                slots[at] = u
                unique_tables[u] = tables[i]
                unique_ids[u] = ids[i]
                unique += 1
                break
            if unique_ids[u] == ids[i] and unique_tables[u] == tables[i]:
                break
            at = (at + np.uint64(1)) & mask
        inverse[i] = u
        offsets[u + 1] += 1
    return unique


@cpu.exact_loop
def _positions_cpu(inverse, offsets, positions):
    """Turn counts into offsets, and sort positions by unique key: a counting sort."""
    for u in range(offsets.size - 1):
        offsets[u + 1] += offsets[u]
    ends = offsets[:-1].copy()
    for i in range(inverse.size):
        u = inverse[i]
        positions[ends[u]] = i
        ends[u] += 1


def unique_keys(tables: np.ndarray, ids: np.ndarray) -> UniqueKeys:
    """Return the unique keys in order of first occurrence, and where each occurs.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64

    Returns
    -------
    UniqueKeys

    Raises
    ------
    ValueError, TypeError
        Keys of another shape or dtype.

    Examples
    --------
    >>> keys = unique_keys(np.zeros(4, np.uint32), np.array([7, -1, 7, 7]))
    >>> keys.ids, keys.inverse, keys.offsets, keys.positions
    (array([ 7, -1]), array([0, 1, 0, 0]), array([0, 3, 4]), array([0, 2, 3, 1]))
    """
    n = check_keys("unique_keys", tables, ids)
    slots = arrays.empty(1 << (2 * n).bit_length(), np.int32 if n < 2**31 else np.int64)
    slots.fill(-1)
    unique_tables, unique_ids = arrays.empty(n, np.uint32), arrays.empty(n, np.int64)
    inverse, positions = arrays.empty(n, np.int64), arrays.empty(n, np.int64)
    offsets = arrays.empty(n + 1, np.int64)
    offsets.fill(0)
    u = _unique_cpu(tables, ids, slots, unique_tables, unique_ids, inverse, offsets)
    offsets = offsets[: u + 1]
    _positions_cpu(inverse, offsets, positions)
    return UniqueKeys(unique_tables[:u], unique_ids[:u], inverse, offsets, positions)
