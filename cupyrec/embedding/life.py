"""The life of an id: when it gets a row, when it loses it, and what tells of both.

Rows have two numbers more, the state part `LIFE`: the step in which training looked the id up last,
and how often it has. `Candidates` are ids that have no row yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cupyrec import errors
from cupyrec.embedding.store import LIFE, Rows, Store

__all__ = ["LIFE", "Life", "gone", "looked_up_once"]


@dataclass(frozen=True, kw_only=True)
class Life:
    """Which ids get rows and which lose theirs; by default all do and none does.

    Until an id has a row it has the vector that training would start from, and learns nothing.

    Parameters
    ----------
    admit_after : int
        How often training must have looked an id up until it gets a row, that time included.
    admit_probability : float
        How likely a step gives a row to an id that has none: about 1 / this look-ups. Drawn from
        (seed, step, table, id).
    expire_after : int, optional
        Steps without a look-up in training after which an id loses its row.
    expire_below : int
        An id also loses it if it was looked up less often, and not since the last check.
    max_ids : int or sequence of int, optional
        Ids of each table, beyond which those looked up longest ago lose theirs; of equal ones those
        that were looked up less often, then the smaller. Each of several ranks keeps its part of
        so many, rounded up.
    check_every : int
        Steps from one check of these rules to the next.

    Raises
    ------
    ValueError, TypeError
        A number that is none or out of its range.

    Notes
    -----
    Filters like those of DeepRec and TensorFlow's recommenders-addons count in sketches, which
    confuse ids; here all counts are exact, at some 60 bytes an id without a row.

    Examples
    --------
    >>> Life(admit_after=2, expire_after=10_000).admits_all
    False
    """

    admit_after: int = 1
    admit_probability: float = 1.0
    expire_after: int | None = None
    expire_below: int = 0
    max_ids: int | Sequence[int] | None = None
    check_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("admit_after", "check_every"):
            errors.positive("Life", name, getattr(self, name))
        errors.count("Life", "expire_below", self.expire_below)
        if not 0 < errors.number("Life", "admit_probability", self.admit_probability) <= 1:
            raise ValueError(
                f"Life: 'admit_probability' must lie in (0, 1], got {self.admit_probability}."
            )
        if self.expire_after is not None:
            errors.positive("Life", "expire_after", self.expire_after)
        if self.max_ids is not None:
            limits = [self.max_ids] if np.ndim(self.max_ids) == 0 else self.max_ids
            for limit in limits:
                errors.positive("Life", "max_ids", limit)

    @property
    def admits_all(self) -> bool:
        """Whether an id gets a row when it is first looked up."""
        return self.admit_after == 1 and self.admit_probability == 1

    @property
    def expires(self) -> bool:
        """Whether ids lose rows."""
        return bool(self.expire_after or self.expire_below or self.max_ids is not None)

    def limit(self, table: int, ranks: int = 1) -> float:
        """Return how many ids a table may have on each of so many ranks.

        Examples
        --------
        >>> Life(max_ids=[5, 7]).limit(1), Life(max_ids=7).limit(1, ranks=2), Life().limit(1)
        (7, 4, inf)
        """
        if self.max_ids is None:
            return np.inf
        return -(-(self.max_ids if np.ndim(self.max_ids) == 0 else self.max_ids[table]) // ranks)


def looked_up_once(count: int, step: int) -> np.ndarray:
    """Return the part `LIFE` (N, 2) of rows whose ids were looked up once, in a step.

    So are rows taken that come with vectors alone, and those of which no account was kept before.

    Examples
    --------
    >>> looked_up_once(2, step=7)
    array([[7, 1],
           [7, 1]], dtype=int32)
    """
    return np.tile(np.int32([step, 1]), (count, 1))


def gone(store: Store, life: Life, now: int, ranks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables and ids that lose their rows by the rules of `life`.

    It goes through all rows, up to three times, some of them in memory at a time.

    Parameters
    ----------
    store : Store
        Whose state has the part `LIFE`.
    life : Life
    now : int
        The step.
    ranks : int
        Among how many the tables are divided.

    Examples
    --------
    >>> from cupyrec.embedding import MemoryStore
    >>> store = MemoryStore(1)
    >>> store.set_state((LIFE,))
    >>> last = np.array([[3, 1], [9, 1]], np.int32)
    >>> keys, vectors = (np.zeros(2, np.uint32), np.array([7, 8])), np.zeros((2, 1), np.float32)
    >>> store.import_rows(Rows(*keys, vectors, {"life": last}))
    >>> gone(store, Life(expire_after=5), now=10)
    (array([0], dtype=uint32), array([7]))
    """
    left: dict[int, Counter] = {}  # table -> step of the last look-up -> rows that stay
    found = [(np.empty(0, np.uint32), np.empty(0, np.int64))]
    for rows, old in _with_old(store, life, now):
        found.append((rows.tables[old], rows.ids[old]))
        if life.max_ids is not None:
            _count(left, rows, ~old)
    if oldest := {t: _oldest(steps, life.limit(t, ranks)) for t, steps in left.items()}:
        found += _beyond(store, life, now, oldest)
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def _with_old(store: Store, life: Life, now: int) -> Iterator[tuple[Rows, np.ndarray]]:
    """Yield all rows, and which are too old or too rarely asked for."""
    for rows in store.export():
        last, seen = rows.states["life"].T
        age = now - last.astype(np.int64)
        old = (seen < life.expire_below) & (age >= life.check_every)
        if life.expire_after is not None:
            old |= age >= life.expire_after
        yield rows, old


def _count(left: dict[int, Counter], rows: Rows, stay: np.ndarray) -> None:
    for table in np.unique(rows.tables):
        last = rows.states["life"][stay & (rows.tables == table), 0]
        steps, counts = np.unique(last, return_counts=True)
        counter = left.setdefault(int(table), Counter())
        counter.update(dict(zip(steps.tolist(), counts.tolist(), strict=True)))


def _oldest(steps: Counter, limit: float) -> tuple[float, int]:
    """The step before which all of a table's rows go, and how many of that step itself do."""
    over = sum(steps.values()) - limit
    for step in sorted(steps):
        if over < steps[step]:
            return step, int(max(0, over))
        over -= steps[step]
    return np.inf, 0


def _beyond(
    store: Store, life: Life, now: int, oldest: dict[int, tuple[float, int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys that are too many, of rows that are neither too old nor too rare."""
    found, equal = [], {}  # table -> (looked up how often, id) of rows of the same step
    for rows, old in _with_old(store, life, now):
        last, seen = rows.states["life"].T
        for table in np.unique(rows.tables):
            (step, some), own = oldest.get(int(table), (-1, 0)), ~old & (rows.tables == table)
            before = own & (last < step)
            found.append((rows.tables[before], rows.ids[before]))
            if some:
                ties = own & (last == step)
                equal.setdefault(int(table), []).append((seen[ties], rows.ids[ties]))
    for table, parts in equal.items():
        seen, ids = map(np.concatenate, zip(*parts, strict=True))
        ids = ids[np.lexsort((ids, seen))[: oldest[table][1]]]
        found.append((np.full(len(ids), table, np.uint32), ids))
    return found
