"""A group: tables of equal width that share one store, and the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cupyrec import arrays, random
from cupyrec.embedding.initializers import Constant, InitialVectors
from cupyrec.embedding.life import LIFE, Life, gone
from cupyrec.embedding.look_up import LookUp
from cupyrec.embedding.look_ups import LookUps
from cupyrec.embedding.row_gradients import RowGradients, summed
from cupyrec.embedding.shard import Shard
from cupyrec.embedding.store import StatePart
from cupyrec.embedding.tier import Memory, Tier
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.embedding_rows import Rounding, RowMemory
from cupyrec.ops.row_memory import check_learns
from cupyrec.ops.segment_sum import segment_sum
from cupyrec.parallel import Exchange

__all__ = ["Group"]

_PARTS = 16  # look-ups whose gradients are summed at once


class Group(LookUps):
    """Embedding tables of one width, with rows that appear when their ids do.

    Of several ranks each has the rows of the ids that it owns. Then look-ups and gradients are
    calls that all ranks make together, with whatever ids each has, while `store`, `delete`, exports
    and imports are of this rank's rows alone.

    Parameters
    ----------
    initial : InitialVectors
        Width, and the vectors of ids not seen before.
    dtype : str
        Of the vectors in memory: ``float32``, ``float16``, ``bfloat16`` or ``int8``. Those of 16
        bits are widened when they are read, and rounded stochastically when they are written. Those
        of int8 have a scale a row, and are only served: they are imported or loaded, and refuse
        look-ups with `insert`, gradients and updates.
    dense_updates : bool
        Whether every row moves in every step, with gradient zero if it isn't in the batch.
    exchange : Exchange, optional
        With other ranks; by default one without codecs with all that the launcher started.
    life : Life, optional
        When ids get and lose rows.

    Raises
    ------
    ValueError
        An unknown `dtype`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyrec.embedding import Uniform
    >>> group = Group(InitialVectors(4, Uniform(), seed=1))
    >>> tables, ids = np.zeros(2, np.uint32), np.array([5, 5])
    >>> look_up = group.look_up(tables, ids, insert=True)
    >>> group.vectors(look_up).shape, len(group.store)
    ((2, 4), 1)
    """

    def __init__(
        self, initial: InitialVectors, *, dtype: str = "float32", dense_updates: bool = False,
        exchange: Exchange | None = None, life: Life | None = None,
    ) -> None:  # fmt: skip
        super().__init__(initial, dtype, exchange)
        self.dense_updates = dense_updates
        self.keep_account(life)
        self._pending: list[RowGradients] = []
        self._coming: list[tuple[Callable[[], Any], LookUp]] = []  # from other ranks

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
        >>> import numpy as np
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
        >>> import numpy as np
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
        found = RowGradients(
            look_up.rows, values, keys.tables, keys.ids, squares, look_up.epoch
        )  # fmt: skip
        if self.life is not None and not self.life.admits_all:
            found = found.of(self.xp.flatnonzero(look_up.rows >= 0))
        self._pending.append(found)
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
        check_learns("Group.update", self.store.value)
        rows, values, tables, ids, _, epoch = gradients
        self.updates += 1
        if rows.size:
            if epoch != self.store.epoch:
                rows = self.store.find(tables, ids, again=True)
            rounding = self._rounding(tables, ids, step)
            self.store.update(rows, lambda *at: rule(*at, values, rounding))
        self.store.end_step()
        self.clock += 1
        if self.candidates is not None:
            self.candidates.clock = self.clock
        checks = self.life is not None and (self.life.expires or self.candidates is not None)
        if checks and self.clock % self.life.check_every == 0:
            self.expire()

    def keep_account(self, life: Life | None) -> None:
        """Let ids get and lose rows by these rules; None lets all get some and keep them.

        Raises
        ------
        ValueError
            There are rows already.

        Examples
        --------
        >>> from cupyrec.embedding import Life, Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.keep_account(Life(expire_after=1000))
        >>> [part.name for part in group.store.state]
        ['life']
        """
        if len(self.store):
            raise ValueError(
                "MultiTableEmbedding: 'life' must be given before there are rows, "
                f"got {len(self.store)} of them."
            )
        state, self.life, self.candidates = self.optimizer_state, life, None
        if life is not None and life.admit_after > 1:
            self.candidates = Shard(InitialVectors(1, Constant(0.0), self.initial.seed), "float32")
            self.candidates.life = Life()
            self.candidates.store.set_state((LIFE,))
            self._move_candidates(self.xp)
        self.set_state(state, self.history)

    def _move_candidates(self, xp: ModuleType) -> None:
        if self.candidates is not None:
            self.candidates.store.to(xp)
            self.candidates.initial = self.candidates.initial.to(xp)

    @property
    def optimizer_state(self) -> tuple[StatePart, ...]:
        """Parts of the rows' state that are the optimizer's."""
        return tuple(part for part in self.store.state if part != LIFE)

    def expire(self) -> int:
        """Take their rows from ids whose time is over by `life`; return how many.

        Of several ranks each does so with its own rows. It is done by itself every
        `life.check_every` steps.

        Examples
        --------
        >>> import numpy as np
        >>> from cupyrec.embedding import Life, Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1), life=Life(max_ids=1))
        >>> _ = group.look_up(np.zeros(2, np.uint32), np.array([5, 7]), insert=True)
        >>> group.expire(), len(group.store)
        (1, 1)
        """
        if self.life is None:
            return 0
        if self.candidates is not None:
            self._forget_candidates()
        keys = gone(self.store, self.life, self.clock, self.exchange.ranks.size)
        return self.delete(*(arrays.copy_to(self.xp, a) for a in keys))

    def set_state(self, state: tuple[StatePart, ...], history: AdamHistory | None = None) -> None:
        """Give rows the state that a new optimizer starts from, and its history if they catch up.

        What they owed to the former optimizer's steps they make up for first; when they were looked
        up stays; gradients of the step are forgotten.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> group.set_state((StatePart("sum", 2, 0.0),))
        """
        self.zero_grad()
        self._catch_up_all()
        self.updates += 1
        self.store.set_state(state if self.life is None else (*state, LIFE))
        self.history = history
        self.based_on(None)  # all rows have

    def to(self, xp: ModuleType) -> None:
        """Move the rows to the device of an array module; forget this step's gradients.

        Examples
        --------
        >>> import numpy as np
        >>> from cupyrec.embedding import Uniform
        >>> Group(InitialVectors(2, Uniform(), seed=1)).to(np)
        """
        self.zero_grad()
        if xp is not self.xp:
            self.numbering += 1
            self.following = self.ahead = None  # ids of the former device
        self.store.to(xp)
        self._move_candidates(xp)
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
        for shard in (self, self.candidates):
            if shard is not None:
                shard.store.clear()
                shard.based_on(None)

    def delete(self, tables: Any, ids: Any) -> int:
        """Forget keys, with their state; return how many had a row. Others are passed over.

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
        >>> import numpy as np
        >>> from cupyrec.embedding import Uniform
        >>> group = Group(InitialVectors(2, Uniform(), seed=1))
        >>> _ = group.look_up(np.zeros(2, np.uint32), np.array([5, 7]), insert=True)
        >>> group.delete(np.zeros(2, np.uint32), np.array([5, 6])), len(group.store)
        (1, 1)
        """
        self.zero_grad()
        self.numbering += 1
        before = len(self.store)
        for shard in (self, self.candidates):
            if shard is not None:
                shard._forget(tables, ids)
        self.statistics.forget_look_up()
        return before - len(self.store)
