"""The tier `memory`: all rows lie in host memory, in chunks that never move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyrec import errors
from cupyrec.embedding.store import Rows, StatePart, Store
from cupyrec.ops.embedding_rows import RowMemory, gather_rows, write_rows
from cupyrec.ops.hash_table import HashTable

__all__ = ["MemoryStore"]

_CHUNK_BYTES = 16 << 20
_ROWS = 1 << 16  # rows moved at a time


class MemoryStore(Store):
    """Rows in host memory; it grows by a chunk at a time and without limit.

    Parameters
    ----------
    width : int
        D, floats of a vector.

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

    def __init__(self, width: int) -> None:
        self.width = errors.positive("MemoryStore", "width", width)
        self._lay_out(())

    def _lay_out(self, state: tuple[StatePart, ...]) -> None:
        """Start empty, with rows of this state."""
        self.state = state
        self._index = HashTable()
        self._chunks: list[np.ndarray] = []
        stride = -(-(self.width + sum(part.columns for part in state)) // 4) * 4
        k = max(0, (_CHUNK_BYTES // (4 * stride)).bit_length() - 1)
        self._memory = RowMemory(np.empty(0, np.uint64), k, stride)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + len(self) * self._memory.stride * 4

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self._index.find(tables, ids)

    def find_or_insert(
        self,
        tables: np.ndarray,
        ids: np.ndarray,
        initial: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        rows = self._index.find(tables, ids)
        new = np.flatnonzero(rows < 0)
        if new.size:
            rows[new] = np.arange(len(self), len(self) + new.size)
            tables, ids = tables[new], ids[new]
            self.import_rows(Rows(tables, ids, initial(tables, ids), {}))
        return rows

    def gather(
        self, rows: np.ndarray, inverse: np.ndarray, unseen: np.ndarray, out: np.ndarray
    ) -> None:
        gather_rows(self._memory, rows, inverse, unseen, out)

    def update(self, rows: np.ndarray, rule: Callable[[RowMemory, np.ndarray], None]) -> None:
        rule(self._memory, rows)

    def set_state(self, state: tuple[StatePart, ...]) -> None:
        if state == self.state:
            return
        other = MemoryStore(self.width)
        other._lay_out(state)
        for first in range(0, len(self), _ROWS):
            other.import_rows(self.export_rows(first, min(first + _ROWS, len(self))))
        vars(self).update(vars(other))

    def export_rows(self, first: int, stop: int) -> Rows:
        if not 0 <= first <= stop <= len(self):
            raise ValueError(
                f"export_rows: 0 <= first <= stop <= {len(self)} must hold, got {first}, {stop}."
            )
        values = np.empty((stop - first, self._memory.stride), np.float32)
        size = 1 << self._memory.k
        for c in range(first // size, -(-stop // size)):
            i, j = max(first, c * size), min(stop, (c + 1) * size)
            values[i - first : j - first] = self._chunks[c][i - c * size : j - c * size]
        parts, at = {}, self.width
        for part in self.state:
            parts[part.name] = values[:, at : at + part.columns]
            at += part.columns
        return Rows(
            self._index.tables[first:stop].copy(),
            self._index.ids[first:stop].copy(),
            values[:, : self.width],
            parts,
        )

    def import_rows(self, rows: Rows) -> None:
        n = errors.axes(
            "import_rows",
            tables=(rows.tables, "N"),
            ids=(rows.ids, "N"),
            vectors=(rows.vectors, f"N {self.width}"),
        )[0]
        first = len(self)
        size = 1 << self._memory.k
        while len(self._chunks) * size < first + n:
            self._chunks.append(np.empty((size, self._memory.stride), np.float32))
            self._locate(len(self._chunks) - 1)
        values = [rows.vectors]
        for part in self.state:
            if part.name in rows.states:
                values.append(rows.states[part.name])
            else:
                values.append(np.full((n, part.columns), part.initial, np.float32))
        write_rows(self._memory, first, np.concatenate(values, axis=1))
        self._index.insert(rows.tables, rows.ids)

    def _locate(self, first: int) -> None:
        """Tell the loops where the chunks from number `first` on lie."""
        addresses = [chunk.ctypes.data for chunk in self._chunks[first:]]
        known = self._memory.chunks[:first]
        chunks = np.concatenate([known, np.array(addresses, np.uint64)])
        self._memory = self._memory._replace(chunks=chunks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._locate(0)  # a copy's chunks lie elsewhere
