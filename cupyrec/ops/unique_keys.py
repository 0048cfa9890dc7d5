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
from cupyrec.scratch import stamped

__all__ = ["UniqueKeys", "unique_keys"]

_TILE = 2048  # keys that a block numbers or sorts


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


def _per_tile(n: int) -> Geometry:
    return Geometry(blocks(n, _TILE), 256)


_claim = Kernel(
    "unique_keys.cu", "unique_claim",
    "const uint32_t* tables, const int64_t* ids, uint64_t* slots, uint64_t stamp, uint32_t mask,"
    " uint32_t* places, uint64_t* cleared, int64_t words, int64_t n",
    lambda n: Geometry(blocks(n, 256), 256),
)  # fmt: skip
_number = Kernel(
    "unique_keys.cu", "unique_number",
    "const uint32_t* tables, const int64_t* ids, const uint32_t* places, const uint64_t* slots,"
    " uint64_t* status, uint64_t stamp, uint64_t* marks, uint32_t* unique_tables,"
    " int64_t* unique_ids, int64_t* inverse, uint32_t* numbers, int* bins, int64_t* total,"
    " int64_t n",
    _per_tile,
)  # fmt: skip
_sort = Kernel(
    "unique_keys.cu", "unique_sort",
    "const uint32_t* numbers, const uint64_t* pairs, const int* bins, int* next_bins,"
    " uint64_t* status, uint64_t stamp, uint64_t* sorted, int64_t* positions, int64_t* offsets,"
    " int shift, int64_t n",
    _per_tile, optional="numbers pairs next_bins sorted positions offsets",
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
    inverse, total = xp.empty(n, np.int64), xp.empty(1, np.int64)
    places, numbers = xp.empty(n, np.uint32), xp.empty(n, np.uint32)
    slots, words, width = 1 << (2 * n).bit_length(), blocks(n, 32), _width(n)
    shared, stamp = stamped(xp, slots + blocks(n, _TILE) + 1)
    cleared = xp.empty(words + (_passes(n, width) << width) // 2, np.uint64)
    marks, bins = cleared[:words], cleared[words:].view(np.int32).reshape(-1, 1 << width)
    _claim(tables, ids, shared, stamp, slots - 1, places, cleared, cleared.size, n, n=n)
    _number(
        tables, ids, places, shared, shared[slots:], stamp, marks, unique_tables, unique_ids,
        inverse, numbers, bins, total, n, macros={"BITS": width}, n=n,
    )  # fmt: skip
    u = int(total.item())  # last, so that the host waits when all is under way
    return UniqueKeys(
        unique_tables[:u], unique_ids[:u], inverse, lambda: _segments_of(xp, numbers, bins, u)
    )


def _width(n: int) -> int:
    """Bits of a digit of the numbers that n keys may have: few passes, small tables."""
    bits = (n - 1).bit_length()
    return 8 if bits > 16 else max(5, blocks(bits, _passes(n, 8)))


def _passes(u: int, width: int) -> int:
    """Passes of a sort by digits of u numbers."""
    return max(1, blocks((u - 1).bit_length(), width))


def _segments_of(xp: ModuleType, numbers: Any, bins: Any, u: int) -> tuple[Any, Any]:
    """Offsets and positions; `bins` has the counts of the first digit, and zeros."""
    n, width = len(numbers), bins.shape[1].bit_length() - 1
    offsets, positions = xp.empty(u + 1, np.int64), xp.empty(n, np.int64)
    passes, pairs = _passes(u, width), None
    for i in range(passes):
        if i < passes - 1:
            to, next_bins = (xp.empty(n, np.uint64), None, None), bins[i + 1]
        else:
            to, next_bins = (None, positions, offsets), None
        _sort(
            None if i else numbers, pairs, bins[i], next_bins,
            *stamped(xp, (blocks(n, _TILE) << width) + 1), *to, i * width, n,
            macros={"BITS": width}, n=n,
        )  # fmt: skip
        pairs = to[0]
    return offsets, positions
