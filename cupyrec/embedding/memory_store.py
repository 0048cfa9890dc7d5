"""The tier `memory`: all rows lie in their device's memory, in chunks that never move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors, interruption
from cupyrec.embedding.row_layout import RowLayout
from cupyrec.embedding.store import Rows, StatePart, Store
from cupyrec.kernel import blocks
from cupyrec.ops.embedding_rows import FLOAT32, RowMemory, vector_words
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.move_rows import move_rows

__all__ = ["MemoryStore"]

_CHUNK_BYTES = 16 << 20
_ROWS = 1 << 16  # rows moved at a time


class MemoryStore(Store):
    """Rows in the memory of one device; it grows by a chunk at a time and without limit.

    The first chunk doubles until it is as large as the others, so that many small stores need
    little. Full chunks never move.

    Parameters
    ----------
    width : int
        D, numbers of a vector.
    xp : module
        Array module of the device, `numpy` by default.
    value : int
        Type of the numbers: FLOAT32, FLOAT16, BFLOAT16 or INT8.

    Raises
    ------
    ValueError
        If `width` is not at least 1.

    Examples
    --------
    >>> store = MemoryStore(2)
    >>> tables, ids = np.zeros(2, np.uint32), np.array([7, -7])
    >>> store.find_or_insert(tables, ids, lambda tables, ids: np.ones((len(ids), 2), np.float32))
    array([0, 1])
    >>> store.export_rows(1, 2).vectors
    array([[1., 1.]], dtype=float32)
    """

    def __init__(self, width: int, xp: ModuleType = np, value: int = FLOAT32) -> None:
        self.width, self.value = errors.positive("MemoryStore", "width", width), value
        self._lay_out((), xp)

    def _lay_out(self, state: tuple[StatePart, ...], xp: ModuleType) -> None:
        """Start empty on a device, with rows of this state."""
        self.state, self._layout = state, RowLayout(self.width, self.value, state)
        self._index = HashTable(xp)
        self._chunks: list[Any] = []
        self._counted, self._counts = 0, np.zeros(0, np.int64)  # rows, and ids of each table
        self._new = 0, 0  # rows of the last look-up that inserted
        stride = self._layout.stride
        k = max(0, (_CHUNK_BYTES // (4 * stride)).bit_length() - 1)
        self._memory = RowMemory(xp.empty(0, np.uint64), k, stride, self.value)

    xp = property(lambda self: self._index.xp)
    load = property(lambda self: self._index.load)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def row_bytes(self) -> int:
        """Bytes a row, state and padding included, its key apart."""
        return self._memory.stride * 4

    @property
    def nbytes(self) -> int:
        """Bytes of keys and rows; on a device with those that wait for more rows.

        On the CPU these are addresses only, until they are written to.
        """
        if self.xp is np:
            return self._index.nbytes + len(self) * self.row_bytes
        return self._index.nbytes + sum(chunk.nbytes for chunk in self._chunks)

    def find(self, tables: Any, ids: Any, again: bool = False) -> Any:
        return self._index.find(tables, ids)

    @interruption.held()
    def find_or_insert(
        self, tables: Any, ids: Any, initial: Callable[[Any, Any], Any], offsets: Any = None
    ) -> Any:
        first = len(self)
        rows = self._index.find_or_insert(tables, ids)
        if len(self) > first:
            try:
                for start in range(first, len(self), _ROWS):
                    new = self._index.keys(start, min(start + _ROWS, len(self)))
                    self._write(start, *new, initial(*new), {})
            except BaseException:
                self._index.truncate(first)  # else these keys would have rows that nothing wrote
                raise
        self._new = first, len(self)
        return rows

    def places(self, first: int, stop: int) -> Any:
        return self.xp.arange(first, stop)

    def read(self, places: Any, reader: Callable[[RowMemory, Any], Any]) -> Any:
        return reader(self._memory, places)

    def update(self, places: Any, rule: Callable[[RowMemory, Any], None]) -> None:
        rule(self._memory, places)

    @interruption.held()
    def delete(self, tables: Any, ids: Any) -> None:
        moved_from, moved_to = self._index.delete(tables, ids)
        move_rows(self._memory, moved_from, moved_to)
        self._counted, self._counts, self._new = 0, np.zeros(0, np.int64), (0, 0)
        used = -(-len(self) >> self._memory.k)
        if used < len(self._chunks):
            del self._chunks[used:]
            self._memory = self._memory._replace(chunks=self._memory.chunks[:used].copy())

    def keys(self, first: int, stop: int) -> tuple[Any, Any]:
        return self._index.keys(first, stop)

    def table_counts(self, num_tables: int) -> np.ndarray:
        self._counts = np.pad(self._counts, (0, max(0, num_tables - len(self._counts))))
        while self._counted < len(self):
            stop = min(self._counted + _ROWS, len(self))
            self._counts = self._counts + _by_table(self.keys(self._counted, stop)[0], num_tables)
            self._counted = stop
        return self._counts

    def new_counts(self, num_tables: int) -> np.ndarray:
        return _by_table(self.keys(*self._new)[0], num_tables)

    @interruption.held()
    def set_state(self, state: tuple[StatePart, ...]) -> None:
        other = MemoryStore(self.width, self.xp, self.value)
        other._lay_out(state, self.xp)
        other._reserve(len(self))  # on the CPU addresses only: see `nbytes`
        other._index = self._index  # keys keep their rows
        chunks, size = self._chunks, 1 << self._memory.k
        kept = other._layout.kept(self._layout)
        vars(self).update(vars(other))
        initial = self._layout.initial_state(self.xp, 1, {})

        for c in range(len(chunks)):
            self._fill(c * size, min((c + 1) * size, len(self)), chunks[c], initial, kept)
            chunks[c] = None  # let go

    def _fill(
        self, first: int, stop: int, former: Any, state: Any, kept: tuple[slice, slice]
    ) -> None:
        """Write rows with vectors of a chunk of another layout, and this state (1, words), where
        that chunk doesn't tell it: see `RowLayout.kept`."""
        size, at = 1 << self._memory.k, vector_words(self.width, self.value)
        for c in range(first // size, blocks(stop, size)):
            i, j = max(first, c * size), min(stop, (c + 1) * size)
            rows = self._chunks[c][i - c * size : j - c * size]
            rows[:, :at] = former[i - first : j - first, :at]
            rows[:, at : at + state.shape[1]] = state
            rows[:, at + state.shape[1] :] = 0
            rows[:, kept[0]] = former[i - first : j - first, kept[1]]

    def clear(self) -> None:
        self._lay_out(self.state, self.xp)

    def to(self, xp: ModuleType) -> None:
        if xp is self.xp:
            return
        other = MemoryStore(self.width, xp, self.value)
        other._lay_out(self.state, xp)
        for first in range(0, len(self), _ROWS):
            other.import_rows(self.export_rows(first, min(first + _ROWS, len(self))))
        vars(self).update(vars(other))

    def export(self) -> Iterator[Rows]:
        for first in range(0, len(self), _ROWS):
            yield self.export_rows(first, min(first + _ROWS, len(self)))

    def export_rows(self, first: int, stop: int) -> Rows:
        if not 0 <= first <= stop <= len(self):
            raise ValueError(
                f"export_rows: 0 <= first <= stop <= {len(self)} must hold, got {first}, {stop}."
            )
        return _on_host(self._copies(first, stop))

    def _copies(self, first: int, stop: int) -> Rows:
        """Rows, on their device."""
        words = self.xp.empty((stop - first, self._memory.stride), np.float32)
        size = 1 << self._memory.k
        for c in range(first // size, -(-stop // size)):
            i, j = max(first, c * size), min(stop, (c + 1) * size)
            words[i - first : j - first] = self._chunks[c][i - c * size : j - c * size]
        return Rows(*self._index.keys(first, stop), *self._layout.taken_apart(words))

    @interruption.held()
    def import_rows(self, rows: Rows) -> None:
        tables, ids, vectors, states = self._layout.received(rows, self.xp)
        self._write(len(self), tables, ids, vectors, states)
        self._index.insert(tables, ids)

    def _write(
        self, first: int, tables: Any, ids: Any, vectors: Any, states: dict[str, Any]
    ) -> None:
        """Write new rows from number `first` on, into new chunks where the old ones are full."""
        self._reserve(first + len(vectors))
        self._layout.write(self._memory, first, tables, ids, vectors, states)

    def _reserve(self, count: int) -> None:
        """Make room for `count` rows: all of it or, where memory runs short, none."""
        rows = min(1 << self._memory.k, 1 << (count - 1).bit_length())  # of each chunk
        grows = bool(self._chunks) and len(self._chunks[0]) < rows  # the first, and only, one
        known = 0 if grows else len(self._chunks)
        empty, shape = arrays.pages if self.xp is np else self.xp.empty, (rows, self._memory.stride)
        made = [empty(shape, np.float32) for _ in range(known, blocks(count, rows))]
        if grows:
            made[0][: len(self._chunks[0])] = self._chunks[0]
        if made:
            self._chunks[known:] = made
            self._locate(known)

    def _locate(self, first: int) -> None:
        """Tell loops and kernels where the chunks from number `first` on lie.

        They get a new array: launches that are still to run have the old one.
        """
        addresses = np.array([arrays.address(c) for c in self._chunks[first:]], np.uint64)
        known = self._memory.chunks[:first]
        chunks = self.xp.concatenate([known, arrays.copy_to(self.xp, addresses)])
        self._memory = self._memory._replace(chunks=chunks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._locate(0)  # a copy's chunks lie elsewhere


def _by_table(tables: Any, num_tables: int) -> np.ndarray:
    return np.bincount(arrays.to_host(tables), minlength=num_tables)


def _on_host(rows: Rows) -> Rows:
    states = {name: arrays.to_host(a) for name, a in rows.states.items()}
    return Rows(*(arrays.to_host(a) for a in rows[:3]), states)
