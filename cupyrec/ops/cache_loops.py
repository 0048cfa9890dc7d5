"""The loops on the CPU over the sets of `cupyrec.ops.cache_sets`, and what they decide by.

`tags` are (sets, WAYS) uint16, 0 where a slot is empty; `words` the records, (slots, 8) uint32.

HALF_LIFE was chosen by a simulation: batches of 213,000 look-ups of 20 million ids, the k-th most
frequent in proportion to k^-1.05, and slots for 2 million, empty at first; before step 3,500 all
ids trade their frequencies with others. Of the 75,000 distinct ids of a batch 75.0 % are among the
2 million most frequent; all hits over their number:

    HALF_LIFE   steps 751 to 1000   3001 to 3250   4751 to 5000   6751 to 7000
        64                   .951           .963           .927           .944
       250                   .970           .982           .920           .950
       500                   .973           .986           .898           .941
      1000                   .975           .987           .873           .929
      4000                   .975           .988           .844           .910
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros

from cupyrec import cpu
from cupyrec.ops.hash_key import hash_key

__all__ = [
    "HALF_LIFE", "WAYS", "find_keys", "mark_slots", "order_keys", "plan_slots", "put_slots",
    "remove_slots",
]  # fmt: skip

WAYS = 32
HALF_LIFE = 250  # steps

_RECORD = np.dtype(
    [("id", "i8"), ("table", "u4"), ("dirty", "u4"), ("count", "u4"), ("used", "u4"), ("row", "i8")]
)
_KEYS, _SETS = 4096, 512  # a block of a loop
_AHEAD = 32  # keys whose cache misses overlap
_NEAR = 16  # keys from the one being worked on to the one that is asked for
_EMPTY, _IN_FLIGHT = -1, 1 << 62  # in place of a score
_MOST = (1 << 32) - 1  # count
_BELOW_1 = 1023 << 4  # sixteenths in a float64's exponent that are not its logarithm's
_TAGS, _BYTES = np.uint64(2 * WAYS), np.uint64(_RECORD.itemsize)  # of a set, of a record
_1, _16, _32, _LOW_16, _LOW_32 = map(np.uint64, (1, 16, 32, (1 << 16) - 1, (1 << 32) - 1))


@cpu.exact_inline
def _place(table, key, sets):
    """The set where a key belongs, and its tag; 0 is that of an empty slot.

    The product's high bits depend on all those of the hash, by a few of which other tables take
    their slots, and owners their keys: else keys would crowd in some of the sets.
    """
    h = hash_key(table, key) * np.uint64(0xD1342543DE82EF95)
    return ((h >> _32) * sets) >> _32, np.uint16(max(h >> _16 & _LOW_16, _1))


@cpu.exact_inline
def _ways_of(tags, tag):
    """A bit for each way of a set that has this tag."""
    ways = np.uint32(0)
    for way in range(tags.size):  # by WAYS it would be unrolled, not made of vectors
        if tags[way] == tag:
            ways |= np.uint32(1) << np.uint32(way)
    return ways


@cpu.exact_inline
def _sum(count, more):
    return np.uint32(_MOST if more >= _MOST - count else count + more)


@cpu.exact_inline
def _score(record):
    """In sixteenths: the bits of a float64 below its exponent are the sixteenths of a logarithm."""
    exponent = np.float64(max(record.count, np.uint32(1))).view(np.int64) >> 48
    return 16 * np.int64(record.used) + HALF_LIFE * (exponent - _BELOW_1)


@cpu.exact_loop
def _find_cpu(tags, records, tables, ids, counts, now, slots):
    sets = np.uint64(len(tags))
    places, ways = np.empty(_AHEAD, np.uint64), np.empty(_AHEAD, np.uint32)
    wanted = np.empty(_AHEAD, np.uint16)
    for first in range(0, ids.size, _AHEAD):
        count = min(_AHEAD, ids.size - first)
        for i in range(count):
            places[i], wanted[i] = _place(tables[first + i], ids[first + i], sets)
            cpu.prefetch(np.uint64(tags.ctypes.data) + places[i] * _TAGS)
        for i in range(count):
            ways[i] = _ways_of(tags[places[i]], wanted[i])
            slot = places[i] * np.uint64(WAYS) + np.uint64(trailing_zeros(ways[i]))
            cpu.prefetch(np.uint64(records.ctypes.data) + slot * _BYTES)
        for i in range(count):
            k = first + i
            slots[k] = -1
            while ways[i]:
                slot = np.int64(places[i]) * WAYS + np.int64(trailing_zeros(ways[i]))
                record = records[slot]
                if record.id == ids[k] and record.table == tables[k]:
                    record.used = now
                    if counts is not None:
                        record.count = _sum(record.count, counts[k])
                    slots[k] = slot
                    break
                ways[i] &= ways[i] - np.uint32(1)


@cpu.exact_loop
def _order_cpu(tables, ids, sets, first, order):
    for i in range(ids.size):
        order[i] = _place(tables[i], ids[i], sets)[0] << _32 | np.uint64(first + i)


@cpu.exact_loop
def _plan_cpu(tags, records, order, start, stop, since, slots, evicted):
    """Of sets that begin in order[start:stop]; what is evicted of one stands where its keys do in
    the order, -1 behind it."""
    scores = np.empty(WAYS, np.int64)
    for p in range(start, stop):
        if p + _NEAR < order.size:
            near = order[p + _NEAR] >> _32
            cpu.prefetch(np.uint64(tags.ctypes.data) + near * _TAGS)
            for way in range(0, WAYS, 2):  # two lie in a cache line
                slot = near * np.uint64(WAYS) + np.uint64(way)
                cpu.prefetch_far(np.uint64(records.ctypes.data) + slot * _BYTES)
        own = order[p] >> _32
        if p > 0 and order[p - 1] >> _32 == own:
            continue
        first, gone, end = np.int64(own) * WAYS, np.uint32(0), p
        for way in range(WAYS):
            record = records[first + way]
            scores[way] = _IN_FLIGHT if record.used >= since else _score(record)
            if tags[own, way] == 0:
                scores[way] = _EMPTY
        while end < order.size and order[end] >> _32 == own:
            way, k = scores.argmin(), order[end] & _LOW_32
            score, end = scores[way], end + 1
            slots[k] = -1 if score == _IN_FLIGHT else first + way
            if score not in (_EMPTY, _IN_FLIGHT):
                gone |= np.uint32(1) << np.uint32(way)
            scores[way] = _IN_FLIGHT
        for at in range(p, end):
            evicted[at] = -1
            if gone:
                evicted[at] = first + np.int64(trailing_zeros(gone))
                gone &= gone - np.uint32(1)


@cpu.exact_loop
def _put_cpu(tags, records, slots, tables, ids, rows, counts, now):
    for i in range(slots.size):
        slot = slots[i]
        if slot < 0:
            continue
        record, tag = records[slot], _place(tables[i], ids[i], np.uint64(len(tags)))[1]
        tags[slot // WAYS, slot % WAYS] = tag
        record.id, record.table, record.row = ids[i], tables[i], rows[i]
        record.count, record.used, record.dirty = _sum(np.uint32(0), counts[i]), now, 0


@cpu.exact_loop
def _mark_cpu(records, slots, dirty):
    for slot in slots:
        if slot >= 0:
            records[slot].dirty = dirty


@cpu.exact_loop
def _remove_cpu(tags, records, slots):
    for slot in slots:
        if slot >= 0:
            tags[slot // WAYS, slot % WAYS] = 0
            records[slot].dirty = 0


def _records(words: np.ndarray) -> np.ndarray:
    return words.view(_RECORD).reshape(-1)


def find_keys(
    tags: np.ndarray, words: np.ndarray, tables: Any, ids: Any, counts: Any, now: int, slots: Any
) -> None:
    """Write the slot of each key, -1 where there is none; `counts` are added, unless None."""
    records, now = _records(words), np.uint32(now)

    def block(i: int, j: int) -> None:
        more = None if counts is None else counts[i:j]
        _find_cpu(tags, records, tables[i:j], ids[i:j], more, now, slots[i:j])

    cpu.parallel(block, len(ids), _KEYS)


def order_keys(tables: Any, ids: Any, sets: int) -> np.ndarray:
    """Return set << 32 | number of the key, ascending."""
    order = np.empty(len(ids), np.uint64)

    def block(i: int, j: int) -> None:
        _order_cpu(tables[i:j], ids[i:j], np.uint64(sets), i, order[i:j])

    cpu.parallel(block, len(ids), _KEYS)
    order.sort()
    return order


def plan_slots(tags: np.ndarray, words: np.ndarray, order: np.ndarray, since: int) -> tuple:
    """Return slots, evicted, dirty, rows: see `cupyrec.ops.cache_sets.Plan`."""
    records, since = _records(words), np.int64(since)
    slots, evicted = np.empty(len(order), np.int64), np.empty(len(order), np.int64)

    def block(i: int, j: int) -> None:
        _plan_cpu(tags, records, order, i, j, since, slots, evicted)

    cpu.parallel(block, len(order), _SETS)
    evicted = evicted[evicted >= 0]
    return slots, evicted, records["dirty"][evicted] != 0, records["row"][evicted]


def put_slots(tags: np.ndarray, words: np.ndarray, given: tuple, now: int) -> None:
    """Write slots, tables, ids, rows and counts."""
    records, now = _records(words), np.uint32(now)

    def block(i: int, j: int) -> None:
        _put_cpu(tags, records, *(array[i:j] for array in given), now)

    cpu.parallel(block, len(given[0]), _KEYS)


def mark_slots(words: np.ndarray, slots: Any, dirty: bool) -> None:
    """Write whether slots are dirty."""
    records, dirty = _records(words), np.uint32(dirty)
    cpu.parallel(lambda i, j: _mark_cpu(records, slots[i:j], dirty), len(slots), _KEYS)


def remove_slots(tags: np.ndarray, words: np.ndarray, slots: Any) -> None:
    """Empty slots."""
    records = _records(words)
    cpu.parallel(lambda i, j: _remove_cpu(tags, records, slots[i:j]), len(slots), _KEYS)
