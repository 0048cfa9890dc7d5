"""Unique keys of a batch, in the order of their first occurrence. N keys, U unique ones.

    unique[inverse[i]] = key[i]
    positions[offsets[u] : offsets[u + 1]] = the i of unique key u, ascending

A hash table of this batch alone, small enough for the cache, does it: on a device by finding the
first occurrence of each key and numbering those. On the CPU each thread has the table of one part
of a large batch, in one pass; the unique keys of later parts are then added to those of the first.

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

from cupyrec import arrays, cpu
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_key import check_keys, hash_key

__all__ = ["UniqueKeys", "unique_keys"]

_EMPTY = 2**31 - 1
_TILE = 2048  # keys that a block sorts
_PART = 1 << 16  # keys of a part on the CPU; fewer wouldn't pay for being merged
_PARTS = 8
_GROUP = 128  # keys that go through one pass after the other
_LEAST = 512  # slots: those left when they are too full take a group
_0, _1, _2, _32, _LOW_32 = map(np.uint64, (0, 1, 2, 32, 2**32 - 1))


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


# A slot of the CPU is two words: the hash of a key, and its table << 32 | (its number + 1), or 0
# where it is empty. Within a table `hash_key` maps no two ids to one hash: no key need be read.
# Indices are unsigned, which saves the check for those below 0: half of the time.


@cpu.exact_loop
def _number_cpu(first, tables, ids, slots, unique, unique_tables, unique_ids, numbers):
    """Number keys from `first` on, `unique` of which are there already, until slots are too full.

    Return at which key that was, and how many unique ones there are now.
    """
    hashes, missed = np.empty(_GROUP, np.uint64), np.empty(_GROUP, np.uint64)
    last, unique = np.uint64(slots.size - 2), np.uint64(unique)
    for start in range(first, ids.size, _GROUP):
        if 16 * unique > 5 * slots.size:
            return start, unique
        begin, count = np.uint64(start), np.uint64(min(_GROUP, ids.size - start))
        for i in range(count):
            hashes[i] = hash_key(tables[begin + i], ids[begin + i])
        misses = _0
        for i in range(count):  # no branches: what comes next never waits for a wrong guess
            at, table = hashes[i] << _1 & last, np.uint64(tables[begin + i])
            numbers[begin + i] = (slots[at + _1] & _LOW_32) - _1
            missed[misses] = i
            misses += np.uint64((slots[at] ^ hashes[i] | slots[at + _1] >> _32 ^ table) != _0)
        for j in range(misses):
            i = missed[j]
            at, table = hashes[i] << _1 & last, np.uint64(tables[begin + i])
            while slots[at + _1] != _0 and (
                slots[at] != hashes[i] or slots[at + _1] >> _32 != table
            ):
                at = at + _2 & last
            if slots[at + _1] == _0:
                unique_tables[unique], unique_ids[unique] = tables[begin + i], ids[begin + i]
                unique += _1
                slots[at], slots[at + _1] = hashes[i], table << _32 | unique
            numbers[begin + i] = (slots[at + _1] & _LOW_32) - _1
    return ids.size, unique


@cpu.exact_loop
def _refill_cpu(tables, ids, slots):
    """Fill empty slots with unique keys."""
    last = np.uint64(slots.size - 2)
    for u in range(np.uint64(ids.size)):
        h = hash_key(tables[u], ids[u])
        at = h << _1 & last
        while slots[at + _1] != _0:
            at = at + _2 & last
        slots[at], slots[at + _1] = h, np.uint64(tables[u]) << _32 | (u + _1)


@cpu.exact_loop
def _renumber_cpu(merged, inverse):
    for i in range(inverse.size):
        inverse[i] = merged[inverse[i]]


class _Found:
    """Unique keys of a part, at most `room` in order of first occurrence, and their hash table."""

    def __init__(self, room: int) -> None:
        self._room = arrays.empty(room, np.uint32), arrays.empty(room, np.int64)
        self._unique = 0
        self._reserve(1 << (max(_LEAST, room) - 1).bit_length())

    @property
    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Tables and ids."""
        tables, ids = self._room
        return tables[: self._unique], ids[: self._unique]

    def add(self, tables: Any, ids: Any, numbers: np.ndarray) -> None:
        """Write the number of each key to `numbers`."""
        done = 0
        while True:
            done, self._unique = _number_cpu(
                done, tables, ids, self._slots, self._unique, *self._room, numbers
            )
            if done == ids.size:
                return
            self._reserve(self._slots.size)

    def _reserve(self, slots: int) -> None:
        self._slots = arrays.empty(2 * slots, np.uint64)
        self._slots.fill(0)
        _refill_cpu(*self.keys, self._slots)


def _part_size(n: int) -> int:
    """Even, so that two threads can share a part."""
    parts = min(_PARTS, cpu.num_threads(), blocks(n, _PART))  # results don't depend on it
    return 2 * blocks(n, 2 * parts)


def _on_cpu(tables: Any, ids: Any, n: int) -> UniqueKeys:
    size = _part_size(n)
    parts, inverse = [None] * blocks(n, size), arrays.empty(n, np.int64)

    def find(i: int, j: int) -> None:
        part = _Found(n if i == 0 else j - i)  # the others will be added to the first
        part.add(tables[i:j], ids[i:j], inverse[i:j])
        parts[i // size] = part

    cpu.parallel(find, n, size)
    found, merged = parts[0], []
    for part in parts[1:]:
        merged.append(arrays.empty(part.keys[0].size, np.int64))
        found.add(*part.keys, merged[-1])

    def renumber(i: int, j: int) -> None:
        _renumber_cpu(merged[i // size], inverse[size + i : size + j])

    cpu.parallel(renumber, n - size, size // 2)
    tables, ids = found.keys
    return UniqueKeys(tables, ids, inverse, lambda: _sort_on_cpu(inverse, ids.size))


@cpu.exact_loop
def _count_cpu(inverse, counts):
    counts[:] = 0
    for u in inverse:
        counts[u] += 1


@cpu.exact_loop
def _begin_cpu(counts, offsets):
    """Turn how often each part has a key into where its occurrences begin."""
    at = 0
    for u in range(counts.shape[1]):
        offsets[u] = at
        for part in range(counts.shape[0]):
            count = counts[part, u]
            counts[part, u] = at
            at += count
    offsets[-1] = at


@cpu.exact_loop
def _place_cpu(first, inverse, begins, positions):
    for i in range(inverse.size):
        u = inverse[i]
        positions[begins[u]] = first + i
        begins[u] += 1


def _sort_on_cpu(inverse: Any, unique: int) -> tuple[Any, Any]:
    n = inverse.size
    size = _part_size(n)
    counts = arrays.empty((blocks(n, size), unique), np.int64)
    offsets, positions = arrays.empty(unique + 1, np.int64), arrays.empty(n, np.int64)

    def count(i: int, j: int) -> None:
        _count_cpu(inverse[i:j], counts[i // size])

    def place(i: int, j: int) -> None:
        _place_cpu(i, inverse[i:j], counts[i // size], positions)

    cpu.parallel(count, n, size)
    _begin_cpu(counts, offsets)
    cpu.parallel(place, n, size)
    return offsets, positions


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
    return _on_cpu(tables, ids, n)


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
