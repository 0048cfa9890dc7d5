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

from cupyrec import arrays, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.cache_loops import (
    HALF_LIFE,
    WAYS,
    find_keys,
    mark_slots,
    order_keys,
    plan_slots,
    put_slots,
    remove_slots,
)  # fmt: skip
from cupyrec.ops.hash_key import check_keys
from cupyrec.scratch import stamped

__all__ = ["HALF_LIFE", "WAYS", "CacheSets", "Plan", "Records"]

_BLOCK, _WARPS = 256, 8  # threads
_PART = 1 << 24  # slots that `taken` goes through at a time
_MOST = (1 << 32) - 1  # step


def _per_key(n: int) -> Geometry:
    return Geometry(blocks(n, _BLOCK), _BLOCK)


_find = Kernel(
    "cache_sets.cu", "cache_find",
    "const uint16_t* tags, uint32_t* words, uint64_t sets, const uint32_t* tables,"
    " const int64_t* ids, const int64_t* counts, uint32_t now, int64_t* slots, int64_t n",
    _per_key, optional="counts",
)  # fmt: skip
_plan = Kernel(
    "cache_sets.cu", "cache_plan",
    "const uint16_t* tags, const uint32_t* words, const uint64_t* order, uint64_t since,"
    " int64_t half_life, int64_t* slots, int64_t* evicted, bool* dirty, int64_t* rows,"
    " uint64_t* status, uint64_t stamp, int64_t* total, int64_t n",
    lambda n: Geometry(blocks(n, _WARPS), _BLOCK),
)  # fmt: skip
_put = Kernel(
    "cache_sets.cu", "cache_put",
    "uint16_t* tags, uint32_t* words, uint64_t sets, const int64_t* slots, const uint32_t* tables,"
    " const int64_t* ids, const int64_t* rows, const int64_t* counts, uint32_t now, int64_t n",
    _per_key,
)  # fmt: skip
_mark = Kernel(
    "cache_sets.cu", "cache_mark", "uint32_t* words, const int64_t* slots, bool dirty, int64_t n",
    _per_key,
)  # fmt: skip
_remove = Kernel(
    "cache_sets.cu", "cache_remove",
    "uint16_t* tags, uint32_t* words, const int64_t* slots, int64_t n", _per_key,
)  # fmt: skip


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
        The records: id, table, whether it is dirty, count, step of the last use, row number.

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
        n, tables, ids = self._check("CacheSets.find", tables=tables, ids=ids)
        if counts is not None:
            _, _, counts = self._check("CacheSets.find", ids=ids, counts=counts)
        now, slots = _step("CacheSets.find", "now", now), self.xp.empty(n, np.int64)
        if self.xp is np:
            find_keys(self._tags, self.words, tables, ids, counts, now, slots)
        else:
            _find(*self._on_device, tables, ids, counts, now, slots, n, n=n)
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
        n, xp = check_keys("CacheSets.plan", tables, ids), self.xp
        if not isinstance(ids, np.ndarray):
            arrays.namespace("CacheSets.plan", ids, self.words)
        _step("CacheSets.plan", "now", now)
        since = _step("CacheSets.plan", "since", since, 2**32)
        if n >= 2**31:
            raise ValueError(f"CacheSets.plan: N must be less than 2**31, got {n}.")
        order = order_keys(arrays.to_host(tables), arrays.to_host(ids), len(self._tags))
        if xp is np:
            return Plan(*plan_slots(self._tags, self.words, order, since))
        plan = Plan(*(xp.empty(n, dtype) for dtype in (np.int64, np.int64, np.bool_, np.int64)))
        if n == 0:
            return plan
        total, status = xp.empty(1, np.int64), stamped(xp, blocks(n, _WARPS) + 1)
        order = arrays.copy_to(xp, order)
        _plan(self._tags, self.words, order, since, HALF_LIFE, *plan, *status, total, n, n=n)
        count = int(total.item())
        return Plan(plan.slots, *(array[:count] for array in plan[1:]))

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
        n, *given = self._check(
            "CacheSets.put", slots=slots, tables=tables, ids=ids, rows=rows, counts=counts
        )
        now = _step("CacheSets.put", "now", now)
        if self.xp is np:
            put_slots(self._tags, self.words, given, now)
        else:
            _put(*self._on_device, *given, now, n, n=n)

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
        n, slots = self._check(where, slots=slots)
        if self.xp is np:
            mark_slots(self.words, slots, dirty)
        else:
            _mark(self.words, slots, dirty, n, n=n)

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
        n, slots = self._check("CacheSets.remove", slots=slots)
        if self.xp is np:
            remove_slots(self._tags, self.words, slots)
        else:
            _remove(self._tags, self.words, slots, n, n=n)

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
        return Records(copy(words[:, 2]), ids, rows, words[:, 4].astype(np.int64), words[:, 3] != 0)

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
        marks = self.words[:, 3] if dirty else self._tags.reshape(-1)
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

    @property
    def _on_device(self) -> tuple:
        """What kernels begin with."""
        return self._tags, self.words, len(self._tags)

    def _check(self, where: str, **given: Any) -> tuple:
        """Their length, and they as kernels take them."""
        xp = arrays.namespace(where, *given.values(), self.words)
        for name, array in given.items():
            errors.dtype(where, name, array, np.uint32 if name == "tables" else np.int64)
        (n,) = errors.axes(where, **{name: (array, "N") for name, array in given.items()})
        return n, *(array if xp is np else xp.ascontiguousarray(array) for array in given.values())


def _step(where: str, name: str, step: int, most: int = _MOST) -> int:
    """The number of a step, which is at least 0 and at most `most`."""
    if errors.count(where, name, step) > most:
        raise ValueError(f"{where}: '{name}' must be at most {most}, got {step}.")
    return step
