"""A group: tables of equal width that share one store, and the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import random, timeline
from cupyrec.embedding.initializers import InitialVectors
from cupyrec.embedding.look_up import Asked, LookUp
from cupyrec.embedding.row_gradients import RowGradients, summed
from cupyrec.embedding.shard import Shard
from cupyrec.embedding.statistics import Statistics
from cupyrec.embedding.store import StatePart
from cupyrec.embedding.tier import Memory, Tier
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.embedding_rows import Rounding, RowMemory
from cupyrec.ops.segment_sum import segment_sum
from cupyrec.ops.unique_keys import unique_keys
from cupyrec.parallel import Exchange, Route, world

__all__ = ["Group"]

_PARTS = 16  # look-ups whose gradients are summed at once


class Group(Shard):
    """Embedding tables of one width, with rows that appear when their ids do.

    Of several ranks each has the rows of the ids that it owns. Then look-ups and gradients are
    calls that all ranks make together, with whatever ids each has, while `store`, `delete`, exports
    and imports are of this rank's rows alone.

    Parameters
    ----------
    initial : InitialVectors
        Width, and the vectors of ids not seen before.
    dtype : str
        Of the vectors in memory: ``float32``, ``float16`` or ``bfloat16``. Those of 16 bits are
        widened when they are read, and rounded stochastically when they are written.
    dense_updates : bool
        Whether every row moves in every step, with gradient zero if it isn't in the batch.
    exchange : Exchange, optional
        With other ranks; by default one without codecs with all that the launcher started.

    Raises
    ------
    ValueError
        An unknown `dtype`.

    Examples
    --------
    >>> from cupyrec.embedding import Uniform
    >>> group = Group(InitialVectors(4, Uniform(), seed=1))
    >>> tables, ids = np.zeros(2, np.uint32), np.array([5, 5])
    >>> look_up = group.look_up(tables, ids, insert=True)
    >>> group.vectors(look_up).shape, len(group.store)
    ((2, 4), 1)
    """

    def __init__(
        self, initial: InitialVectors, *, dtype: str = "float32", dense_updates: bool = False,
        exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        super().__init__(initial, dtype)
        self.dense_updates = dense_updates
        self.statistics = Statistics()
        self._pending: list[RowGradients] = []
        self._coming: list[tuple[Callable[[], Any], LookUp]] = []  # from other ranks
        self.exchange = Exchange(world()) if exchange is None else exchange
        # Of the look-up after the next: ids as they were given, and as int64.
        self.following: tuple[Any, Any] | None = None
        self.ahead: tuple[Any, Asked] | None = None  # given ids, and where their keys have gone

    def __repr__(self) -> str:
        ranks, store = self.exchange.ranks, self.store
        return (
            f"Group({ranks.shard}ids={len(store)}, width={self.width}, dtype={self.dtype}, "
            f"bytes={store.nbytes}, load={store.load:.2f})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: the gradients that come, but not what was asked for ahead."""
        self._arrive()
        return vars(self) | {"following": None, "ahead": None}

    def ask(self, tables: Any, ids: Any, kept: Any = None) -> Asked:
        """Begin a look-up: send keys to the ranks that own them, before their rows may be read.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        kept : (K,) array of int64, optional
            Numbers of the keys that count, ascending; the others are padding: they have no row, and
            the vector zero.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.ask(np.zeros(2, np.uint32), np.array([5, 5])).keys.ids
        array([5])
        """
        if kept is None:
            keys = unique_keys(tables, ids)
            inverse = keys.inverse
        else:
            tables = tables[kept]
            keys = unique_keys(tables, ids[kept])
            inverse = self.xp.full(ids.size, -1, np.int64)
            inverse[kept] = keys.inverse
        route = None if self.exchange.is_local else self.exchange.ask(keys.tables, keys.ids)
        return Asked(tables, keys, inverse, kept, route)

    def asked_ahead(self, ids: Any) -> Asked | None:
        """Return what was asked for these very ids ahead, if it was.

        Examples
        --------
        See `cupyrec.nn.MultiTableEmbedding.prepare`.
        """
        if self.ahead is None or self.ahead[0] is not ids:
            return None
        (_, asked), self.ahead = self.ahead, None
        return asked

    def read_ahead(self) -> None:
        """Let the store read rows of the look-up that was asked for ahead, if its keys are here.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> Group(InitialVectors(2, Uniform(), seed=1)).read_ahead()
        """
        if self.ahead is None or not self.store.reads_ahead:
            return
        keys, route = self.ahead[1].keys, self.ahead[1].route
        if route is not None:
            if not route.done():
                return
            keys = unique_keys(route.result().tables, route.result().ids)
        self.store.prefetch(keys.tables, keys.ids)

    def look_up(self, tables: Any, ids: Any, insert: bool, kept: Any = None) -> LookUp:
        """Find the row of each key.

        Parameters
        ----------
        tables, ids, kept
            See `ask`.
        insert : bool
            Whether unseen ids get a row. If not, nothing changes: they get their initial vectors.

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
        return self.find(self.ask(tables, ids, kept), insert)

    @timeline.span("look-up")
    def find(self, asked: Asked, insert: bool) -> LookUp:
        """End a look-up: find the row of each key, as it is now.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.find(group.ask(np.zeros(2, np.uint32), np.array([5, 5])), insert=True).rows
        array([0])
        """
        tables, keys, inverse, kept, route = asked
        remote = None
        if route is None:
            rows, unseen = self._find(keys, insert)
        else:
            remote, unseen = self._find_remote(route.result(), insert)
            rows = -1 - self.xp.arange(len(keys.ids))
        if insert:
            self.statistics.looked_up(tables, keys.tables)
        now = self.numbering, self._reached, kept, self.store.epoch
        return LookUp(keys, inverse, rows, unseen, *now, remote)

    def _find_remote(self, route: Route, insert: bool) -> tuple[tuple[Route, LookUp], Any]:
        """The vectors (U, D) of the keys of a route, and where they and their gradients go."""
        asked = unique_keys(route.tables, route.ids)
        found = asked, asked.inverse, *self._find(asked, insert)
        own = LookUp(*found, self.numbering, self._reached, None, self.store.epoch)
        vectors = self.exchange.rows(route, self.unique_vectors(own), asked.inverse, insert)
        return (route, own), vectors

    def add_gradient(
        self, look_up: LookUp, gradient: Any, index: Any = None, weights: Any = None
    ) -> None:
        """Add the gradient of a look-up with `insert` to this step's.

        Parameters
        ----------
        look_up : LookUp
        gradient : (N, D) array of float32, float16 or bfloat16, with `index` (M, D)
        index : (N,) array of int64, optional
            The row of `gradient` that each key takes part in.
        weights : (N,) array of float32, optional
            How much of it.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> look_up = group.look_up(np.zeros(2, np.uint32), np.array([5, 5]), insert=True)
        >>> group.add_gradient(look_up, np.ones((2, 2), np.float32))
        >>> group.gradients().values
        array([[2., 2.]], dtype=float32)
        """
        segments = look_up.keys.offsets, look_up.positions
        values = segment_sum(gradient, *segments, index=index, weights=weights)
        self.add_unique_gradient(look_up, values)

    def add_unique_gradient(
        self, look_up: LookUp, values: Any, squares: float | None = None
    ) -> None:
        """Add a gradient (U, D) of a look-up's unique keys, and its sum of squares, to this step's.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> look_up = group.look_up(np.zeros(2, np.uint32), np.array([5, 5]), insert=True)
        >>> group.add_unique_gradient(look_up, np.ones((1, 2), np.float32))
        >>> group.gradients().values
        array([[1., 1.]], dtype=float32)
        """
        look_up.check_numbering(self.numbering)
        keys = look_up.keys
        if look_up.remote is not None:
            route, own = look_up.remote
            by = Rounding(keys.tables, keys.ids, self.initial.seed, random.step())
            self._coming.append((self.exchange.gradients(route, values, by), own))
            if len(self._coming) > _PARTS:
                self._arrive()
            return
        if look_up.reached != self._reached:  # steps have come between, or another optimizer
            self._catch_up(self._places(look_up), keys.tables, keys.ids)
        found = look_up.rows, values, keys.tables, keys.ids, squares, look_up.epoch
        self._pending.append(RowGradients(*found))
        if len(self._pending) > _PARTS:  # of a table that no optimizer steps they would pile up
            self._pending = [summed(self.xp, self.width, self._pending)]

    def _arrive(self) -> None:
        """Wait for the gradients that come from other ranks."""
        while self._coming:
            received, own = self._coming.pop(0)
            self.add_gradient(own, received())

    def gradients(self, l2: Any = None) -> RowGradients:
        """Return this step's gradients: of the rows looked up, with `dense_updates` of all rows.

        Parameters
        ----------
        l2 : np.float32 or (1,) array of float32, optional
            Times the weight, to be added to its gradient; needs `dense_updates`.

        Examples
        --------
        See `add_gradient`.
        """
        self._arrive()
        self.read_ahead()
        self._pending = [summed(self.xp, self.width, self._pending)]
        return self._of_all_rows(self._pending[0], l2) if self.dense_updates else self._pending[0]

    def zero_grad(self) -> None:
        """Forget this step's gradients.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> Group(InitialVectors(2, Uniform(), seed=1)).zero_grad()
        """
        self._pending, self._coming = [], []

    def update(
        self,
        gradients: RowGradients,
        step: int,
        rule: Callable[[RowMemory, Any, Any, Rounding | None], None],
    ) -> None:
        """Apply ``rule(memory, rows, values, rounding)``, the optimizer's step of this number.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.update(group.gradients(), 1, lambda memory, rows, values, rounding: None)
        """
        rows, values, tables, ids, _, epoch = gradients
        self.updates += 1
        if rows.size:
            if epoch != self.store.epoch:
                rows = self.store.find(tables, ids, again=True)
            rounding = self._rounding(tables, ids, step)
            self.store.update(rows, lambda *at: rule(*at, values, rounding))
        self.store.end_step()

    def set_state(self, state: tuple[StatePart, ...], history: AdamHistory | None = None) -> None:
        """Give rows the state that a new optimizer starts from, and its history if they catch up.

        What they owed to the former optimizer's steps they make up for first; gradients of the step
        are forgotten.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.set_state((StatePart("sum", 2, 0.0),))
        """
        self.zero_grad()
        self._catch_up_all()
        self.updates += 1
        self.store.set_state(state)
        self.history = history

    def to(self, xp: ModuleType) -> None:
        """Move the rows to the device of an array module; forget this step's gradients.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> Group(InitialVectors(2, Uniform(), seed=1)).to(np)
        """
        self.zero_grad()
        self.numbering += int(xp is not self.xp)
        self.store.to(xp)
        self.initial = self.initial.to(xp)
        self.statistics.forget_look_up()

    def keep_in(self, tier: Tier, name: str = "") -> None:
        """Keep rows in a tier from now on; forget this step's gradients.

        Parameters
        ----------
        tier : Memory, CachedHost or CachedSSD
        name : str
            Of the group among those that share the tier's folder; a rank has a folder of its own.

        Raises
        ------
        ValueError
            With `dense_updates` another tier than memory, or rows here and in the tier's files.

        Examples
        --------
        >>> from cupyrec.embedding import CachedHost, Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.keep_in(CachedHost(cache_rows=1000))
        >>> type(group.store).__name__
        'CachedStore'
        """
        self._check_dense(tier)
        self.zero_grad()
        self.numbering += 1
        ranks = self.exchange.ranks
        self._move_to(tier, f"{name}/{ranks.rank:05}-of-{ranks.size:05}")
        self.statistics.forget_look_up()

    def _check_dense(self, tier: Tier) -> None:
        if self.dense_updates and not isinstance(tier, Memory):
            raise ValueError(
                "MultiTableEmbedding: tables with dense_updates must be in tier Memory, "
                f"got {tier}."
            )

    def clear(self) -> None:
        """Forget all rows and gradients.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> Group(InitialVectors(2, Uniform(), seed=1)).clear()
        """
        self.zero_grad()
        self.numbering += 1
        self.store.clear()
        self.statistics = Statistics()

    def delete(self, tables: Any, ids: Any) -> int:
        """Forget keys, with their state; return how many there were. Others are passed over.

        This step's gradients are forgotten.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> _ = group.look_up(np.zeros(2, np.uint32), np.array([5, 7]), insert=True)
        >>> group.delete(np.zeros(2, np.uint32), np.array([5, 6])), len(group.store)
        (1, 1)
        """
        self.zero_grad()
        self.numbering += 1
        before = len(self.store)
        self.store.delete(tables, ids)
        self.statistics.forget_look_up()
        return before - len(self.store)
