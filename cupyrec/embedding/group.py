"""A group: tables of equal width that share one store, and the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.embedding.initializers import Uniform
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.store import StatePart
from cupyrec.ops.embedding_rows import RowMemory
from cupyrec.ops.segment_sum import segment_sum
from cupyrec.ops.unique_keys import UniqueKeys, unique_keys

__all__ = ["Group"]


class Group:
    """Embedding tables of one width, with rows that appear when their ids do.

    Parameters
    ----------
    width : int
        D, floats of a vector.
    initializer : Uniform
        Vectors of ids not seen before.
    seed : int
        Of the initial vectors, 0 <= seed < 2**64.

    Raises
    ------
    ValueError, TypeError
        `width` is not a positive integer, or `seed` out of range.

    Examples
    --------
    >>> group = Group(4, Uniform(), seed=1)
    >>> tables, ids = np.zeros(2, np.uint32), np.array([5, 5])
    >>> vectors, plan = group.look_up(tables, ids, insert=True)
    >>> vectors.shape, len(group.store)
    ((2, 4), 1)
    """

    def __init__(self, width: int, initializer: Uniform, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"Group: 'seed' must lie in [0, 2**64), got {seed}.")
        self.store = MemoryStore(width)
        self.initializer = initializer
        self.seed = seed
        self._pending: list[tuple[Any, Any]] = []

    xp = property(lambda self: self.store.xp, doc="Array module of the device it is on.")

    def __repr__(self) -> str:
        return f"Group(ids={len(self.store)}, width={self.store.width}, bytes={self.store.nbytes})"

    def _initial(self, tables: Any, ids: Any) -> Any:
        return self.initializer(tables, ids, self.store.width, self.seed)

    def look_up(self, tables: Any, ids: Any, insert: bool) -> tuple[Any, tuple[UniqueKeys, Any]]:
        """Return the vector of each key, and the plan by which its gradient comes back.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        insert : bool
            Whether unseen ids get a row. If not, nothing changes: they get their initial vectors.

        Returns
        -------
        vectors : (N, D) array of float32
        plan : (UniqueKeys, rows)

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Notes
        -----
        On a device it waits twice, for the numbers of unique and of unseen ids.

        Examples
        --------
        See the class.
        """
        keys = unique_keys(tables, ids)
        xp = self.xp
        unseen = xp.empty((0, self.store.width), np.float32)
        if insert:
            rows = self.store.find_or_insert(keys.tables, keys.ids, self._initial)
        else:
            rows = self.store.find(keys.tables, keys.ids)
            new = xp.flatnonzero(rows < 0)
            if new.size:
                unseen = self._initial(keys.tables[new], keys.ids[new])
                rows[new] = -1 - xp.arange(new.size)
        empty = arrays.empty if xp is np else xp.empty
        vectors = empty((ids.size, self.store.width), np.float32)
        self.store.gather(rows, keys.inverse, unseen, vectors)
        return vectors, (keys, rows)

    def add_gradient(self, plan: tuple[UniqueKeys, Any], gradient: Any) -> None:
        """Add the gradient (N, D) of a look-up with `insert` to this step's.

        Examples
        --------
        >>> group = Group(2, Uniform(), seed=1)
        >>> _, plan = group.look_up(np.zeros(2, np.uint32), np.array([5, 5]), insert=True)
        >>> group.add_gradient(plan, np.ones((2, 2), np.float32))
        >>> group.gradients()
        (array([0]), array([[2., 2.]], dtype=float32))
        """
        keys, rows = plan
        self._pending.append((rows, segment_sum(gradient, keys.offsets, keys.positions)))

    def gradients(self) -> tuple[Any, Any]:
        """Return this step's rows, each once, and their summed gradients.

        Returns
        -------
        rows : (U,) array of int64
        gradients : (U, D) array of float32

        Examples
        --------
        See `add_gradient`.
        """
        xp = self.xp
        if not self._pending:
            return xp.empty(0, np.int64), xp.empty((0, self.store.width), np.float32)
        if len(self._pending) > 1:  # several look-ups in one step: one gradient a row
            rows = xp.concatenate([rows for rows, _ in self._pending])
            parts = xp.concatenate([part for _, part in self._pending])
            keys = unique_keys(xp.zeros(rows.size, np.uint32), rows)
            self._pending = [(keys.ids, segment_sum(parts, keys.offsets, keys.positions))]
        return self._pending[0]

    def zero_grad(self) -> None:
        """Forget this step's gradients.

        Examples
        --------
        >>> Group(2, Uniform(), seed=1).zero_grad()
        """
        self._pending = []

    def set_state(self, state: tuple[StatePart, ...]) -> None:
        """Give rows the state that an optimizer needs.

        Examples
        --------
        >>> Group(2, Uniform(), seed=1).set_state((StatePart("sum", 2, 0.0),))
        """
        self.zero_grad()  # its row numbers may not outlive this
        self.store.set_state(state)

    def to(self, xp: ModuleType) -> None:
        """Move the rows to the device of an array module; forget this step's gradients.

        Examples
        --------
        >>> Group(2, Uniform(), seed=1).to(np)
        """
        self.zero_grad()
        self.store.to(xp)

    def clear(self) -> None:
        """Forget all rows and gradients.

        Examples
        --------
        >>> Group(2, Uniform(), seed=1).clear()
        """
        state = self.store.state
        self.zero_grad()
        self.store = MemoryStore(self.store.width, self.xp)
        self.store.set_state(state)

    def update(self, rule: Callable[[RowMemory, Any, Any], None]) -> None:
        """Apply ``rule(memory, rows, gradients)`` to this step's rows.

        Examples
        --------
        >>> Group(2, Uniform(), seed=1).update(lambda memory, rows, gradients: None)
        """
        rows, gradients = self.gradients()
        if rows.size:
            self.store.update(rows, lambda memory, rows: rule(memory, rows, gradients))
