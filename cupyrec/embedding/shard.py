"""The rows of a group that lie on this rank: found, made with initial vectors, caught up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyrec import arrays, bulk
from cupyrec.embedding.initializers import InitialVectors, Uniform
from cupyrec.embedding.life import LIFE, Life, gone
from cupyrec.embedding.look_up import LookUp
from cupyrec.embedding.row_gradients import RowGradients
from cupyrec.embedding.store import Store
from cupyrec.embedding.tier import Memory, Tier
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.bags import pool_rows, weight_gradient
from cupyrec.ops.catch_up_adam import catch_up_rows, caught_up_vectors
from cupyrec.ops.embedding_rows import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    Rounding,
    RowMemory,
    gather_rows,
    vector_words,
)  # fmt: skip
from cupyrec.ops.int8_codec import int8_decode, int8_encode
from cupyrec.ops.row_life import touch_rows
from cupyrec.ops.row_memory import check_learns, is_half
from cupyrec.ops.stochastic_rounding import round_rows
from cupyrec.ops.unique_keys import UniqueKeys

__all__ = ["Shard"]

_ROWS = 1 << 16  # rows caught up at a time
_ODD = 0x9E3779B97F4A7C15  # between the seeds of steps
_VALUES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8}


class Shard:
    """Rows of one width in a store, of which those of catch-up Adam may owe steps.

    Parameters
    ----------
    initial : InitialVectors
    dtype : str
        Of the vectors in memory: ``float32``, ``float16``, ``bfloat16`` or ``int8``.

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
        self.tier: Tier = Memory()
        self.store: Store = self.tier.store("", initial.width, value=_VALUES[dtype])
        self.history: AdamHistory | None = None  # of an optimizer whose rows catch up
        self.life: Life | None = None  # of ids, if it is kept account of
        self.candidates: Shard | None = None  # ids that have no row yet
        self.based_on(None)
        self.clock = 0  # optimizer steps so far
        self.numbering = 0  # goes up where rows get other numbers, or another device
        self.updates = 0  # goes up where optimizers step or are made

    xp = property(lambda self: self.store.xp, doc="Array module of the device it is on.")
    width = property(lambda self: self.initial.width, doc="D, floats of a vector.")
    _reached = property(lambda self: (self.history, len(self.history or ()), self.updates))

    def based_on(self, crc32: int | None) -> None:
        """Note that rows are as a checkpoint has them, by its manifest's crc32; None: as none has.

        Examples
        --------
        >>> from cupyrec.embedding import Constant
        >>> shard = Shard(InitialVectors(2, Constant(3.0), seed=1), "float32")
        >>> shard.based_on(7)
        >>> shard.saved_as, shard.deleted
        (7, [])
        """
        self.saved_as = crc32
        self.deleted: list[tuple[Any, Any]] = []  # keys since then

    def _forget(self, tables: Any, ids: Any) -> None:
        """Delete keys, and keep them for the checkpoint that is based on the last, if one may."""
        self.store.delete(tables, ids)
        if self.life is not None and self.saved_as is not None and len(ids):
            self.deleted.append((arrays.to_host(tables), arrays.to_host(ids)))

    def _move_to(self, tier: Tier, name: str) -> None:
        """Keep rows in another tier; if it has some that were saved, these in place of none."""
        store = tier.store(name, self.width, self.xp, self.store.value)
        try:
            if len(self.store):
                if len(store):
                    raise ValueError(
                        f"MultiTableEmbedding: rows must not be in both tiers, got {len(store)} "
                        f"in {tier} and {len(self.store)} in {self.tier}."
                    )
                store.set_state(self.store.state)
                for rows in self.store.export():
                    store.import_rows(rows)
            elif not len(store) or (self.store.state and self.store.state != store.state):
                store.set_state(self.store.state)
            elif self.life is not None:  # rows that were saved: the clock goes on from theirs
                last = (rows.states[LIFE.name][:, 0].max() for rows in store.export())
                self.clock = max(self.clock, int(max(last, default=0)))
        except BaseException:
            store.close()
            raise
        self.store.close()
        self.store, self.tier = store, tier

    def _initial(self, tables: Any, ids: Any) -> Any:
        """Initial vectors, as rows will hold them."""
        vectors = self.initial(tables, ids)
        if self.store.value == FLOAT32:
            return vectors
        if self.store.value == INT8:
            return int8_decode(*int8_encode(vectors))
        codes = round_rows(vectors, tables, ids, self.initial.seed, 0, self.store.value)
        if self.store.value == FLOAT16:
            return codes.view(np.float16).astype(np.float32)
        return (codes.astype(np.uint32) * 65536).view(np.float32)

    def _rounding(self, tables: Any, ids: Any, step: int) -> Rounding | None:
        if not is_half(self.store.value):
            return None
        return Rounding(tables, ids, self.initial.seed, step)

    def _find(self, keys: UniqueKeys, insert: bool) -> tuple[Any, Any]:
        """The place of each key of this rank, or -1 - j for vector j of the second array."""
        xp, unseen = self.xp, self.xp.empty((0, self.width), np.float32)
        if insert:
            check_learns("Group.look_up", self.store.value)
        if insert and (self.life is None or self.life.admits_all):
            return self._learnt(keys.tables, keys.ids, keys.offsets), unseen
        if insert:
            return self._find_admitted(keys)
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

    def _learnt(self, tables: Any, ids: Any, offsets: Any) -> Any:
        """The places of keys that are looked up to learn; unseen ones get rows."""
        rows = self.store.find_or_insert(tables, ids, self._initial, offsets)
        self._catch_up(rows, tables, ids)
        if self.life is not None:
            self._touch(rows, offsets)
        return rows

    def _touch(self, rows: Any, offsets: Any) -> Any:
        """Note in rows that they were looked up; return how often that has been."""
        counts, step = [], self.clock + 1  # the one that begins
        at = vector_words(self.width, self.store.value)
        at += sum(part.columns for part in self.store.state[:-1])  # `LIFE` is the last

        def touch(memory: RowMemory, rows: Any) -> None:
            counts.append(touch_rows(memory, rows, offsets, at, step))

        self.store.update(rows, touch)
        return counts[0]

    def _find_admitted(self, keys: UniqueKeys) -> tuple[Any, Any]:
        """As `_find` to learn, where not every id gets a row."""
        xp, (tables, ids, offsets) = self.xp, (keys.tables, keys.ids, keys.offsets)
        counts = offsets[1:] - offsets[:-1]
        has = self.store.find(tables, ids) >= 0
        new = xp.flatnonzero(~has)
        has[new] = self._admitted(tables[new], ids[new], counts[new])
        own, others = xp.flatnonzero(has), xp.flatnonzero(~has)
        rows, unseen = xp.empty(len(ids), np.int64), self._initial(tables[others], ids[others])
        rows[others] = -1 - xp.arange(len(others))
        rows[own] = self._learnt(tables[own], ids[own], _offsets(counts[own]))
        return rows, unseen

    def _admitted(self, tables: Any, ids: Any, counts: Any) -> Any:
        """Which keys without a row get one, (N,) bool."""
        life, admitted = self.life, self.xp.ones(len(ids), bool)
        if life.admit_after > 1:
            rows = self.candidates.store.find_or_insert(tables, ids, self.candidates._initial)
            admitted = self.candidates._touch(rows, _offsets(counts)) >= life.admit_after
            self.candidates.store.end_step()
        if life.admit_probability < 1:
            seed = (self.initial.seed + (self.clock + 1) * _ODD) % 2**64
            draws = InitialVectors(1, Uniform(0, 1), seed).to(self.xp)(tables, ids)
            admitted &= draws[:, 0] < life.admit_probability
        return admitted

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

    def vectors(self, look_up: LookUp, dtype: Any = np.float32) -> Any:
        """Return the vector of each key, (N, D); of 16 bits the numbers that are nearest.

        Examples
        --------
        See `cupyrec.embedding.Group`.
        """
        rows, inverse, unseen = self._places(look_up), look_up.inverse, look_up.unseen
        out = self._empty(inverse.size, self.width, dtype=dtype)
        self.store.read(rows, lambda memory, rows: gather_rows(memory, rows, inverse, unseen, out))
        return out

    def pooled(self, look_up: LookUp, offsets: Any, weights: Any, mean: bool) -> Any:
        """Return the sum or mean of each bag, (M, D) float32: see `cupyrec.ops.bags.pool_rows`.

        Examples
        --------
        See `cupyrec.nn.MultiTableEmbedding`.
        """
        out = self._empty(len(offsets) - 1, self.width)
        given = look_up.inverse, look_up.unseen, offsets, weights, mean, out
        rows = self._places(look_up)
        self.store.read(rows, lambda memory, rows: pool_rows(memory, rows, *given))
        return out

    def weight_gradient(self, look_up: LookUp, bags: Any, gradient: Any) -> Any:
        """Return the gradient (N,) of the weights of `pooled`; no step may lie between them.

        Parameters
        ----------
        look_up : LookUp
        bags : (N,) array of int64
            The bag of each key.
        gradient : (M, D) array of float32

        Examples
        --------
        >>> from cupyrec.embedding import Constant, Group
        >>> group = Group(InitialVectors(2, Constant(3.0), seed=1))
        >>> look_up = group.look_up(np.zeros(1, np.uint32), np.array([5]), insert=True)
        >>> group.weight_gradient(look_up, np.array([0]), np.ones((1, 2), np.float32))
        array([6.], dtype=float32)
        """
        given = look_up.inverse, look_up.unseen, bags, gradient
        return self.read(look_up, lambda memory, rows: weight_gradient(memory, rows, *given))

    def read(self, look_up: LookUp, reader: Callable[[RowMemory, Any], Any]) -> Any:
        """Return ``reader(memory, rows)`` of a look-up's rows, which no step has changed since.

        Examples
        --------
        See `weight_gradient`.
        """
        look_up.check_numbering(self.numbering)
        look_up.check_reached(self._reached)
        return self.store.read(self._places(look_up), reader)

    def unique_vectors(self, look_up: LookUp) -> Any:
        """Return the vector of each unique key, (U, D) float32.

        Examples
        --------
        See `cupyrec.nn.EmbeddingMLP`.
        """
        return self.vectors(look_up._replace(inverse=self.xp.arange(look_up.rows.size)))

    def _places(self, look_up: LookUp) -> Any:
        """Where the rows of a look-up lie now."""
        if look_up.epoch == self.store.epoch:
            return look_up.rows
        known, rows = self.xp.flatnonzero(look_up.rows >= 0), look_up.rows.copy()
        rows[known] = self.store.find(
            look_up.keys.tables[known], look_up.keys.ids[known], again=True
        )
        return rows

    def _of_all_rows(self, gradients: RowGradients, l2: Any) -> RowGradients:
        self._catch_up_all()  # after a step that a device left out, or lazy training
        count = len(self.store)
        values = bulk.scattered(gradients.values, gradients.rows, count)
        rows = self.store.places(0, count)
        if l2 is not None:
            values += l2 * self.current_vectors(rows)
        return RowGradients(rows, values, *self.store.keys(0, count))

    def _forget_candidates(self) -> None:
        """Forget candidates whose time is over, and those that have rows by now."""
        store = self.candidates.store
        found = [gone(store, Life(expire_after=self.life.expire_after), self.clock)]
        for rows in store.export():
            ready = rows.states["life"][:, 1] >= self.life.admit_after
            keys = [arrays.copy_to(self.xp, a[ready]) for a in (rows.tables, rows.ids)]
            has = arrays.to_host(self.store.find(*keys)) >= 0
            found.append((rows.tables[ready][has], rows.ids[ready][has]))
        keys = map(np.concatenate, zip(*found, strict=True))
        self.candidates._forget(*(arrays.copy_to(self.xp, a) for a in keys))

    def _empty(self, *shape: int, dtype: Any = np.float32) -> Any:
        return (arrays.empty if self.xp is np else self.xp.empty)(shape, dtype)


def _offsets(counts: Any) -> Any:
    xp = arrays.namespace("offsets", counts)
    return xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(counts)])
