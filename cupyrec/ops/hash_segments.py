"""Slots of a hash table in the CPU's memory, in segments that grow one by one.

The top 7 bits of a key's hash choose its segment, the next 28 its home there: the fraction of the
slots that lies before it. From home on slots are probed one by one, around the end. A slot is 0
where empty, else (row + 1) << 24 | (the low 24 bits of the fraction); the key itself stands with
its row, and is read only where these bits agree. The missing 4 bits follow from where the slot is,
as long as no key of the segment is a sixteenth of it away from home: then a segment grows, and
closes the hole of a deleted key, in one pass over its slots that reads no key.

A segment gets its next size when more than `_LOAD` of its slots are taken. Sizes are `_GROWTH`
apart, those of segment s by s / 128 of a step ahead, so that segments grow in turn: there is no
pause, and memory follows the number of keys closely, at 10 to 12 bytes of slots a key. A thread
owns the segments that it changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from cupyrec import cpu
from cupyrec.huge_pages import HugePages
from cupyrec.ops.hash_key import hash_key

__all__ = ["CHUNK", "Segments"]

_CHUNK_BITS = 14
CHUNK = 1 << _CHUNK_BITS  # keys a chunk: the low and high word of each id, and its table

_SEGMENTS = 128
_LEAST = 8  # slots
_GROWTH, _LOAD = 1.2, 0.8
_KEYS = 4096  # a block of a CPU loop
_OWNED = 16  # segments that a thread changes at a time
_AHEAD = 16  # keys whose cache misses overlap
_NEAR = 16  # keys from the one being worked on to the one that is asked for
_TAG, _FRACTION, _LOW_32 = (np.uint64((1 << bits) - 1) for bits in (24, 28, 32))
_0, _1, _3, _4, _24, _28, _29, _32, _57 = map(np.uint64, (0, 1, 3, 4, 24, 28, 29, 32, 57))


@cpu.exact_loop
def _slots_of(segments, h):
    segment = h >> _57
    return carray(cpu.pointer(segments[segment, 0]), (segments[segment, 1],), np.uint64)


@cpu.exact_loop
def _fraction(h):
    return h >> _29 & _FRACTION


@cpu.exact_loop
def _home(fraction, size):
    return fraction * np.uint64(size) >> _28


@cpu.exact_loop
def _next(at, size):
    return at + _1 if at + _1 < np.uint64(size) else _0


@cpu.exact_loop
def _distance(a, b, size):
    """Steps from slot a to slot b."""
    return b - a if b >= a else b + np.uint64(size) - a


@cpu.exact_loop
def _row(slot):
    return np.int64(slot >> _24) - 1


@cpu.exact_loop
def _slot(row, fraction):
    return np.uint64(row + 1) << _24 | fraction & _TAG


@cpu.exact_loop
def _key_address(chunks, row):
    return chunks[row >> _CHUNK_BITS] + np.uint64((row & (CHUNK - 1)) * 12)


@cpu.exact_loop
def _key(chunks, row):
    return carray(cpu.pointer(_key_address(chunks, row)), (3,), np.uint32)


@cpu.exact_loop
def _hash_of(chunks, row):
    key = _key(chunks, row)
    return hash_key(key[2], np.uint64(key[1]) << _32 | np.uint64(key[0]))


@cpu.exact_loop
def _fraction_at(slots, at, far, chunks):
    """The fraction of what stands in slot `at`: the largest whose home is not behind it."""
    slot, size = slots[at], np.uint64(slots.size)
    if far:
        return _fraction(_hash_of(chunks, _row(slot)))
    fraction = ((at + _1) << _4) // size << _24 | slot & _TAG
    if _home(fraction, size) > at:
        fraction -= _1 << _24  # below 0 if it went around the end
    return fraction & _FRACTION


@cpu.exact_loop
def _find_cpu(segments, chunks, tables, ids, rows):
    hashes, places = np.empty(_AHEAD, np.uint64), np.empty(_AHEAD, np.uint64)
    for first in range(0, ids.size, _AHEAD):
        count = min(_AHEAD, ids.size - first)
        for i in range(count):
            h = hash_key(tables[first + i], ids[first + i])
            hashes[i], places[i] = h, _home(_fraction(h), segments[h >> _57, 1])
            for near in (places[i], places[i] + _4):  # it may go on in the next line
                cpu.prefetch(segments[h >> _57, 0] + (near << _3))
        for i in range(count):
            slots, at, fraction = _slots_of(segments, hashes[i]), places[i], _fraction(hashes[i])
            while slots[at] != 0 and (slots[at] ^ fraction) & _TAG != 0:
                at = _next(at, slots.size)
            places[i] = at
            if slots[at] != 0:
                cpu.prefetch(_key_address(chunks, _row(slots[at])))
        for i in range(count):
            slots, at, fraction = _slots_of(segments, hashes[i]), places[i], _fraction(hashes[i])
            table, key = tables[first + i], np.uint64(ids[first + i])
            rows[first + i] = -1
            while slots[at] != 0:
                if (slots[at] ^ fraction) & _TAG == 0:
                    words = _key(chunks, _row(slots[at]))
                    if words[0] == key & _LOW_32 and words[1] == key >> _32 and words[2] == table:
                        rows[first + i] = _row(slots[at])
                        break
                at = _next(at, slots.size)


@cpu.exact_loop
def _hash_rows_cpu(chunks, rows, hashes):
    for i in range(rows.size):
        if i + _NEAR < rows.size:
            cpu.prefetch(_key_address(chunks, rows[i + _NEAR]))
        hashes[i] = _hash_of(chunks, rows[i])


@cpu.exact_loop
def _sort_cpu(rows, hashes, ends, sorted_rows, sorted_hashes):
    """Sort by segment; those of segment s end before ends[s + 1]."""
    for h in hashes:
        ends[(h >> _57) + _1] += 1
    for s in range(_SEGMENTS):
        ends[s + 1] += ends[s]
    starts = ends.copy()
    for i in range(rows.size):
        s = hashes[i] >> _57
        sorted_rows[starts[s]], sorted_hashes[starts[s]] = rows[i], hashes[i]
        starts[s] += 1


@cpu.exact_loop
def _take(slots, row, fraction):
    """Put a row into the first empty slot; return whether that is far from home."""
    home = at = _home(fraction, slots.size)
    while slots[at] != 0:
        at = _next(at, slots.size)
    slots[at] = _slot(row, fraction)
    return _distance(home, at, slots.size) >= slots.size >> 4


@cpu.exact_loop
def _insert_cpu(segments, hashes, rows):
    for i in range(rows.size):
        if i + _NEAR < rows.size:
            h = hashes[i + _NEAR]
            cpu.prefetch(segments[h >> _57, 0] + (_home(_fraction(h), segments[h >> _57, 1]) << _3))
        h = hashes[i]
        if _take(_slots_of(segments, h), rows[i], _fraction(h)):
            segments[h >> _57, 2] = 1


@cpu.exact_loop
def _refill_cpu(old, far, chunks, slots):
    """Put what stands in the slots `old` of a segment into others; return whether it is far."""
    new_far = False
    for at in range(old.size):
        if old[at] != 0:
            fraction = _fraction_at(old, np.uint64(at), far, chunks)
            new_far |= _take(slots, _row(old[at]), fraction)
    return new_far


@cpu.exact_loop
def _place_of(slots, row, fraction):
    """Where a row that is there stands."""
    at = _home(fraction, slots.size)
    while _row(slots[at]) != row:
        at = _next(at, slots.size)
    return at


@cpu.exact_loop
def _remove_cpu(segments, chunks, hashes, rows):
    """Empty the slots of rows; move up what stands behind, so that searches still come to it."""
    for i in range(rows.size):
        slots, far = _slots_of(segments, hashes[i]), segments[hashes[i] >> _57, 2]
        hole = _place_of(slots, rows[i], _fraction(hashes[i]))
        at = _next(hole, slots.size)
        while slots[at] != 0:
            home = _home(_fraction_at(slots, at, far, chunks), slots.size)
            if _distance(home, at, slots.size) >= _distance(hole, at, slots.size):
                slots[hole] = slots[at]
                hole = at
            at = _next(at, slots.size)
        slots[hole] = _0


@cpu.exact_loop
def _move_cpu(segments, chunks, hashes, moved_from, moved_to):
    for i in range(moved_from.size):
        slots, fraction = _slots_of(segments, hashes[i]), _fraction(hashes[i])
        slots[_place_of(slots, moved_from[i], fraction)] = _slot(moved_to[i], fraction)
        _key(chunks, moved_to[i])[:] = _key(chunks, moved_from[i])


class Segments:
    """Slots on the CPU of keys that lie elsewhere: `chunks` are the addresses of `CHUNK` each.

    Examples
    --------
    >>> slots, keys = Segments(), np.zeros((CHUNK, 3), np.uint32)
    >>> keys[0], chunks = [7, 0, 1], np.array([keys.ctypes.data], np.uint64)  # id 7 of table 1
    >>> slots.insert(chunks, 0, 1)
    >>> rows = np.empty(2, np.int64)
    >>> slots.find(chunks, np.array([1, 1], np.uint32), np.array([7, 8]), rows)
    >>> rows
    array([ 0, -1])
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_SEGMENTS, np.int64)
        self._pages = HugePages()
        self._slots = [self._pages.zeros(size, np.uint64) for size in _sizes(self._counts)]
        located = [(slots.ctypes.data, slots.size, 0) for slots in self._slots]
        self._segments = np.array(located, np.uint64)  # address, size, whether a key is far away

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._segments[:, 0] = [slots.ctypes.data for slots in self._slots]

    @property
    def size(self) -> int:
        """Number of slots."""
        return int(self._segments[:, 1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of slots, and of memory that waits for more."""
        return 8 * self.size + self._pages.spare

    def find(self, chunks: Any, tables: Any, ids: Any, rows: Any) -> None:
        """Write the row of each key to `rows`, -1 where there is none."""

        def block(i: int, j: int) -> None:
            _find_cpu(self._segments, chunks, tables[i:j], ids[i:j], rows[i:j])

        cpu.parallel(block, ids.size, _KEYS)

    def insert(self, chunks: Any, first: int, stop: int) -> None:
        """Give rows first .. stop - 1, whose keys are new, their slots."""
        rows, hashes, ends = self._by_segment(chunks, np.arange(first, stop))
        counts = self._counts + np.diff(ends)
        self._resize(chunks, counts)

        def owned(i: int, j: int) -> None:
            part = slice(ends[i], ends[j])
            _insert_cpu(self._segments, hashes[part], rows[part])

        cpu.parallel(owned, _SEGMENTS, _OWNED)
        self._counts = counts

    def forget(self, chunks: Any, removed: Any, moved_from: Any, moved_to: Any) -> None:
        """Remove rows, then move others to numbers that no slot has, and their keys."""
        rows, hashes, ends = self._by_segment(chunks, removed)

        def owned(i: int, j: int) -> None:
            part = slice(ends[i], ends[j])
            _remove_cpu(self._segments, chunks, hashes[part], rows[part])

        cpu.parallel(owned, _SEGMENTS, _OWNED)
        self._counts -= np.diff(ends)
        hashes = _hashes(chunks, moved_from)

        def block(i: int, j: int) -> None:
            _move_cpu(self._segments, chunks, hashes[i:j], moved_from[i:j], moved_to[i:j])

        cpu.parallel(block, moved_from.size, _KEYS)
        self._resize(chunks, self._counts)

    def _by_segment(self, chunks: Any, rows: Any) -> tuple[Any, Any, Any]:
        """Rows and hashes in the order of segments, and where those of each segment end."""
        hashes = _hashes(chunks, rows)
        ends = np.zeros(_SEGMENTS + 1, np.int64)
        by_segment = np.empty_like(rows), np.empty_like(hashes)
        _sort_cpu(rows, hashes, ends, *by_segment)
        return *by_segment, ends

    def _resize(self, chunks: Any, counts: Any) -> None:
        """Make room for so many keys in each segment, and give back what is far too much."""
        sizes, present = _sizes(counts), self._segments[:, 1].astype(np.int64)
        chosen = np.flatnonzero((sizes > present) | (4 * sizes < present))

        def work(i: int, j: int) -> None:
            for s in chosen[i:j]:
                slots = self._pages.zeros(sizes[s], np.uint64)
                far = _refill_cpu(self._slots[s], self._segments[s, 2], chunks, slots)
                self._slots[s], self._segments[s] = slots, (slots.ctypes.data, slots.size, far)

        cpu.parallel(work, chosen.size, 1)


def _sizes(counts: Any) -> Any:
    """Slots of each segment: _LEAST * _GROWTH^(n + s / 128) with the least n that will do."""
    ahead = np.arange(_SEGMENTS) / _SEGMENTS
    steps = np.log(np.maximum(counts / _LOAD, 1) / _LEAST) / np.log(_GROWTH)
    steps = np.maximum(np.ceil(steps - ahead), 0) + ahead
    return np.ceil(_LEAST * _GROWTH**steps).astype(np.int64)


def _hashes(chunks: Any, rows: Any) -> Any:
    """Hashes of the keys of rows."""
    hashes = np.empty(rows.size, np.uint64)

    def block(i: int, j: int) -> None:
        _hash_rows_cpu(chunks, rows[i:j], hashes[i:j])

    cpu.parallel(block, rows.size, _KEYS)
    return hashes
