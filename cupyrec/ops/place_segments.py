"""Slots of keys that are told apart by their hash alone, in segments that grow one by one.

A key's *place* is the top bits of its hash. The upper bits of the place choose one of 2^k segments,
the others, its *fraction*, are the home there: the fraction of the slots that lies before it. A
slot is 0 where empty, else row << (bits of the fraction) | fraction. No fraction is 0. The place is
whole, so segments grow, and close the hole of a removed place, without a key.

From home on slots are probed one by one, around the end. Places ascend from slot to slot (Robin
Hood hashing, Celis, Larson and Munro, 1985), so that a search ends where a later one stands, and a
segment grows in one pass that searches for nothing.

A segment gets its next size when more than `_LOAD` of its slots are taken. Sizes are `_GROWTH`
apart, those of the segments staggered, so that segments grow in turn: there is no pause, and memory
follows the number of keys closely, at 9 to 10 bytes a key. A thread owns the segments it changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import carray

from cupyrec import cpu
from cupyrec.huge_pages import HugePages
from cupyrec.ops.hash_key import hash_key

__all__ = ["PlaceSegments"]

_LEAST = 4  # slots of a segment
_GROWTH, _LOAD = 1.1, 0.88
_KEYS = 4096  # a block of a CPU loop
_OWNERS = 32  # blocks of segments, each changed by one thread
_AHEAD = 16  # keys whose cache misses overlap
_NEAR = 16  # keys from the one being worked on to the one that is asked for
_0, _1, _3, _4, _64 = map(np.uint64, (0, 1, 3, 4, 64))


@cpu.exact_loop
def _place(table, key, bits, nonzero):
    """Upper bits of the hash, but the `nonzero` lower ones of them are never all 0."""
    place = hash_key(table, key) >> (_64 - bits)
    return place if place & ((_1 << nonzero) - _1) else place + _1


@cpu.exact_loop
def _places_cpu(tables, ids, bits, nonzero, places):
    for i in range(ids.size):
        places[i] = _place(tables[i], ids[i], bits, nonzero)


@cpu.exact_loop
def _slots_of(segments, place, bits):
    """Of the segment whose places have fractions of so many bits."""
    segment = place >> bits
    return carray(cpu.pointer(segments[segment, 0]), (segments[segment, 1],), np.uint64)


@cpu.exact_loop
def _fraction(place_or_slot, bits):
    return place_or_slot & ((_1 << bits) - _1)


@cpu.exact_loop
def _home(place_or_slot, size, bits):
    return _fraction(place_or_slot, bits) * np.uint64(size) >> bits


@cpu.exact_loop
def _next(at, size):
    return at + _1 if at + _1 < np.uint64(size) else _0


@cpu.exact_loop
def _behind(place_or_slot, at, size, bits):
    """From the place's point among the slots to the end of slot `at`, in 2^-bits slots."""
    point, end = _fraction(place_or_slot, bits) * np.uint64(size), (at + _1) << bits
    return end - point if end > point else end + (np.uint64(size) << bits) - point


@cpu.exact_loop
def _search(slots, place, bits):
    """The place's slot, or the one that it would take: empty or the next place's."""
    at = _home(place, slots.size, bits)
    behind = _behind(place, at, slots.size, bits)
    while slots[at] != 0 and _behind(slots[at], at, slots.size, bits) > behind:
        at, behind = _next(at, slots.size), behind + (_1 << bits)
    return at


@cpu.exact_loop
def _is_at(slots, at, place, bits):
    return _fraction(slots[at], bits) == _fraction(place, bits)


@cpu.exact_loop
def _push(slots, at, slot):
    """Put a slot before those that stand there, up to an empty one."""
    while slot != 0:
        slots[at], slot = slot, slots[at]
        at = _next(at, slots.size)


@cpu.exact_loop
def _ask(segments, place, bits):
    """Ask for the cache lines at home: a search may go on in the next one."""
    segment = place >> bits
    home = _home(place, segments[segment, 1], bits)
    for near in (home, home + _4):
        cpu.prefetch(segments[segment, 0] + (near << _3))


@cpu.exact_loop
def _find_cpu(segments, bits, tables, ids, place_bits, nonzero, rows):
    places = np.empty(_AHEAD, np.uint64)
    for first in range(0, ids.size, _AHEAD):
        count = min(_AHEAD, ids.size - first)
        for i in range(count):
            places[i] = _place(tables[first + i], ids[first + i], place_bits, nonzero)
            _ask(segments, places[i], bits)
        for i in range(count):
            slots = _slots_of(segments, places[i], bits)
            at = _search(slots, places[i], bits)
            found = _is_at(slots, at, places[i], bits)
            rows[first + i] = np.int64(slots[at] >> bits) if found else -1


@cpu.exact_loop
def _sort_cpu(places, bits, ends, order):
    """Numbers of the places by segment; those of segment s end before ends[s + 1]."""
    for place in places:
        ends[(place >> bits) + _1] += 1
    for s in range(ends.size - 1):
        ends[s + 1] += ends[s]
    starts = ends.copy()
    for i in range(places.size):
        s = places[i] >> bits
        order[starts[s]] = i
        starts[s] += 1


@cpu.exact_loop
def _put_cpu(segments, bits, places, rows, order, taken):
    for i in range(order.size):
        if i + _NEAR < order.size:
            _ask(segments, places[order[i + _NEAR]], bits)
        place = places[order[i]]
        slots = _slots_of(segments, place, bits)
        at = _search(slots, place, bits)
        if _is_at(slots, at, place, bits):
            taken[order[i]] = True
        else:
            _push(slots, at, np.uint64(rows[order[i]]) << bits | _fraction(place, bits))
            segments[place >> bits, 2] += _1


@cpu.exact_loop
def _replace_cpu(segments, bits, places, rows):
    for i in range(places.size):
        slots = _slots_of(segments, places[i], bits)
        at = _search(slots, places[i], bits)
        if _is_at(slots, at, places[i], bits):
            slots[at] = np.uint64(rows[i]) << bits | _fraction(places[i], bits)


@cpu.exact_loop
def _remove_cpu(segments, bits, places, order):
    """Empty slots; what stands behind, up to one at home, moves a slot towards home."""
    for i in order:
        slots = _slots_of(segments, places[i], bits)
        hole = _search(slots, places[i], bits)
        if not _is_at(slots, hole, places[i], bits):
            continue
        at = _next(hole, slots.size)
        while slots[at] != 0 and _home(slots[at], slots.size, bits) != at:
            slots[hole], hole, at = slots[at], at, _next(at, slots.size)
        slots[hole] = _0
        segments[places[i] >> bits, 2] -= _1


@cpu.exact_loop
def _refill_cpu(old, bits, slots):
    """Put what stands in the slots `old` of a segment into others, which are empty.

    They ascend, so each goes home or behind the last one, but for those around the end.
    """
    free, around = _0, 0
    while old[around] != 0 and _home(old[around], old.size, bits) > np.uint64(around):
        around += 1
    for slot in old[around:]:
        if slot != 0:
            at = max(free, _home(slot, slots.size, bits))
            free = at + _1
            if at < np.uint64(slots.size):
                slots[at] = slot
            else:
                _push(slots, _search(slots, slot, bits), slot)
    for slot in old[:around]:
        _push(slots, _search(slots, slot, bits), slot)


@cpu.exact_loop
def _unpack_cpu(slots, segment, bits, places, rows):
    count = 0
    for slot in slots:
        if slot != 0:
            places[count] = segment << bits | _fraction(slot, bits)
            rows[count] = np.int64(slot >> bits)
            count += 1


class PlaceSegments:
    """Places of keys to row numbers.

    Parameters
    ----------
    place_bits, segment_bits : int
        Of the hash, and of these, for the segment.
    nonzero_bits : int
        Lower bits of a place that are never all 0; at most those of a fraction. Keys have the same
        places in others that differ in `segment_bits` alone.

    Examples
    --------
    >>> segments = PlaceSegments(42, 7, 28)
    >>> tables, ids = np.zeros(3, np.uint32), np.array([5, 5, 6])
    >>> places = segments.places(tables, ids)
    >>> segments.put(places[:2], np.array([8, 9]))
    array([False,  True])
    >>> rows = np.empty(3, np.int64)
    >>> segments.find(tables, ids, rows)
    >>> rows, segments.row_limit
    (array([ 8,  8, -1]), 536870912)
    """

    def __init__(self, place_bits: int, segment_bits: int, nonzero_bits: int) -> None:
        self._place_bits = np.uint64(place_bits), np.uint64(nonzero_bits)
        self._bits = np.uint64(place_bits - segment_bits)  # of a fraction
        self.row_limit = 1 << 64 - place_bits + segment_bits  # row numbers are below
        self._pages = HugePages()
        sizes = _sizes(np.zeros(1 << segment_bits, np.int64))
        self._slots = [self._pages.zeros(size, np.uint64) for size in sizes]
        located = [(slots.ctypes.data, slots.size, 0) for slots in self._slots]
        self._table = np.array(located, np.uint64)  # of each segment: address, slots, keys

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._table[:, 0] = [slots.ctypes.data for slots in self._slots]  # a copy's lie elsewhere

    @property
    def nbytes(self) -> int:
        """Bytes of slots, of memory that waits for more, and of what tells where they are."""
        return 8 * self.size + self._pages.spare + self._table.nbytes

    @property
    def size(self) -> int:
        """Number of slots."""
        return int(self._table[:, 1].sum())

    def __len__(self) -> int:
        return int(self._table[:, 2].sum())

    def places(self, tables: Any, ids: Any) -> Any:
        """Return the place of each key."""
        places = np.empty(ids.size, np.uint64)

        def block(i: int, j: int) -> None:
            _places_cpu(tables[i:j], ids[i:j], *self._place_bits, places[i:j])

        cpu.parallel(block, ids.size, _KEYS)
        return places

    def find(self, tables: Any, ids: Any, rows: Any) -> None:
        """Write the row of each key's place to `rows`, -1 where there is none."""

        def block(i: int, j: int) -> None:
            keys = tables[i:j], ids[i:j]
            _find_cpu(self._table, self._bits, *keys, *self._place_bits, rows[i:j])

        cpu.parallel(block, ids.size, _KEYS)

    def put(self, places: Any, rows: Any) -> Any:
        """Add places; return (N,) bool: which were taken, by one before or of this call."""
        order, ends = self._by_segment(places)
        taken = np.zeros(places.size, bool)
        self._resize(self._table[:, 2].astype(np.int64) + np.diff(ends))

        def owned(part: slice) -> None:
            _put_cpu(self._table, self._bits, places, rows, order[part], taken)

        self._by_owner(owned, ends)
        return taken

    def replace(self, places: Any, rows: Any) -> None:
        """Give places that are there other rows."""

        def block(i: int, j: int) -> None:
            _replace_cpu(self._table, self._bits, places[i:j], rows[i:j])

        cpu.parallel(block, places.size, _KEYS)

    def remove(self, places: Any) -> None:
        """Remove places that are there."""
        order, ends = self._by_segment(places)

        def owned(part: slice) -> None:
            _remove_cpu(self._table, self._bits, places, order[part])

        self._by_owner(owned, ends)
        with contextlib.suppress(MemoryError):  # then they keep what they have
            self._resize(self._table[:, 2].astype(np.int64))

    def contents(self) -> Iterator[tuple[Any, Any]]:
        """Yield places and rows, segment by segment."""
        for s, slots in enumerate(self._slots):
            count = int(self._table[s, 2])
            places, rows = np.empty(count, np.uint64), np.empty(count, np.int64)
            _unpack_cpu(slots, np.uint64(s), self._bits, places, rows)
            yield places, rows

    def _by_segment(self, places: Any) -> tuple[Any, Any]:
        """Numbers of places in the order of segments, and where those of each segment end."""
        ends = np.zeros(len(self._table) + 1, np.int64)
        order = np.empty(places.size, np.int64)
        _sort_cpu(places, self._bits, ends, order)
        return order, ends

    def _by_owner(self, work: Callable[[slice], None], ends: Any) -> None:
        """Call `work` with parts of the order by segment, each of whole segments."""
        block = max(1, len(self._table) // _OWNERS)
        cpu.parallel(lambda i, j: work(slice(ends[i], ends[j])), len(self._table), block)

    def _resize(self, counts: Any) -> None:
        """Make room for so many keys in each segment, and give back what is far too much."""
        sizes, present = _sizes(counts), self._table[:, 1].astype(np.int64)
        chosen = np.flatnonzero((sizes > present) | (2 * sizes < present))

        def work(i: int, j: int) -> None:
            for s in chosen[i:j]:
                slots = self._pages.zeros(sizes[s], np.uint64)
                _refill_cpu(self._slots[s], self._bits, slots)
                self._slots[s], self._table[s, :2] = slots, (slots.ctypes.data, slots.size)

        cpu.parallel(work, chosen.size, 1)


def _sizes(counts: Any) -> Any:
    """Slots of each of S segments: _LEAST * _GROWTH^(n + s / S) with the least n that will do."""
    ahead = np.arange(counts.size) / counts.size
    steps = np.log(np.maximum(counts / _LOAD, 1) / _LEAST) / np.log(_GROWTH)
    steps = np.maximum(np.ceil(steps - ahead), 0) + ahead
    return np.ceil(_LEAST * _GROWTH**steps).astype(np.int64)
