"""Tables by number: the groups they lie in, what they hold, and how that goes in and out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.embedding import transfer
from cupyrec.embedding.group import Group
from cupyrec.embedding.initializers import Initializer, InitialVectors, Uniform
from cupyrec.embedding.life import Life
from cupyrec.embedding.tier import Tier
from cupyrec.parallel import Communicator

__all__ = ["Tables", "widened"]

_NAME, _MOST = "MultiTableEmbedding", 4096  # columns
_LINES = 12
_COUNTS = "ids", "bytes", "keys", "unique", "inserted"  # which add up over ranks


class Tables:
    """Embedding tables with numbers, those of one width in one group.

    Of several ranks each has the rows of the ids that it owns: what is exported and deleted is of
    these. What `statistics` and `digest` tell is of all, which call them together.

    Parameters
    ----------
    num_tables : int
    embedding_dim : int or sequence of int
        D of all tables, or of each.
    initializer : Initializer or sequence, optional
        Of all tables, or of each: see `InitialVectors`. Uniform in [-0.05, 0.05) by default.
    dtype, dense_updates
        See `Group`.
    tier : Memory, CachedHost or CachedSSD
        Where rows are kept: see `cupyrec.embedding.tier`.
    life : Life, optional
        When ids get and lose rows.
    seed : int
        Of the initial vectors.

    Attributes
    ----------
    widths : list of int
        D of each table.
    groups : dict of int to Group
        By width.

    Raises
    ------
    ValueError, TypeError
        Sizes that are not positive integers or don't agree; an unknown dtype.

    Examples
    --------
    See `cupyrec.nn.MultiTableEmbedding`.
    """

    padding_idx: int | None = None  # an id without a row

    def __init__(
        self,
        num_tables: int,
        embedding_dim: int | Sequence[int],
        *,
        initializer: Initializer | Sequence[Any] | None = None,
        dtype: str = "float32",
        dense_updates: bool = False,
        tier: Tier | None = None,
        life: Life | None = None,
        seed: int,
    ) -> None:
        self.num_tables = errors.positive(_NAME, "num_tables", num_tables)
        self.widths = _widths(self.num_tables, embedding_dim)
        initializers = _initializers(self.num_tables, initializer)
        limits = None if life is None else life.max_ids
        if np.ndim(limits) and len(limits) != self.num_tables:
            raise ValueError(
                f"{_NAME}: 'life' must have one of max_ids, or one of each of the "
                f"{self.num_tables} tables, got {len(limits)}."
            )
        self.groups = {}
        for width in dict.fromkeys(self.widths):
            # Those of other tables may be of other columns, and are never asked for here.
            own = [
                given if w == width else Uniform()
                for given, w in zip(initializers, self.widths, strict=True)
            ]
            self.groups[width] = Group(
                InitialVectors(width, own, seed), dtype=dtype, dense_updates=dense_updates,
                life=life,
            )  # fmt: skip
        if tier is not None:
            self.keep_in(tier)

    def keep_in(self, tier: Tier) -> None:
        """Keep rows in a tier from now on, each width in a folder of its own: see `Group.keep_in`.

        Raises
        ------
        TypeError
            It is no tier.
        ValueError
            As `Group.keep_in`.

        Examples
        --------
        >>> from cupyrec.embedding import CachedHost
        >>> tables = Tables(1, 4, seed=1)
        >>> tables.keep_in(CachedHost(cache_mb=1))
        >>> tables.group.tier.cache_mb
        1
        """
        if not isinstance(tier, Tier):
            raise TypeError(
                f"{_NAME}: 'tier' must be Memory, CachedHost or CachedSSD, got {tier!r}."
            )
        for width, group in self.groups.items():
            group.keep_in(tier, f"width-{width}")

    def save(self) -> None:
        """Make rows of tier `CachedSSD` last: its files hold what they are now after any crash.

        Of several ranks each saves its own, and one width comes after the other: a crash meanwhile
        leaves some as they are now, others as they were saved before.

        Raises
        ------
        OSError
            The disk is full, say; what was saved before holds still.

        Examples
        --------
        >>> Tables(1, 4, seed=1).save()
        """
        for group in self.groups.values():
            group.store.save()

    def close(self) -> None:
        """Let the files of tier `CachedSSD` go; what was not saved is forgotten.

        Examples
        --------
        >>> Tables(1, 4, seed=1).close()
        """
        for group in self.groups.values():
            group.store.close()

    @property
    def group(self) -> Group:
        """The group of all tables, where they have one width."""
        if len(self.groups) > 1:
            raise ValueError(f"{_NAME}.group: tables must have one width, got {list(self.groups)}.")
        return next(iter(self.groups.values()))

    def module(self, ids: Any, *others: Any) -> ModuleType:
        """Return the array module of the tables, which must be that of all arguments.

        Raises
        ------
        TypeError
            It isn't.

        Examples
        --------
        >>> Tables(1, 4, seed=1).module(np.zeros(1, np.int64)) is np
        True
        """
        xp, own = arrays.namespace(_NAME, ids, *others), next(iter(self.groups.values())).xp
        if xp is not own:
            raise TypeError(
                f"{_NAME}: 'ids' must be on device '{arrays.name(own)}' like the tables, "
                f"got '{arrays.name(xp)}'."
            )
        return xp

    def statistics(self) -> dict[str, np.ndarray]:
        """Return what each table holds and how it is used, as arrays of one value a table.

        It is of all ranks, which must call this together.

        Returns
        -------
        dict
            ``ids``; ``bytes`` of rows and keys; ``load`` of the table of slots that its keys share,
            the mean of ranks; ``unique_ratio``, unique ids over ids of the last look-up in
            training, a rank, NaN where it had none; ``inserted``, its new ids.

        Examples
        --------
        >>> from cupyrec import nn
        >>> embedding = nn.MultiTableEmbedding(num_tables=2, embedding_dim=4)
        >>> _ = embedding(np.array([[1, 1], [1, 2]]))
        >>> told = embedding.statistics()
        >>> told["ids"], told["unique_ratio"]
        (array([1, 2]), array([0.5, 1. ]))
        """
        ranks, own = self._ranks, self._own_statistics()
        counts = np.array([own[key] for key in _COUNTS])
        total = ranks.all_gather("statistics", counts).sum(axis=0)
        load = ranks.all_gather("statistics", own["load"]).mean(axis=0)
        return _told(dict(zip(_COUNTS, total, strict=True)) | {"load": load})

    def _own_statistics(self) -> dict[str, np.ndarray]:
        """Those of this rank's rows."""
        reports = {
            width: group.statistics.report(group.store, self.num_tables)
            for width, group in self.groups.items()
        }
        return {
            key: np.array([reports[width][key][t] for t, width in enumerate(self.widths)])
            for key in next(iter(reports.values()))
        }

    @property
    def _ranks(self) -> Communicator:
        return next(iter(self.groups.values())).exchange.ranks

    def accounts(self) -> str:
        """Return `statistics` as text, a line a table, of which there are at most 12.

        Of several ranks it is of this one's rows, and no other needs to call it.

        Examples
        --------
        >>> from cupyrec import nn
        >>> embedding = nn.MultiTableEmbedding(num_tables=2, embedding_dim=4)
        >>> _ = embedding(np.array([[1, 1], [1, 2]]))
        >>> print(embedding.accounts())  # doctest: +ELLIPSIS
         table   width         ids       bytes   load  unique    inserted
             0       4           1         ...  0.0...   0.50           1
             1       4           2         ...  0.0...   1.00           2
        """
        told = _told(self._own_statistics())
        rows = zip(range(self.num_tables), self.widths, *told.values(), strict=True)
        lines = [
            f"{table:6} {width:7} {ids:11} {nbytes:11} {load:6.2f} {unique:7.2f} {inserted:11}"
            for table, width, ids, nbytes, load, unique, inserted in itertools.islice(rows, _LINES)
        ]
        if self.num_tables > _LINES:
            lines.append(f"   ... and {self.num_tables - _LINES} more")
        heads = "table", "width", "ids", "bytes", "load", "unique", "inserted"
        return "\n".join(["{:>6} {:>7} {:>11} {:>11} {:>6} {:>7} {:>11}".format(*heads), *lines])

    def _table(self, where: str, table: int) -> Group:
        if isinstance(table, bool) or not isinstance(table, (int, np.integer)):
            raise TypeError(f"{where}: 'table' must be an integer, got {table!r}.")
        if not 0 <= table < self.num_tables:
            raise ValueError(f"{where}: 'table' must lie in [0, {self.num_tables}), got {table}.")
        return self.groups[self.widths[table]]

    def iterate(self, table: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, vectors) of a table as NumPy arrays, up to 65,536 rows at a time.

        Raises
        ------
        ValueError
            No such table.
        RuntimeError
            Ids were deleted or imported meanwhile. Training may go on.

        Examples
        --------
        >>> tables = Tables(1, 4, seed=1)
        >>> list(tables.iterate(0))
        []
        """
        for rows in transfer.exported(self._table("iterate", table)):
            mine = rows.tables == table
            if mine.any():
                yield rows.ids[mine], rows.vectors[mine]

    def export_table(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (N,) int64 and vectors (N, D) float32 of a table; `iterate` is for large ones.

        Raises
        ------
        ValueError
            No such table.

        Examples
        --------
        >>> tables = Tables(1, 2, seed=1)
        >>> tables.import_table(0, np.array([7]), np.ones((1, 2), np.float32))
        >>> tables.export_table(0)
        (array([7]), array([[1., 1.]], dtype=float32))
        """
        width = self._table("export_table", table).width
        parts = [(np.empty(0, np.int64), np.empty((0, width), np.float32)), *self.iterate(table)]
        ids, vectors = map(np.concatenate, zip(*parts, strict=True))
        return ids, vectors

    def import_table(self, table: int, ids: Any, vectors: Any) -> None:
        """Give ids of a table these vectors; what they had before, state included, is forgotten.

        Nothing changes if the input is refused. Gradients of the step are forgotten. Of several
        ranks each takes the ids that it owns, so that all are given the same.

        Parameters
        ----------
        table : int
        ids : (N,) array of int64, uint64, int32 or uint32
        vectors : (N, D) array of float32

        Raises
        ------
        ValueError, TypeError
            Shapes or dtypes that don't agree, a vector that is not finite, an id twice, or
            `padding_idx`.

        Examples
        --------
        See `export_table`.
        """
        group = self._table("import_table", table)
        ids = arrays.to_host(widened(arrays.namespace(_NAME, ids), ids))
        if self.padding_idx is not None and (ids == self.padding_idx).any():
            raise ValueError(
                f"import_table: 'ids' must not hold 'padding_idx', got {self.padding_idx}."
            )
        transfer.import_vectors(group, np.full(ids.shape, table, np.uint32), ids, vectors)

    def delete(self, table: int, ids: Any) -> int:
        """Forget ids of a table, with their state; return how many it had. Others are passed over.

        Gradients of the step are forgotten.

        Parameters
        ----------
        table : int
        ids : (N,) array of int64, uint64, int32 or uint32

        Raises
        ------
        ValueError, TypeError
            No such table, or ids of another shape, dtype or device.

        Examples
        --------
        >>> tables = Tables(1, 2, seed=1)
        >>> tables.import_table(0, np.array([3, 4]), np.ones((2, 2), np.float32))
        >>> tables.delete(0, np.array([4, 5]))
        1
        """
        group, xp = self._table("delete", table), self.module(ids)
        ids = widened(xp, ids)
        return group.delete(xp.full(ids.shape, table, np.uint32), ids)

    def digest(self) -> str:
        """Return 32 hex digits that tell all keys, vectors and states, whatever their order.

        It is of all ranks, which must call this together, and hangs on no number of them.

        Examples
        --------
        >>> Tables(1, 2, seed=1).digest()
        '00000000000000000000000000000000'
        """
        total = sum(map(transfer.digest, self.groups.values()), np.zeros(2, np.uint64))
        total = self._ranks.all_gather("digest", total).sum(axis=0)
        return "".join(f"{int(lane):016x}" for lane in total)


def _told(counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `Tables.statistics` returns, of what `Statistics.report` does."""
    with np.errstate(invalid="ignore"):
        ratio = counts["unique"] / counts["keys"]
    return {
        "ids": counts["ids"], "bytes": counts["bytes"], "load": counts["load"],
        "unique_ratio": ratio, "inserted": counts["inserted"],
    }  # fmt: skip


def _initializers(num_tables: int, given: Any) -> list[Any]:
    """Return the initializer of each table."""
    if given is None or isinstance(given, Initializer):
        return [Uniform() if given is None else given] * num_tables
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            f"{_NAME}: 'initializer' must be an initializer, or a sequence of one a table, "
            f"got {given!r}."
        )
    if len(given) != num_tables:
        raise ValueError(
            f"{_NAME}: 'initializer' must be one, or one of each of the {num_tables} tables, "
            f"got {len(given)}."
        )
    return list(given)


def _widths(num_tables: int, embedding_dim: Any) -> list[int]:
    """Return the width of each table."""
    many = isinstance(embedding_dim, (Sequence, np.ndarray))
    widths = list(embedding_dim) if many else [embedding_dim] * num_tables
    if len(widths) != num_tables:
        raise ValueError(
            f"{_NAME}: 'embedding_dim' must have one width each of the {num_tables} tables, "
            f"got {len(widths)}."
        )
    widths = [errors.positive(_NAME, "embedding_dim", width) for width in widths]
    if max(widths) > _MOST:
        raise ValueError(f"{_NAME}: 'embedding_dim' must be at most {_MOST}, got {max(widths)}.")
    return widths


def widened(xp: ModuleType, ids: Any) -> Any:
    """Return ids as int64: int32 by its sign, uint32 by zeros, uint64 with its 64 bits.

    Raises
    ------
    TypeError
        Another dtype.

    Examples
    --------
    >>> widened(np, np.array([2**64 - 1], np.uint64)), widened(np, np.array([-1], np.int32))
    (array([-1]), array([-1]))
    """
    errors.dtype(_NAME, "ids", ids, np.int64, np.uint64, np.int32, np.uint32)
    if ids.dtype == np.uint64:
        return ids.view(np.int64)
    return ids.astype(np.int64, copy=False)
