"""A cache of rows in a device's memory, over a backing that holds all of them.

    slots 0 .. capacity - 1         set-associative: see `cupyrec.ops.cache_sets`
    slots from `_beyond` on         the overflow: rows whose set was full of rows in flight

A *payload* is what a backing holds of a row, a line of uint32: the row's words, then the low and
high word of its id, its table, and how often it was looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cupyrec import arrays
from cupyrec.kernel import blocks
from cupyrec.ops.cache_rows import fill_rows, take_rows
from cupyrec.ops.cache_sets import CacheSets
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.row_memory import RowMemory
from cupyrec.parallel.devices import fetched

__all__ = ["TAIL", "Backing", "RowCache", "payload_keys", "write_tails"]

TAIL = 4  # words of a payload behind the row's
_CHUNK_BYTES = 16 << 20
_BLOCK_BYTES = 16 << 20  # of payloads written at a time
_MOST = 2**32 - 1  # count


class Backing(Protocol):
    """Where a cache's rows come from and go to: payloads by row number, in the host's arrays."""

    in_memory: bool
    meta: dict[str, Any]
    nbytes: int
    disk_bytes: int

    def __len__(self) -> int: ...
    def read(self, rows: np.ndarray, out: np.ndarray) -> None: ...
    def write(self, rows: np.ndarray, lines: np.ndarray) -> None: ...
    def truncate(self, count: int) -> None: ...
    def records(self) -> Any: ...
    def commit(self, meta: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def payload_keys(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tables, ids and counts of payloads.

    Examples
    --------
    >>> lines = np.zeros((1, 8), np.uint32)
    >>> write_tails(lines, np.array([3], np.uint32), np.array([-7]), np.array([5]))
    >>> payload_keys(lines)
    (array([3], dtype=uint32), array([-7]), array([5]))
    """
    ids = np.ascontiguousarray(lines[:, -4:-2]).view(np.int64).reshape(-1)
    return np.ascontiguousarray(lines[:, -2]), ids, lines[:, -1].astype(np.int64)


def write_tails(lines: np.ndarray, tables: Any, ids: Any, counts: Any) -> None:
    """Write keys and counts into payloads.

    Examples
    --------
    See `payload_keys`.
    """
    lines[:, -4:-2] = np.ascontiguousarray(ids).view(np.uint32).reshape(-1, 2)
    lines[:, -2] = tables
    lines[:, -1] = np.minimum(counts, _MOST)


class RowCache:
    """Rows by key in a device's memory; those that must leave are written to their backing.

    Parameters
    ----------
    capacity : int
        Rows, at least; of a batch that needs more the others lie beside them as long as it does.
    stride : int
        Words of a row.
    value : int
        Type of the vectors' numbers.
    backing : Backing
    xp : module
        Array module of the device.
    written : callable, optional
        ``written(rows)`` hears which rows the backing has got, for whoever reads ahead.

    Attributes
    ----------
    memory : RowMemory
        Whose rows are slots.
    epoch : int
        Goes up where a slot may have become another row's.
    hits, misses, evictions, read_bytes, written_bytes : int
        Keys found and not, rows that left, and what went from the backing and to it.

    Examples
    --------
    See `cupyrec.embedding.CachedStore`.
    """

    def __init__(
        self, capacity: int, stride: int, value: int, backing: Backing, xp: ModuleType,
        written: Callable[[np.ndarray], None] = lambda rows: None,
    ) -> None:  # fmt: skip
        self.xp, self.backing, self._words = xp, backing, stride + TAIL
        self._tell_written = written
        self._sets = CacheSets(capacity, xp)
        self.capacity = self._sets.capacity
        largest = max(0, (_CHUNK_BYTES // (4 * stride)).bit_length() - 1)
        k = min(largest, (self.capacity - 1).bit_length())
        self._chunks: list[Any] = []
        self.memory = RowMemory(xp.empty(0, np.uint64), k, stride, value)
        self._extend(blocks(self.capacity, 1 << k))
        self._own = len(self._chunks)  # the others are the overflow's
        self._beyond = self._own << k
        self._forget_overflow()
        self.now = self.epoch = 0
        self._since = self._in_flight = 1
        self.hits = self.misses = self.evictions = self.read_bytes = self.written_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of rows and their directory."""
        return self._sets.nbytes + (len(self._chunks) << self.memory.k) * self.memory.stride * 4

    def _extend(self, chunks: int) -> None:
        """Have so many chunks; those there are stay where they are."""
        empty = arrays.pages if self.xp is np else self.xp.empty
        shape, before = (1 << self.memory.k, self.memory.stride), len(self._chunks)
        self._chunks += [empty(shape, np.float32) for _ in range(before, chunks)]
        del self._chunks[chunks:]
        addresses = np.array([arrays.address(chunk) for chunk in self._chunks], np.uint64)
        self.memory = self.memory._replace(chunks=arrays.copy_to(self.xp, addresses))

    # The overflow: few rows for a short time, so the host keeps account of them.

    def _forget_overflow(self) -> None:
        self._index, self._rows = HashTable(), np.empty(0, np.int64)
        self._counts, self._dirty = np.empty(0, np.int64), False
        self._used_overflow = 0

    def _overflow(self, tables: Any, ids: Any, rows: Any, counts: Any) -> np.ndarray:
        """Slots of further rows of the overflow."""
        first = len(self._index)
        self._extend(self._own + blocks(first + len(ids), 1 << self.memory.k))
        self._index.insert(tables, ids)
        self._rows = np.concatenate([self._rows, rows])
        self._counts = np.concatenate([self._counts, counts])
        return self._beyond + np.arange(first, first + len(ids))

    def _write_overflow(self) -> None:
        """Write the overflow's rows to the backing."""
        size = 1 << self.memory.k
        for first in range(0, len(self._index), size):
            stop = min(first + size, len(self._index))
            lines = np.empty((stop - first, self._words), np.uint32)
            chunk = self._chunks[self._own + first // size][: stop - first]
            lines[:, :-TAIL] = arrays.to_host(chunk).view(np.uint32)
            write_tails(lines, *self._index.keys(first, stop), self._counts[first:stop])
            self._write(self._rows[first:stop], lines)
        self._dirty = False

    def _settle(self) -> None:
        """Let the overflow's rows go, unless some are in flight and it is not too large."""
        idle = self._used_overflow < self._in_flight
        if len(self._index) and (idle or len(self._index) > self.capacity):
            if self._dirty:
                self._write_overflow()
            self.evictions += len(self._index)
            self._forget_overflow()
            self._extend(self._own)
            self.epoch += 1

    # Look-ups

    def begin(self, *, stays: bool = False, settles: bool = True) -> None:
        """Begin a look-up.

        Parameters
        ----------
        stays : bool
            Whether its rows, and those of look-ups before, are in flight until `end_step`; else its
            own are until the next look-up.
        settles : bool
            Whether the overflow's rows may leave.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        self.now += 1
        self._in_flight = self._since if stays else self.now
        if settles:
            self._settle()

    def find(
        self, tables: Any, ids: Any, counts: Any = None
    ) -> tuple[Any, Any, np.ndarray, np.ndarray]:
        """Return the slot of each key, -1 where it is not here; and which those are.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        counts : (N,) array of int64, optional
            How often each is asked for.

        Returns
        -------
        slots : (N,) array of int64
        missing : (M,) array of int64
        tables, ids : (M,) NumPy arrays
            The missing keys.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        slots, missing, *keys = self.peek(tables, ids, counts)
        self.hits += len(ids) - len(missing)
        self.misses += len(missing)
        return slots, missing, *keys

    def peek(self, tables: Any, ids: Any, counts: Any = None) -> tuple:
        """Return what `find` does, which counts it.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        slots = self._sets.find(tables, ids, self.now, counts)
        missing = self.xp.flatnonzero(slots < 0)
        asked = [arrays.to_host(keys[missing]) for keys in (tables, ids)]
        if not len(self._index) or not len(missing):
            return slots, missing, *asked
        found = self._index.find(*asked)
        here = np.flatnonzero(found >= 0)
        if counts is not None:
            self._counts[found[here]] += arrays.to_host(counts[missing])[here]
        places = arrays.copy_to(self.xp, self._beyond + found[here])
        slots[missing[arrays.copy_to(self.xp, here)]] = places
        self._used_overflow = self.now
        rest = np.flatnonzero(found < 0)
        return slots, missing[arrays.copy_to(self.xp, rest)], *(keys[rest] for keys in asked)

    def admit(
        self, tables: np.ndarray, ids: np.ndarray, rows: np.ndarray, counts: np.ndarray, lines: Any,
        dirty: bool = False,
    ) -> Any:  # fmt: skip
        """Take rows in that `find` did not find; return their slots.

        Others are written to the backing before anything changes.

        Parameters
        ----------
        tables, ids : (M,) NumPy arrays
        rows : (M,) NumPy array of int64
            Their numbers in the backing.
        counts : (M,) NumPy array of int64
        lines : (M, stride + 4) array of uint32, of the cache's device
            Payloads, whose last 4 words are not looked at.
        dirty : bool
            Whether the backing has other words for them.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        xp = self.xp
        keys = [arrays.copy_to(xp, array) for array in (tables, ids)]
        plan = self._sets.plan(tables, ids, self.now, self._in_flight)
        if len(plan.evicted):
            written = np.flatnonzero(arrays.to_host(plan.dirty))
            evicted = plan.evicted[arrays.copy_to(xp, written)]
            self._write_back(evicted, arrays.to_host(plan.rows)[written])
            self.evictions += len(plan.evicted)
            self.epoch += 1
        slots = plan.slots
        over = np.flatnonzero(arrays.to_host(slots) < 0)
        if over.size:
            given = self._overflow(tables[over], ids[over], rows[over], counts[over])
            self._used_overflow, self._dirty = self.now, self._dirty or dirty
            slots = slots.copy()
            slots[arrays.copy_to(xp, over)] = arrays.copy_to(xp, given)
        fill_rows(self.memory, slots, lines)
        told = [arrays.copy_to(xp, array) for array in (rows, counts)]
        self._sets.put(plan.slots, *keys, *told, self.now)
        if dirty:
            self._sets.mark(plan.slots)
        return slots

    def mark(self, slots: Any) -> None:
        """Tell that rows have changed; negative slots are passed over.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        if len(self._index):
            self._dirty = True
            slots = self.xp.where(slots < self.capacity, slots, -1)
        self._sets.mark(slots)

    def end_step(self) -> None:
        """Let rows of look-ups up to now leave when others come.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        self._since = self.now + 1

    # The backing

    def flush(self) -> None:
        """Write all rows to the backing that have changed; they stay here.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        if self._dirty:
            self._write_overflow()
        dirty = self._sets.taken(dirty=True)
        size = max(1, _BLOCK_BYTES // (4 * self._words))
        for first in range(0, len(dirty), size):
            slots = dirty[first : first + size]
            self._write_back(slots, arrays.to_host(self._sets.records(slots).rows))
            self._sets.clean(slots)

    def _write_back(self, slots: Any, rows: np.ndarray) -> None:
        size = max(1, _BLOCK_BYTES // (4 * self._words))
        for first in range(0, len(rows), size):
            some = slots[first : first + size]
            lines = self.xp.empty((len(some), self._words), np.uint32)
            take_rows(self.memory, self._sets, some, lines)
            self._write(rows[first : first + size], fetched(lines))

    def _write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        self.backing.write(rows, lines)
        self.written_bytes += lines.nbytes
        self._tell_written(rows)

    def remove(self, tables: Any, ids: Any) -> None:
        """Forget rows, after `flush`; keys that are not here are passed over.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        self._sets.remove(self._sets.find(tables, ids, self.now))
        self._forget_overflow()
        self._extend(self._own)
        self.epoch += 1

    def clear(self) -> None:
        """Forget all rows without writing them.

        Examples
        --------
        See `cupyrec.embedding.CachedStore`.
        """
        self._sets.clear()
        self._forget_overflow()
        self._extend(self._own)
        self.epoch += 1
