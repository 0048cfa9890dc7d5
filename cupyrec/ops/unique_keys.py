"""Unique keys of a batch, in the order of their first occurrence. N keys, U unique ones.

    unique[inverse[i]] = key[i]
    positions[offsets[u] : offsets[u + 1]] = the i of unique key u, ascending

A hash table of this batch alone, small enough for the cache, does it: on a device by finding the
first occurrence of each key and numbering those, on the CPU part by part in one pass: see
`cupyrec.ops.unique_parts`.

Not all who look keys up ask where they occur, so they are sorted when somebody does: on a device
(number, i) by the digits of the number, on the CPU by counting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_key import check_keys
from cupyrec.ops.unique_parts import find_unique

__all__ = ["UniqueKeys", "unique_keys"]

_EMPTY = 2**31 - 1
_TILE = 2048  # keys that a block sorts


@dataclass
class UniqueKeys:
    """Result of `unique_keys`.

    Attributes
    ----------
    tables : (U,) array of uint32
    ids : (U,) array of int64
    inverse : (N,) array of int64
    offsets : (U + 1,) array of int64
        Like `positions` it is computed when it is first asked for.
    positions : (N,) array of int64

    Examples
    --------
    See `unique_keys`.
    """

    tables: Any
    ids: Any
    inverse: Any
    sort: Callable[[], tuple[Any, Any]]  #: Gives offsets and positions.

    offsets = property(lambda self: self._segments[0])
    positions = property(lambda self: self._segments[1])

    @functools.cached_property
    def _segments(self) -> tuple[Any, Any]:
        return self.sort()


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
        Keys of another shape or dtype, on several devices, or 2^31 and more.

    Examples
    --------
    >>> keys = unique_keys(np.zeros(4, np.uint32), np.array([7, -1, 7, 7]))
    >>> keys.ids, keys.inverse, keys.offsets, keys.positions
    (array([ 7, -1]), array([0, 1, 0, 0]), array([0, 3, 4]), array([0, 2, 3, 1]))
    """
    n = check_keys("unique_keys", tables, ids)
    if n >= 2**31:
        raise ValueError(f"unique_keys: N must be less than 2**31, got {n}.")
    xp = arrays.namespace("unique_keys", tables, ids)
    if n == 0:
        none = xp.empty(0, np.int64)
        return UniqueKeys(xp.empty(0, np.uint32), none, none, lambda: (xp.zeros(1, np.int64), none))
    if xp is not np:
        return _on_device(xp, xp.ascontiguousarray(tables), xp.ascontiguousarray(ids), n)
    return UniqueKeys(*find_unique(tables, ids))


def _on_device(xp: ModuleType, tables: Any, ids: Any, n: int) -> UniqueKeys:
    unique_tables, unique_ids = xp.empty(n, np.uint32), xp.empty(n, np.int64)
    inverse = xp.empty(n, np.int64)
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
    u = int(sums[-1:].item())  # last, so that the host waits when all is under way
    return UniqueKeys(
        unique_tables[:u], unique_ids[:u], inverse, lambda: _sort(xp, numbers, counts, u)
    )


def _digits(n: int) -> tuple[int, int]:
    """Bits of the largest u that n keys can have, and those of a digit: few passes, small tables.

    U itself is on the device.
    """
    bits = max(1, (n - 1).bit_length())
    return bits, max(5, blocks(bits, blocks(bits, 8)))


def _sort(xp: ModuleType, numbers: Any, counts: Any, u: int) -> tuple[Any, Any]:
    """Offsets and positions; `counts` are those of the first digit."""
    n = len(numbers)
    offsets, positions = xp.empty(n + 1, np.int64), xp.empty(n, np.int64)
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
    return offsets[: u + 1], positions
