"""Unique keys of a batch, in the order of their first occurrence. N keys, U unique ones.

    unique[inverse[i]] = key[i]
    positions[offsets[u] : offsets[u + 1]] = the i of unique key u, ascending

A hash table of this batch alone, small enough for the cache, does it: on a device by finding the
first occurrence of each key, numbering those, and sorting (number, i) by the digits of the number.
On the CPU each part of a large batch has its table, in one pass; the unique keys of later parts are
added to those of the first, and all parts sort their positions at once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_key import check_keys, hash_key

__all__ = ["UniqueKeys", "unique_keys"]

_EMPTY = 2**31 - 1
_TILE = 2048  # keys that a block sorts
_PART = 1 << 17  # keys of a part on the CPU; fewer wouldn't pay for being merged
_HASHES = 512  # keys hashed at a time
_1, _ONE = np.uint64(1), np.uint32(1)


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
def _add_cpu(tables, ids, weights, slots, unique_tables, unique_ids, counts, unique, numbers):
    """Number keys from 1 on, `unique` of which are there already; return how many there are now."""
    before, mask, hashes = unique, np.uint64(slots.size - 1), np.empty(_HASHES, np.uint64)
    for first in range(0, ids.size, _HASHES):
        stop = min(first + _HASHES, ids.size)
        for i in range(first, stop):  # apart, so that more look-ups are under way at a time
            hashes[i - first] = hash_key(tables[i], ids[i])
        for i in range(first, stop):
            at = hashes[i - first] & mask
            while True:
                u = slots[at]
                if u == 0:
                    unique += _ONE
                    u = unique
                    slots[at] = u
                    unique_tables[u] = tables[i]
                    unique_ids[u] = ids[i]
                    break
                if unique_ids[u] == ids[i] and unique_tables[u] == tables[i]:
                    break
                at = (at + _1) & mask
            numbers[i] = u
    counts[before + _ONE : unique + _ONE] = 0
    for i in range(ids.size):
        counts[numbers[i]] += weights[i]
    return unique


@cpu.exact_loop
def _begin_cpu(numbers, counts, ends, begins):
    """Where each key of a part begins among `positions`; its occurrences move on the ends."""
    for v in range(numbers.size):
        begins[v] = ends[numbers[v] - _ONE]
        ends[numbers[v] - _ONE] += counts[v]


@cpu.exact_loop
def _place_cpu(first, numbers, merged, begins, inverse, positions):
    """Write one part of the results: a counting sort."""
    for i in range(numbers.size):
        v = numbers[i] - _ONE
        inverse[i] = merged[v] - _ONE
        positions[begins[v]] = first + i
        begins[v] += 1


class _Found:
    """Unique keys in order of first occurrence, their counts, and a hash table of them.

    Keys are numbered from 1: a slot of 0 is empty, as is place 0 of the arrays.
    """

    def __init__(self, room: int) -> None:
        self.slots = arrays.empty(1 << (2 * room).bit_length(), np.uint32)
        self.slots.fill(0)
        dtypes = np.uint32, np.int64, np.uint32
        self._all = [arrays.empty(room + 1, dtype) for dtype in dtypes]
        self.unique = 0

    def add(self, tables: Any, ids: Any, weights: Any) -> np.ndarray:
        """Return the number of each key, which occurs `weights` times."""
        numbers = arrays.empty(len(ids), np.uint32)
        unique = np.uint32(self.unique)
        self.unique = int(_add_cpu(tables, ids, weights, self.slots, *self._all, unique, numbers))
        return numbers

    @property
    def keys(self) -> list[np.ndarray]:
        """Tables, ids and counts."""
        return [array[1 : self.unique + 1] for array in self._all]


def _on_cpu(tables: Any, ids: Any, n: int) -> UniqueKeys:
    size = blocks(n, min(8, blocks(n, _PART)))
    parts, numbers = [None] * blocks(n, size), [None] * blocks(n, size)
    once = np.broadcast_to(np.uint32(1), n)

    def find(i: int, j: int) -> None:
        part = _Found(n if i == 0 else j - i)  # the others will be added to the first
        numbers[i // size] = part.add(tables[i:j], ids[i:j], once[i:j])
        parts[i // size] = part

    cpu.parallel(find, n, size)
    found = parts[0]
    counts = [found.keys[2].copy(), *(part.keys[2] for part in parts[1:])]
    merged = [np.arange(1, found.unique + 1, dtype=np.uint32)]
    merged += [found.add(*part.keys) for part in parts[1:]]
    unique_tables, unique_ids, totals = found.keys
    offsets = arrays.empty(len(totals) + 1, np.int64)
    offsets[0] = 0
    np.cumsum(totals, out=offsets[1:])
    ends, begins = offsets[:-1].copy(), [arrays.empty(len(m), np.int64) for m in merged]
    for part in zip(merged, counts, begins, strict=True):
        _begin_cpu(part[0], part[1], ends, part[2])
    inverse, positions = arrays.empty(n, np.int64), arrays.empty(n, np.int64)

    def place(i: int, j: int) -> None:
        part = i // size
        _place_cpu(i, numbers[part], merged[part], begins[part], inverse[i:j], positions)

    cpu.parallel(place, n, size)
    return UniqueKeys(unique_tables, unique_ids, inverse, offsets, positions)


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
        return UniqueKeys(xp.empty(0, np.uint32), none, none, xp.zeros(1, np.int64), none)
    if xp is not np:
        return _on_device(xp, xp.ascontiguousarray(tables), xp.ascontiguousarray(ids), n)
    return _on_cpu(tables, ids, n)


def _on_device(xp: ModuleType, tables: Any, ids: Any, n: int) -> UniqueKeys:
    unique_tables, unique_ids = xp.empty(n, np.uint32), xp.empty(n, np.int64)
    inverse, positions = xp.empty(n, np.int64), xp.empty(n, np.int64)
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
