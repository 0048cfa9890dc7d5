"""The tiers `cached_host` and `cached_ssd`: a cache on the device over all rows elsewhere.

    key -> slot of the cache (`RowCache`), which is all that is asked for a row that is there, else
    key -> row number (`KeyIndex`, on the host) -> payload (`HostRows` or `RowLog`) -> slot

The index compares keys by their hash alone; the payload has the key itself. New rows are made in
the cache. The backing gets a row when it leaves the cache, and all rows that have changed before
they are exported or saved. A bit of each row tells whether its payload is there: if not, the row
is in the cache, and who misses it there asks for another key of equal hash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cupyrec import arrays, errors, interruption, timeline
from cupyrec.embedding.read_ahead import ReadAhead
from cupyrec.embedding.row_cache import TAIL, Backing, RowCache, payload_keys, write_tails
from cupyrec.embedding.row_layout import RowLayout, lines_as_memory
from cupyrec.embedding.store import Rows, StatePart, Store
from cupyrec.ops.embedding_rows import FLOAT32, RowMemory
from cupyrec.ops.key_index import KeyIndex
from cupyrec.ops.row_bits import RowBits
from cupyrec.parallel.devices import pinned

__all__ = ["Backings", "CachedStore"]

_ROWS = 1 << 14  # rows moved at a time
_METRICS = "hits", "misses", "evictions", "read_bytes", "written_bytes"


class Backings(Protocol):
    """Where backings come from."""

    def existing(self) -> Backing | None:
        """Return the one that was saved, if one was."""

    def make(self, words: int) -> Backing:
        """Return an empty one, of payloads of so many words."""

    def drop(self, backing: Backing) -> None:
        """Let one go, with its rows."""


class CachedStore(Store):
    """Rows of which a device's memory holds those that are asked for most.

    Parameters
    ----------
    width : int
        D, numbers of a vector.
    backings : Backings
    cache_rows : callable
        ``cache_rows(bytes a row)`` tells how many rows the cache is to have.
    xp : module
        Array module of the device, `numpy` by default.
    value : int
        Type of the numbers: FLOAT32, FLOAT16, BFLOAT16 or INT8.

    Raises
    ------
    ValueError
        The backing that was saved has rows of another width or type.

    Examples
    --------
    >>> from cupyrec.embedding.tier import CachedHost
    >>> store = CachedHost(cache_rows=1).store("", 2)
    >>> tables, ids = np.zeros(100, np.uint32), np.arange(100)
    >>> places = store.find_or_insert(tables, ids, lambda tables, ids: np.ones((len(ids), 2), "f"))
    >>> len(store), store.export_rows(99, 100).vectors
    (100, array([[1., 1.]], dtype=float32))
    """

    def __init__(
        self,
        width: int,
        backings: Backings,
        cache_rows: Callable[[int], int],
        xp: ModuleType = np,
        value: int = FLOAT32,
    ) -> None:
        self.width, self.value = errors.positive("CachedStore", "width", width), value
        self.xp, self._backings, self._cache_rows = xp, backings, cache_rows
        self._former = dict.fromkeys(_METRICS, 0)  # of caches before this one
        self._former_epoch = 0
        self.state, self._layout = (), RowLayout(width, value, ())
        if (backing := backings.existing()) is None:
            self._start(backings.make(self._words))
            return
        try:
            self.state = self._saved_state(backing.meta)
            self._layout = RowLayout(width, value, self.state)
            self._start(backing)
            self._find_again()
        except BaseException:
            backing.close()
            raise

    def _start(self, backing: Backing) -> None:
        """Start with a backing, as if it were empty."""
        self._backing, self._index, self._len = backing, KeyIndex(), 0
        self._counts, self._new = np.zeros(0, np.int64), np.empty(0, np.uint32)
        self._ahead, self._backed = ReadAhead(backing, self._words), RowBits()
        self._make_cache()

    def _make_cache(self) -> None:
        if (cache := vars(self).get("_cache")) is not None:
            self._former = self.metrics()
            self._former_epoch += cache.epoch + 1
        stride, ahead, backed = self._layout.stride, self._ahead, self._backed

        def written(rows: np.ndarray) -> None:
            backed.set(rows)
            ahead.written(rows)

        rows = max(1, self._cache_rows(4 * stride))
        self._cache = RowCache(rows, stride, self.value, self._backing, self.xp, written)

    def _find_again(self) -> None:
        """Make the index of the backing's rows."""
        for rows, lines in self._backing.records():
            tables, ids, _ = payload_keys(lines)
            self._index.insert(tables, ids, rows)
            self._count(tables, 1)
        self._len = len(self._backing)
        self._backed.fill(self._len)

    @property
    def _words(self) -> int:
        return self._layout.stride + TAIL

    def __len__(self) -> int:
        return self._len

    @property
    def epoch(self) -> int:
        """Goes up where places may have become other rows'."""
        return self._former_epoch + self._cache.epoch

    @property
    def nbytes(self) -> int:
        """Bytes of rows, where their tier keeps them, of the index and the cache."""
        rows = len(self) * self._words * 4 if self._backing.in_memory else self._backing.disk_bytes
        return rows + self.memory_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index and the cache, and what the backing needs to find rows."""
        own = 0 if self._backing.in_memory else self._backing.nbytes
        return own + self._index.nbytes + self._backed.nbytes + self._cache.nbytes

    load = property(lambda self: self._index.load)
    reads_ahead = property(lambda self: not self._backing.in_memory or self.xp is not np)

    # Look-ups

    @interruption.held()
    def find(self, tables: Any, ids: Any, again: bool = False) -> Any:
        return self._look_up(tables, ids, None, None, again)

    @interruption.held()
    def find_or_insert(
        self, tables: Any, ids: Any, initial: Callable[[Any, Any], Any], offsets: Any = None
    ) -> Any:
        counts = self.xp.ones(len(ids), np.int64) if offsets is None else offsets[1:] - offsets[:-1]
        return self._look_up(tables, ids, initial, counts)

    def _look_up(
        self,
        tables: Any,
        ids: Any,
        initial: Callable[[Any, Any], Any] | None,
        counts: Any,
        again: bool = False,
    ) -> Any:
        xp, cache, learns = self.xp, self._cache, initial is not None
        cache.begin(stays=learns or again, settles=not again)
        slots, missing, tables, ids = cache.find(tables, ids, counts)
        if learns:
            self._new = np.empty(0, np.uint32)
        if not len(missing):
            return slots
        known, rows, lines, seen = self._read(tables, ids)
        new = np.flatnonzero(np.bincount(known, minlength=len(ids)) == 0) if learns else known[:0]
        order = np.concatenate([known, new])
        tables, ids, missing = tables[order], ids[order], missing[arrays.copy_to(xp, order)]
        if counts is not None:
            seen = np.pad(seen, (0, new.size)) + arrays.to_host(counts[missing])
        rows = np.concatenate([rows, np.arange(len(self), len(self) + new.size)])
        first = known.size
        lines = self._staged(lines, tables[first:], ids[first:], initial)
        self._index.insert(tables[first:], ids[first:], rows[first:])
        try:
            admitted = cache.admit(tables, ids, rows, seen, lines)
        except BaseException:
            self._index.delete(tables[first:], ids[first:])
            raise
        if new.size:
            cache.mark(admitted[first:])
            self._len += new.size
            self._new = tables[first:]
            self._count(self._new, 1)
        slots[missing] = admitted
        return slots

    def _read(self, tables: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of keys that the cache hasn't: which there are; their rows, payloads and counts."""
        rows = self._index.find(tables, ids)
        known = np.flatnonzero(self._backed.has(rows))
        rows = rows[known]
        once, key_of = _each_once(rows)
        lines = pinned(self.xp, (once.size, self._words), np.uint32)
        with timeline.span("read rows"):
            self._ahead.read(once, lines)
        self._cache.read_bytes += lines.nbytes
        lines = lines if key_of is None else lines[key_of]
        its_tables, its_ids, counts = payload_keys(lines)
        same = (its_tables == tables[known]) & (its_ids == ids[known])
        if same.all():
            return known, rows, lines, counts
        return known[same], rows[same], lines[same], counts[same]  # others have equal hash bits

    def _staged(self, lines: np.ndarray, tables: np.ndarray, ids: np.ndarray, initial: Any) -> Any:
        """Payloads on the device: those that were read, then those of new keys."""
        xp, first = self.xp, len(lines)
        if not len(ids):
            return arrays.copy_to(xp, lines)
        staged = (arrays.empty if xp is np else xp.empty)(
            (first + len(ids), self._words), np.uint32
        )
        staged[:first] = arrays.copy_to(xp, lines)
        keys = [arrays.copy_to(xp, array) for array in (tables, ids)]
        memory = lines_as_memory(staged[first:], self.value)
        self._layout.write(memory, 0, *keys, initial(*keys), {})
        return staged

    @interruption.held()
    def prefetch(self, tables: Any, ids: Any) -> None:
        _, _, *keys = self._cache.peek(tables, ids)
        rows = self._index.find(*keys)
        self._ahead.begin(_each_once(rows[self._backed.has(rows)])[0])

    def end_step(self) -> None:
        self._cache.end_step()

    def places(self, first: int, stop: int) -> Any:
        keys = self.keys(first, stop)
        return self.find(*(arrays.copy_to(self.xp, array) for array in keys))

    def read(self, places: Any, reader: Callable[[RowMemory, Any], Any]) -> Any:
        return reader(self._cache.memory, places)

    def update(self, places: Any, rule: Callable[[RowMemory, Any], None]) -> None:
        self._cache.mark(places)  # before: if it is cut short, some have changed
        rule(self._cache.memory, places)

    # Keys

    def keys(self, first: int, stop: int) -> tuple[Any, Any]:
        tables, ids, _ = payload_keys(self._payloads(first, stop))
        return arrays.copy_to(self.xp, tables), arrays.copy_to(self.xp, ids)

    def _payloads(self, first: int, stop: int) -> np.ndarray:
        if not 0 <= first <= stop <= len(self):
            raise ValueError(
                f"export_rows: 0 <= first <= stop <= {len(self)} must hold, got {first}, {stop}."
            )
        self._flush()
        lines = np.empty((stop - first, self._words), np.uint32)
        self._backing.read(np.arange(first, stop), lines)
        return lines

    def _count(self, tables: np.ndarray, sign: int) -> None:
        more = np.bincount(tables)
        total = np.zeros(max(len(more), len(self._counts)), np.int64)
        total[: len(self._counts)] = self._counts
        total[: len(more)] += sign * more
        self._counts = total

    def table_counts(self, num_tables: int) -> np.ndarray:
        return _padded(np.trim_zeros(self._counts, "b"), num_tables)

    def new_counts(self, num_tables: int) -> np.ndarray:
        return _padded(np.bincount(self._new), num_tables)

    def delete(self, tables: Any, ids: Any) -> None:
        self._ahead.forget()
        for i in range(0, len(ids), _ROWS):
            self._delete(*(arrays.to_host(a)[i : i + _ROWS] for a in (tables, ids)))

    @interruption.held()
    def _delete(self, tables: np.ndarray, ids: np.ndarray) -> None:
        """Delete some keys. The last rows take their numbers, in the cache."""
        self._flush()
        known, rows, *_ = self._read(tables, ids)
        rows, first = np.unique(rows, return_index=True)
        tables, ids = tables[known][first], ids[known][first]
        stop = len(self) - rows.size
        movers = np.setdiff1d(np.arange(stop, len(self)), rows, assume_unique=True)
        lines, holes = np.empty((movers.size, self._words), np.uint32), rows[rows < stop]
        self._backing.read(movers, lines)
        *moved, counts = payload_keys(lines)
        for some in ((tables, ids), moved):
            self._cache.remove(*(arrays.copy_to(self.xp, a) for a in some))
        self._backed.clear(holes)  # which have payloads of deleted keys
        self._cache.admit(*moved, holes, counts, arrays.copy_to(self.xp, lines), dirty=True)
        self._index.delete(tables, ids)
        self._index.replace(*moved, holes)
        self._len, self._new = stop, np.empty(0, np.uint32)
        self._count(tables, -1)
        with contextlib.suppress(OSError):  # done: `_flush` lets the backing follow
            self._truncate(stop)

    def _flush(self) -> None:
        """Let the backing have what this store has."""
        self._cache.flush()
        if len(self._backing) > len(self):  # an error left them
            self._truncate(len(self))

    def _truncate(self, count: int) -> None:
        self._ahead.forget()  # which may be reading what goes
        self._backed.truncate(count)
        self._backing.truncate(count)

    # All rows

    @interruption.held()
    def set_state(self, state: tuple[StatePart, ...]) -> None:
        if state == self.state and not len(self):
            return
        self._ahead.forget()  # what reads from the backing that goes
        self._flush()
        former, layout = self._backing, RowLayout(self.width, self.value, state)
        at = RowLayout(self.width, self.value, ()).words
        words = layout.initial_state(np, 1, {}).view(np.uint32)
        here, there = layout.kept(self._layout)
        backing, index, count = self._backings.make(layout.stride + TAIL), KeyIndex(), 0
        try:
            for _, lines in former.records():
                moved = np.zeros((len(lines), layout.stride + TAIL), np.uint32)
                moved[:, :at], moved[:, at : layout.words] = lines[:, :at], words
                moved[:, here] = lines[:, there]
                moved[:, -TAIL:] = lines[:, -TAIL:]
                tables, ids, _ = payload_keys(lines)
                rows = np.arange(count, count + len(lines))
                backing.write(rows, moved)
                index.insert(tables, ids, rows)
                count += len(lines)
            if former.meta:
                backing.commit(self._meta(state))  # before what was saved goes
        except BaseException:  # the disk is full, say
            self._backings.drop(backing)
            raise
        counts = self._counts
        self.state, self._layout = state, layout
        self._start(backing)
        self._index, self._len, self._counts = index, count, counts
        self._backed.fill(count)
        self._backings.drop(former)

    @interruption.held()
    def clear(self) -> None:
        self._truncate(0)
        self._start(self._backing)

    @interruption.held()
    def to(self, xp: ModuleType) -> None:
        if xp is not self.xp:
            self._flush()
            self.xp = xp
            self._make_cache()

    def export(self) -> Iterator[Rows]:
        self._flush()
        for _, lines in self._backing.records():
            yield self._rows(lines)

    def export_rows(self, first: int, stop: int) -> Rows:
        return self._rows(self._payloads(first, stop))

    def _rows(self, lines: np.ndarray) -> Rows:
        tables, ids, _ = payload_keys(lines)
        return Rows(tables, ids, *self._layout.taken_apart(lines.view(np.float32)))

    @interruption.held()
    def import_rows(self, rows: Rows) -> None:
        tables, ids, vectors, states = self._layout.received(rows, np)
        for i in range(0, len(ids), _ROWS):
            j = min(i + _ROWS, len(ids))
            lines, number = np.empty((j - i, self._words), np.uint32), len(self) + np.arange(j - i)
            some = tables[i:j], ids[i:j]
            parts = {name: state[i:j] for name, state in states.items()}
            memory = lines_as_memory(lines, self.value)
            self._layout.write(memory, 0, *some, vectors[i:j], parts)
            write_tails(lines, *some, 0)
            self._backing.write(number, lines)
            self._backed.set(number)
            self._index.insert(*some, number)
            self._len += j - i
            self._count(tables[i:j], 1)

    # What lasts

    @interruption.held()
    def save(self) -> None:
        self._flush()
        self._backing.commit(self._meta(self.state))

    def _meta(self, state: tuple[StatePart, ...]) -> dict[str, Any]:
        parts = [[p.name, p.columns, p.initial, np.dtype(p.dtype).name] for p in state]
        return {"width": self.width, "value": self.value, "state": parts}

    def _saved_state(self, meta: dict[str, Any]) -> tuple[StatePart, ...]:
        own, saved = (self.width, self.value), (meta["width"], meta["value"])
        if own != saved:
            raise ValueError(
                f"CachedStore: rows that were saved must have width and type {own}, got {saved}."
            )
        return tuple(StatePart(*part[:3], np.dtype(part[3]).type) for part in meta["state"])

    def close(self) -> None:
        self._ahead.forget()
        self._backing.close()

    def metrics(self) -> dict[str, int]:
        """Return hits, misses, evictions, read_bytes and written_bytes so far: see `RowCache`."""
        return {key: self._former[key] + getattr(self._cache, key) for key in _METRICS}

    def __deepcopy__(self, memo: dict) -> CachedStore:
        raise TypeError("CachedStore: a table with a cache must be saved and loaded, got a copy.")


def _each_once(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows, and where each stands if keys of equal hash, of which one has it, share one."""
    ascending = np.sort(rows)
    if (ascending[1:] > ascending[:-1]).all():
        return rows, None
    return np.unique(rows, return_inverse=True)


def _padded(counts: np.ndarray, num_tables: int) -> np.ndarray:
    return np.pad(counts, (0, num_tables - len(counts)))
