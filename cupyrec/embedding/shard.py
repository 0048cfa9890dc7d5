"""The rows of a group that lie on this rank: found, made with initial vectors, caught up."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, bulk
from cupyrec.embedding.initializers import InitialVectors
from cupyrec.embedding.look_up import LookUp
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.row_gradients import RowGradients
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.catch_up_adam import catch_up_rows, caught_up_vectors
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, Rounding, gather_rows
from cupyrec.ops.stochastic_rounding import round_rows
from cupyrec.ops.unique_keys import UniqueKeys

__all__ = ["Shard"]

_ROWS = 1 << 16  # rows caught up at a time
_VALUES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


class Shard:
    """Rows of one width in a store, of which those of catch-up Adam may owe steps.

    Parameters
    ----------
    initial : InitialVectors
    dtype : str
        Of the vectors in memory: ``float32``, ``float16`` or ``bfloat16``.

    Raises
    ------
    ValueError
        An unknown `dtype`.

    Examples
    --------
    >>> from cupyrec.embedding import Constant
    >>> shard = Shard(InitialVectors(2, Constant(3.0), seed=1), "float32")
    >>> len(shard.store), shard.width
    (0, 2)
    """

    def __init__(self, initial: InitialVectors, dtype: str) -> None:
        if dtype not in _VALUES:
            raise ValueError(f"Group: 'dtype' must be one of {list(_VALUES)}, got '{dtype}'.")
        self.initial, self.dtype = initial, dtype
        self.store = MemoryStore(initial.width, value=_VALUES[dtype])
        self.history: AdamHistory | None = None  # of an optimizer whose rows catch up
        self.updates = 0  # goes up where optimizers step or are made

    xp = property(lambda self: self.store.xp, doc="Array module of the device it is on.")
    width = property(lambda self: self.initial.width, doc="D, floats of a vector.")
    _reached = property(lambda self: (self.history, len(self.history or ()), self.updates))

    def _initial(self, tables: Any, ids: Any) -> Any:
        """Initial vectors, as rows will hold them."""
        vectors = self.initial(tables, ids)
        if self.store.value == FLOAT32:
            return vectors
        codes = round_rows(vectors, tables, ids, self.initial.seed, 0, self.store.value)
        if self.store.value == FLOAT16:
            return codes.view(np.float16).astype(np.float32)
        return (codes.astype(np.uint32) * 65536).view(np.float32)

    def _rounding(self, tables: Any, ids: Any, step: int) -> Rounding | None:
        if self.store.value == FLOAT32:
            return None
        return Rounding(tables, ids, self.initial.seed, step)

    def _find(self, keys: UniqueKeys, insert: bool) -> tuple[Any, Any]:
        """The place of each key of this rank, or -1 - j for vector j of the second array."""
        xp, unseen = self.xp, self.xp.empty((0, self.width), np.float32)
        if insert:
            rows = self.store.find_or_insert(keys.tables, keys.ids, self._initial, keys.offsets)
            self._catch_up(rows, keys.tables, keys.ids)
            return rows, unseen
        rows = self.store.find(keys.tables, keys.ids)
        new = xp.flatnonzero(rows < 0)
        if new.size:
            unseen = self._initial(keys.tables[new], keys.ids[new])
            rows[new] = -1 - xp.arange(new.size)
        if self.history is not None and new.size < rows.size:
            known = xp.flatnonzero(rows >= 0)
            current = self.current_vectors(rows[known])
            rows[known] = -1 - len(unseen) - xp.arange(known.size)
            unseen = xp.concatenate([unseen, current])
        return rows, unseen

    def _catch_up(self, rows: Any, tables: Any, ids: Any) -> None:
        """Let rows make up for the steps that they were not in, if an optimizer asks for it."""
        if self.history is None:
            return
        rounding = self._rounding(tables, ids, len(self.history))
        self.store.update(
            rows,
            lambda memory, rows: catch_up_rows(
                memory, rows, self.width, self.history, rounding=rounding
            ),
        )

    def _catch_up_all(self) -> None:
        if self.history is not None:
            for first in range(0, len(self.store), _ROWS):
                rows = self.store.places(first, min(first + _ROWS, len(self.store)))
                self._catch_up(rows, *self.store.keys(first, first + rows.size))

    def current_vectors(self, rows: Any) -> Any:
        """Return the vectors (U, D) of rows as they would be caught up; nothing changes.

        Examples
        --------
        >>> from cupyrec.embedding import Constant
        >>> shard = Shard(InitialVectors(2, Constant(3.0), seed=1), "float32")
        >>> shard.current_vectors(np.empty(0, np.int64)).shape
        (0, 2)
        """
        if self.history is not None:
            return self.store.read(
                rows, lambda memory, rows: caught_up_vectors(memory, rows, self.width, self.history)
            )
        out, every = self._empty(rows.size, self.width), self.xp.arange(rows.size)
        unseen = self.xp.empty((0, self.width), np.float32)
        self.store.read(rows, lambda memory, rows: gather_rows(memory, rows, every, unseen, out))
        return out

    def _places(self, look_up: LookUp) -> Any:
        """Where the rows of a look-up lie now."""
        if look_up.epoch == self.store.epoch:
            return look_up.rows
        known, rows = self.xp.flatnonzero(look_up.rows >= 0), look_up.rows.copy()
        rows[known] = self.store.find(look_up.keys.tables[known], look_up.keys.ids[known])
        return rows

    def _of_all_rows(self, gradients: RowGradients, l2: Any) -> RowGradients:
        self._catch_up_all()  # after a step that a device left out, or lazy training
        count = len(self.store)
        values = bulk.scattered(gradients.values, gradients.rows, count)
        rows = self.store.places(0, count)
        if l2 is not None:
            values += l2 * self.current_vectors(rows)
        return RowGradients(rows, values, *self.store.keys(0, count))

    def _empty(self, *shape: int, dtype: Any = np.float32) -> Any:
        return (arrays.empty if self.xp is np else self.xp.empty)(shape, dtype)
