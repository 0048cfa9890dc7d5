"""Set-associative directory of a cache of rows: keys (table uint32, id int64) to slots.

A key belongs to one set of 32 slots, chosen by its hash; slot = 32 * set + way. A record tells of a
slot's row: its key, its number in what is cached, how often it was looked up and in which step it
was last, and whether it is dirty. Before a set's records stand its 32 tags, 16 bits of each key's
hash, so that a search reads two sectors of tags and, as a rule, no record but the one it is for.
No value of a key is reserved.

What a new key takes is an empty slot of its set, else that of the lowest score, ties to the lowest
way; a slot that was used in step `since` or later is in flight, and stays:

    score = used + HALF_LIFE log2(count),  log2 in sixteenths, rounded down

A row that was looked up twice as often stays HALF_LIFE steps longer. Counts are of all time, since
they come back with a row that was evicted, so hot rows stay, as in a cache by frequency; but none
of them for ever once it is no longer asked for, as in a cache by recency.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import blocks
from cupyrec.ops.cache_loops import (
    HALF_LIFE,
    RECORD,
    WAYS,
    find_keys,
    mark_slots,
    order_keys,
    plan_slots,
    put_slots,
    remove_slots,
)  # fmt: skip

__all__ = ["HALF_LIFE", "WAYS", "CacheSets", "Plan", "Records"]

_KEYS, _SETS = 4096, 512  # a block of a CPU loop
_PART = 1 << 24  # slots that `taken` goes through at a time
_MOST = (1 << 32) - 1  # step


class Plan(NamedTuple):
    """Where new keys would go: see `CacheSets.plan`.

    Attributes
    ----------
    slots : (N,) array of int64
        -1 where there is no room in a key's set.
    evicted : (M,) array of int64
        Those of them that hold a row now, ascending.
    dirty : (M,) array of bool
        Whether that row changed since it came.
    rows : (M,) array of int64
        Its number.

    Examples
    --------
    See `CacheSets`.
    """

    slots: Any
    evicted: Any
    dirty: Any
    rows: Any


class Records(NamedTuple):
    """What a cache knows of the rows that it holds: see `CacheSets.records`.

    Attributes
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    rows : (N,) array of int64
    counts : (N,) array of int64
    dirty : (N,) array of bool

    Examples
    --------
    See `CacheSets`.
    """

    tables: Any
    ids: Any
    rows: Any
    counts: Any
    dirty: Any


class CacheSets:
    """Which rows a cache holds, in which slots.

    Slots are not checked: they must be ones that it gave. No slot may stand twice in a call.

    Parameters
    ----------
    rows : int
        Least number of slots.
    xp : module
        Array module of the device on which it lies, `numpy` by default.

    Attributes
    ----------
    words : (capacity, 8) array of uint32
        The records: id, table, count, step of the last use, whether it is dirty, row number.

    Raises
    ------
    ValueError, TypeError
        If `rows` is no integer of at least 1, or 2^37 and more.

    Examples
    --------
    >>> sets = CacheSets(1000)
    >>> tables, ids, rows = np.zeros(2, np.uint32), np.array([7, -7]), np.array([10, 11])
    >>> plan = sets.plan(tables, ids, now=1, since=1)
    >>> len(plan.evicted)
    0
    >>> sets.put(plan.slots, tables, ids, rows, np.array([1, 3]), now=1)
    >>> found = sets.find(tables, ids, now=2, counts=np.array([1, 1]))
    >>> (found == plan.slots).all()
    np.True_
    >>> sets.mark(found[:1])
    >>> sets.records(found)._asdict()
    {'tables': array([0, 0], dtype=uint32), 'ids': array([ 7, -7]), 'rows': array([10, 11]), \
'counts': array([2, 4]), 'dirty': array([ True, False])}
    >>> sets.remove(found)
    >>> sets.find(tables, ids, now=3)
    array([-1, -1])
    """

    def __init__(self, rows: int, xp: ModuleType = np) -> None:
        sets = blocks(errors.positive("CacheSets", "rows", rows), WAYS)
        if sets >= 2**32:
            raise ValueError(f"CacheSets: 'rows' must be less than 2**37, got {rows}.")
        zeros = arrays.pages if xp is np else xp.zeros
        self._tags, self.words = zeros((sets, WAYS), np.uint16), zeros((sets * WAYS, 8), np.uint32)

    xp = property(lambda self: arrays.namespace("CacheSets", self.words))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self.words)

    @property
    def nbytes(self) -> int:
        """Bytes of records and tags."""
        return self.words.nbytes + self._tags.nbytes

    @property
    def _records(self) -> Any:
        """As CPU loops have them."""
        return self.words.view(RECORD).reshape(-1)

    def find(self, tables: Any, ids: Any, now: int, counts: Any = None) -> Any:
        """Return the slot of each key, -1 where there is none, and note that it was looked up.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
            No key twice.
        now : int
            Number of this step, 0 <= now < 2**32; it never goes down.
        counts : (N,) array of int64, optional
            How often each is looked up, at least 0; what is there is counted up to 2**32 - 1.

        Returns
        -------
        (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices that don't agree, a step out of range.

        Examples
        --------
        See the class.
        """
        n = self._check("CacheSets.find", tables=tables, ids=ids)
        if counts is not None:
            self._check("CacheSets.find", ids=ids, counts=counts)
        now = np.uint32(_step("CacheSets.find", "now", now))
        slots = self.xp.empty(n, np.int64)
        records = self._records

        def block(i: int, j: int) -> None:
            more = None if counts is None else counts[i:j]
            find_keys(self._tags, records, tables[i:j], ids[i:j], more, now, slots[i:j])

        cpu.parallel(block, n, _KEYS)
        return slots

    def plan(self, tables: Any, ids: Any, now: int, since: int) -> Plan:
        """Return where keys that are not there would go, in the order given. It changes nothing.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
            No key twice.
        now : int
            Number of this step.
        since : int
            Slots that were used in this step or later are in flight, 0 <= since <= 2**32.

        Returns
        -------
        Plan

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices that don't agree, a step out of range, 2^32 keys and more.

        Examples
        --------
        See the class.
        """
        n = self._check("CacheSets.plan", tables=tables, ids=ids)
        since = np.int64(_step("CacheSets.plan", "since", since, 2**32))
        order = self._by_set(tables, ids)
        slots, evicted = np.empty(n, np.int64), np.empty(n, np.int64)
        records = self._records

        def block(i: int, j: int) -> None:
            plan_slots(self._tags, records, order, i, j, since, slots, evicted)

        cpu.parallel(block, n, _SETS)
        evicted = evicted[evicted >= 0]
        return Plan(slots, evicted, records["dirty"][evicted] != 0, records["row"][evicted])

    def put(self, slots: Any, tables: Any, ids: Any, rows: Any, counts: Any, now: int) -> None:
        """Let slots hold other rows, which are clean.

        Parameters
        ----------
        slots : (N,) array of int64
            From `plan`; where they are negative, nothing is done.
        tables : (N,) array of uint32
        ids : (N,) array of int64
        rows : (N,) array of int64
        counts : (N,) array of int64
            How often each was looked up, this step included; beyond 2**32 - 1 it is that.
        now : int
            Number of this step.

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices that don't agree, a step out of range.

        Examples
        --------
        See the class.
        """
        n = self._check(
            "CacheSets.put", slots=slots, tables=tables, ids=ids, rows=rows, counts=counts
        )
        now, records = np.uint32(_step("CacheSets.put", "now", now)), self._records

        def block(i: int, j: int) -> None:
            given = (a[i:j] for a in (slots, tables, ids, rows, counts))
            put_slots(self._tags, records, *given, now)

        cpu.parallel(block, n, _KEYS)

    def mark(self, slots: Any) -> None:
        """Call rows dirty; negative slots are passed over.

        Parameters
        ----------
        slots : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        self._mark("CacheSets.mark", slots, True)

    def clean(self, slots: Any) -> None:
        """Call rows clean; negative slots are passed over.

        Parameters
        ----------
        slots : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        self._mark("CacheSets.clean", slots, False)

    def _mark(self, where: str, slots: Any, dirty: bool) -> None:
        n, records = self._check(where, slots=slots), self._records
        cpu.parallel(lambda i, j: mark_slots(records, slots[i:j], np.uint32(dirty)), n, _KEYS)

    def remove(self, slots: Any) -> None:
        """Empty slots; negative ones are passed over.

        Parameters
        ----------
        slots : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        n, records = self._check("CacheSets.remove", slots=slots), self._records
        cpu.parallel(lambda i, j: remove_slots(self._tags, records, slots[i:j]), n, _KEYS)

    def records(self, slots: Any) -> Records:
        """Return what is known of the rows in slots.

        Parameters
        ----------
        slots : (N,) array of int64
            Each holds a row.

        Returns
        -------
        Records

        Raises
        ------
        ValueError, TypeError
            Another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        self._check("CacheSets.records", slots=slots)
        words, copy = self.words[slots], self.xp.ascontiguousarray
        ids, rows = (copy(words[:, i : i + 2]).view(np.int64).reshape(-1) for i in (0, 6))
        return Records(copy(words[:, 2]), ids, rows, words[:, 3].astype(np.int64), words[:, 5] != 0)

    def taken(self, dirty: bool = False) -> Any:
        """Return the slots that hold a row, or a dirty one, ascending.

        Returns
        -------
        (M,) array of int64

        Examples
        --------
        >>> sets = CacheSets(1000)
        >>> sets.taken(), sets.taken(dirty=True)
        (array([], dtype=int64), array([], dtype=int64))
        """
        marks = self.words[:, 5] if dirty else self._tags.reshape(-1)
        parts = [
            self.xp.flatnonzero(marks[first : first + _PART]) + first
            for first in range(0, self.capacity, _PART)
        ]
        return self.xp.concatenate(parts)

    def clear(self) -> None:
        """Empty all slots.

        Examples
        --------
        >>> sets = CacheSets(1000)
        >>> sets.clear()
        """
        self._tags.fill(0)
        self.words.fill(0)

    def _check(self, where: str, **given: Any) -> int:
        """Their length, after checking what they are."""
        arrays.namespace(where, *given.values(), self.words)
        for name, array in given.items():
            errors.dtype(where, name, array, np.uint32 if name == "tables" else np.int64)
        return errors.axes(where, **{name: (array, "N") for name, array in given.items()})[0]

    def _by_set(self, tables: Any, ids: Any) -> np.ndarray:
        """The keys' numbers, ascending within a set; above bit 32 their sets, ascending."""
        order = np.empty(len(ids), np.uint64)

        def block(i: int, j: int) -> None:
            order_keys(tables[i:j], ids[i:j], np.uint64(len(self._tags)), i, order[i:j])

        cpu.parallel(block, len(ids), _KEYS)
        order.sort()
        return order


def _step(where: str, name: str, step: int, most: int = _MOST) -> int:
    """The number of a step, which is at least 0 and at most `most`."""
    if errors.count(where, name, step) > most:
        raise ValueError(f"{where}: '{name}' must be at most {most}, got {step}.")
    return step
