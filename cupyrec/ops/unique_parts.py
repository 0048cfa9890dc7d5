"""Unique keys of a batch on the CPU: see `cupyrec.ops.unique_keys`.

Each part of a batch has a hash table of its own, in one pass. Where keys come table by table parts
end where tables do, so that they have no key in common. Else there are as many parts as threads,
and the unique keys of the later ones are added to those of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyrec import arrays, cpu
from cupyrec.kernel import blocks
from cupyrec.ops.hash_key import hash_key

__all__ = ["find_unique"]

_APART = 1 << 14  # keys of a part that has its tables for itself: its slots fit in the L2 cache
_AT_ONCE = 3  # such parts; fewer would be over before Python has begun the next
_PART = 1 << 16  # keys of other parts; fewer wouldn't pay for being merged
_PARTS = 8
_GROUP = 128  # keys that go through one pass after the other
_LEAST = 512  # slots: those left when they are too full take a group
_0, _1, _2, _31, _LOW_31 = map(np.uint64, (0, 1, 2, 31, 2**31 - 1))

# A slot is two words: the hash of a key, and (2 table + 1) << 31 | its number, or 0 where it is
# empty. Within a table `hash_key` maps no two ids to one hash: no key need be read. Indices are
# unsigned, which saves the check for those below 0: half of the time.


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
            at, table = hashes[i] << _1 & last, np.uint64(tables[begin + i]) << _1 | _1
            numbers[begin + i] = slots[at + _1] & _LOW_31
            missed[misses] = i
            misses += np.uint64((slots[at] ^ hashes[i] | slots[at + _1] >> _31 ^ table) != _0)
        for j in range(misses):
            i = missed[j]
            at, table = hashes[i] << _1 & last, np.uint64(tables[begin + i]) << _1 | _1
            while slots[at + _1] != _0 and (
                slots[at] != hashes[i] or slots[at + _1] >> _31 != table
            ):
                at = at + _2 & last
            if slots[at + _1] == _0:
                unique_tables[unique], unique_ids[unique] = tables[begin + i], ids[begin + i]
                slots[at], slots[at + _1] = hashes[i], table << _31 | unique
                unique += _1
            numbers[begin + i] = slots[at + _1] & _LOW_31
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
        slots[at], slots[at + _1] = h, (np.uint64(tables[u]) << _1 | _1) << _31 | u


@cpu.exact_loop
def _add_cpu(tables, ids, slots, unique, unique_tables, unique_ids, numbers):
    """Number keys, `unique` of which are there already.

    Return slots, larger ones if need be, and how many unique keys there are now.
    """
    done = 0
    while True:
        done, unique = _number_cpu(
            done, tables, ids, slots, np.int64(unique), unique_tables, unique_ids, numbers
        )
        if done == ids.size:
            return slots, np.int64(unique)
        slots = np.zeros(2 * slots.size, np.uint64)
        _refill_cpu(unique_tables[:unique], unique_ids[:unique], slots)


@cpu.exact_loop
def _words_for(keys):
    """Words of the slots that so many keys begin with, since a part of them is unique."""
    size = _LEAST
    while size < keys:
        size *= 2
    return 2 * size


@cpu.exact_loop
def _number_parts_cpu(borders, tables, ids, unique_tables, unique_ids, inverse, counts):
    """Number the keys of each part, and count its unique ones, which are put where it begins."""
    slots = np.empty(0, np.uint64)
    for p in range(counts.size):
        own = slice(borders[p], borders[p + 1])
        words = _words_for(own.stop - own.start)
        if slots.size != words:
            slots = np.empty(words, np.uint64)
        slots[:] = 0  # in the cache, from the last part
        slots, counts[p] = _add_cpu(
            tables[own], ids[own], slots, 0, unique_tables[own], unique_ids[own], inverse[own]
        )


@cpu.exact_loop
def _gather_cpu(borders, ends, tables, ids, unique_tables, unique_ids, inverse):
    """Put the unique keys of some parts side by side, and number them on."""
    for p in range(borders.size - 1):
        at = borders[p] - ends[p]
        for u in range(ends[p], ends[p + 1]):
            unique_tables[u], unique_ids[u] = tables[at + u], ids[at + u]
        inverse[borders[p] : borders[p + 1]] += ends[p]


@cpu.exact_loop
def _descends_cpu(tables):
    descends = False
    for i in range(1, tables.size):  # to the end: without a way out it takes many at a time
        descends |= tables[i] < tables[i - 1]
    return descends


def _borders(tables: Any, least: int) -> Any:
    """Where parts of at least so many keys begin and end, one at least; no table is in two.

    None but that of all if tables don't ascend.
    """
    borders, at = [0], least
    if not _descends_cpu(tables):
        while at < tables.size:
            at = int(np.searchsorted(tables, tables[at - 1], "right"))
            if at < tables.size:
                borders.append(at)
            at += least
    return np.array([*borders, tables.size])


def _room(n: int) -> list[np.ndarray]:
    """For tables and ids."""
    return [arrays.empty(n, np.uint32), arrays.empty(n, np.int64)]


Found = tuple[Any, Any, Any, Callable[[], tuple[Any, Any]]]


def find_unique(tables: Any, ids: Any) -> Found:
    """Return what `UniqueKeys` holds: tables, ids, inverse, and what sorts when it is called.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
        At least one key.

    Examples
    --------
    >>> find_unique(np.zeros(3, np.uint32), np.array([7, -1, 7]))[:3]
    (array([0, 0], dtype=uint32), array([ 7, -1]), array([0, 1, 0]))
    """
    borders = _borders(tables, _APART)
    return _apart(tables, ids, borders) if len(borders) > 2 else _together(tables, ids)


def _apart(tables: Any, ids: Any, borders: Any) -> Found:
    """Unique keys where no two parts have one in common."""
    room, inverse = _room(ids.size), arrays.empty(ids.size, np.int64)
    counts = np.empty(len(borders) - 1, np.int64)

    def number(p: int, q: int) -> None:
        _number_parts_cpu(borders[p : q + 1], tables, ids, *room, inverse, counts[p:q])

    cpu.parallel(number, counts.size, _AT_ONCE)
    ends = np.concatenate([[0], np.cumsum(counts)])
    keys = _room(int(ends[-1]))

    def gather(p: int, q: int) -> None:
        _gather_cpu(borders[p : q + 1], ends[p : q + 1], *room, *keys, inverse)

    cpu.parallel(gather, counts.size, _AT_ONCE)
    return *keys, inverse, lambda: _sort_apart(inverse, borders, ends)


def _together(tables: Any, ids: Any) -> Found:
    """Unique keys where any part may have any."""
    borders, inverse = _equal_parts(ids.size), arrays.empty(ids.size, np.int64)
    parts, merged = [None] * (len(borders) - 1), [None]

    def number(p: int, _: int) -> None:
        i, j = borders[p : p + 2]
        size = j - i if p else ids.size  # others are added to the first
        room = _room(size)
        slots = arrays.empty(_words_for(size // 2), np.uint64)  # so many keys come several times
        slots.fill(0)
        parts[p] = room, *_add_cpu(tables[i:j], ids[i:j], slots, 0, *room, inverse[i:j])

    cpu.parallel(number, len(parts), 1)
    room, slots, unique = parts[0]
    for keys, _, count in parts[1:]:
        merged.append(arrays.empty(count, np.int64))
        keys = (array[:count] for array in keys)
        slots, unique = _add_cpu(*keys, slots, unique, *room, merged[-1])

    def renumber(p: int, _: int) -> None:
        own = slice(*borders[p : p + 2])
        if p:
            inverse[own] = merged[p][inverse[own]]

    cpu.parallel(renumber, len(parts), 1)
    tables, ids = (array[:unique] for array in room)
    return tables, ids, inverse, lambda: _sort_together(inverse, unique)


def _equal_parts(n: int) -> list[int]:
    """Borders of parts of which no key is known; results don't depend on their number."""
    threads = cpu.num_threads()
    parts = min(_PARTS, blocks(n, _PART), threads if threads > 2 else 1)  # a second saves nothing
    return [part * n // parts for part in range(parts + 1)]


@cpu.exact_loop
def _count_cpu(inverse, first, counts):
    """How often each unique key is there, from number `first` on."""
    counts[:] = 0
    for u in inverse:
        counts[u - first] += 1


@cpu.exact_loop
def _begin_cpu(at, counts, offsets):
    """Turn how often each part has a key into where its occurrences begin; return where all end."""
    for u in range(counts.shape[1]):
        offsets[u] = at
        for part in range(counts.shape[0]):
            count = counts[part, u]
            counts[part, u] = at
            at += count
    return at


@cpu.exact_loop
def _place_cpu(at, inverse, first, begins, positions):
    for i in range(inverse.size):
        u = inverse[i] - first
        positions[begins[u]] = at + i
        begins[u] += 1


@cpu.exact_loop
def _sort_parts_cpu(borders, ends, inverse, offsets, positions):
    for p in range(borders.size - 1):
        first, own = ends[p], inverse[borders[p] : borders[p + 1]]
        counts = np.empty((1, ends[p + 1] - first), np.int64)
        _count_cpu(own, first, counts[0])
        _begin_cpu(borders[p], counts, offsets[first:])
        _place_cpu(borders[p], own, first, counts[0], positions)


def _sort_apart(inverse: Any, borders: Any, ends: Any) -> tuple[Any, Any]:
    """Offsets and positions where part p alone has the unique keys ends[p] to ends[p + 1] - 1."""
    offsets, positions = (arrays.empty(int(n), np.int64) for n in (ends[-1] + 1, inverse.size))

    def sort(p: int, q: int) -> None:
        _sort_parts_cpu(borders[p : q + 1], ends[p : q + 1], inverse, offsets, positions)

    cpu.parallel(sort, len(borders) - 1, _AT_ONCE)
    offsets[-1] = inverse.size
    return offsets, positions


def _sort_together(inverse: Any, unique: int) -> tuple[Any, Any]:
    """Offsets and positions where any part may have any of the unique keys."""
    n = inverse.size
    borders = _equal_parts(n)
    counts = arrays.empty((len(borders) - 1, unique), np.int64)
    offsets, positions = arrays.empty(unique + 1, np.int64), arrays.empty(n, np.int64)

    def count(p: int, _: int) -> None:
        _count_cpu(inverse[borders[p] : borders[p + 1]], 0, counts[p])

    def place(p: int, _: int) -> None:
        _place_cpu(borders[p], inverse[borders[p] : borders[p + 1]], 0, counts[p], positions)

    cpu.parallel(count, len(counts), 1)
    offsets[-1] = _begin_cpu(0, counts, offsets)
    cpu.parallel(place, len(counts), 1)
    return offsets, positions
