"""Unique keys of a batch, in the order of their first occurrence. N keys, U unique ones.

    unique[inverse[i]] = key[i]
    positions[offsets[u] : offsets[u + 1]] = the i of unique key u, ascending

A hash table of this batch alone, small enough for the cache, does it: on the CPU in one pass, on a
device by finding the first occurrence of each key, numbering those, and sorting (number, i) by the
digits of the number.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_table import check_keys, hash_key

__all__ = ["UniqueKeys", "unique_keys"]

_EMPTY = 2**31 - 1
_TILE = 2048  # keys that a block sorts


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

    tables: Any
    ids: Any
    inverse: Any
    offsets: Any
    positions: Any


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


def _per_key(n: int) -> Geometry:
    return Geometry(blocks(n, 256), 256)


def _per_tile(n: int) -> Geometry:
    return Geometry(blocks(n, _TILE), 256)


_claim = Kernel(
    "unique_keys.cu", "unique_claim",
    "const uint32_t* tables, const int64_t* ids, int* slots, uint32_t mask, uint32_t* places,"
    " int64_t n",
    _per_key,
)  # fmt: skip
_first = Kernel(
    "unique_keys.cu", "unique_first",
    "const int* slots, uint32_t* places, uint32_t* marks, int* marked, int64_t n", _per_key,
)  # fmt: skip
_number = Kernel(
    "unique_keys.cu", "unique_number",
    "const uint32_t* tables, const int64_t* ids, const uint32_t* places, const uint32_t* marks,"
    " const int* sums, uint32_t* unique_tables, int64_t* unique_ids, int64_t* inverse,"
    " uint32_t* numbers, int* counts, int64_t n",
    _per_tile,
)  # fmt: skip
_count = Kernel(
    "unique_keys.cu", "unique_count", "const uint64_t* pairs, int* counts, int shift, int64_t n",
    _per_tile,
)  # fmt: skip
_scatter = Kernel(
    "unique_keys.cu", "unique_scatter",
    "const uint32_t* numbers, const uint64_t* pairs, const int* sums, uint64_t* sorted,"
    " int64_t* positions, int64_t* offsets, int shift, int64_t n",
    _per_tile, optional="numbers pairs sorted positions offsets",
)  # fmt: skip


def unique_keys(tables: Any, ids: Any) -> UniqueKeys:
    """Return the unique keys in order of first occurrence, and where each occurs.

    On a device it waits once, for the number of unique keys.

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
        Keys of another shape or dtype, on several devices, or 2^31 and more on one that is not
        the CPU.

    Examples
    --------
    >>> keys = unique_keys(np.zeros(4, np.uint32), np.array([7, -1, 7, 7]))
    >>> keys.ids, keys.inverse, keys.offsets, keys.positions
    (array([ 7, -1]), array([0, 1, 0, 0]), array([0, 3, 4]), array([0, 2, 3, 1]))
    """
    n = check_keys("unique_keys", tables, ids)
    xp = arrays.namespace("unique_keys", tables, ids)
    if xp is not np:
        return _on_device(xp, xp.ascontiguousarray(tables), xp.ascontiguousarray(ids), n)
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


def _on_device(xp: ModuleType, tables: Any, ids: Any, n: int) -> UniqueKeys:
    if n >= 2**31:
        raise ValueError(f"unique_keys: N must be less than 2**31 on a device, got {n}.")
    unique_tables, unique_ids = xp.empty(n, np.uint32), xp.empty(n, np.int64)
    inverse, positions = xp.empty(n, np.int64), xp.empty(n, np.int64)
    if n == 0:
        return UniqueKeys(unique_tables, unique_ids, inverse, xp.zeros(1, np.int64), positions)
    slots = xp.full(1 << (2 * n).bit_length(), _EMPTY, np.int32)
    places, words = xp.empty(n, np.uint32), blocks(n, 32)
    marks, marked = xp.empty(words, np.uint32), xp.empty(words, np.int32)
    _claim(tables, ids, slots, slots.size - 1, places, n, n=n)
    _first(slots, places, marks, marked, n, n=n)
    sums = xp.cumsum(marked, dtype=np.int32)
    _, width = _digits(n)
    numbers, counts = xp.empty(n, np.uint32), xp.empty(blocks(n, _TILE) << width, np.int32)
    _number(
        tables, ids, places, marks, sums, unique_tables, unique_ids, inverse, numbers, counts, n,
        macros={"BITS": width}, n=n,
    )  # fmt: skip
    offsets = xp.empty(n + 1, np.int64)
    _sort(xp, numbers, counts, offsets, positions)
    u = int(sums[-1:].item())  # last, so that the host waits when all is under way
    return UniqueKeys(unique_tables[:u], unique_ids[:u], inverse, offsets[: u + 1], positions)


def _digits(n: int) -> tuple[int, int]:
    """Bits of the largest u that n keys can have, and those of a digit: few passes, small tables.

    U itself is on the device.
    """
    bits = max(1, (n - 1).bit_length())
    return bits, max(5, blocks(bits, blocks(bits, 8)))


def _sort(xp: ModuleType, numbers: Any, counts: Any, offsets: Any, positions: Any) -> None:
    """Fill `positions` and `offsets`; `counts` are those of the first digit."""
    n = len(numbers)
    bits, width = _digits(n)
    macros, pairs = {"BITS": width}, None
    for shift in range(0, bits, width):
        if shift:
            _count(pairs, counts, shift, n, macros=macros, n=n)
        sums = xp.cumsum(counts, dtype=np.int32)
        if shift + width < bits:
            to = xp.empty(n, np.uint64), None, None
        else:
            to = None, positions, offsets
        _scatter(None if shift else numbers, pairs, sums, *to, shift, n, macros=macros, n=n)
        pairs = to[0]
