"""What ids get that have no row: their initial vectors, zeros, or the row of a default id."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.embedding import Constant, InitialVectors, Rows

__all__ = ["DefaultRows", "DefaultVectors", "check_unseen", "initial_vectors"]


def check_unseen(unseen: Any) -> Any:
    """Return what unseen ids get: "initial", "zero", or the default id of all tables, or of each.

    Raises
    ------
    ValueError, TypeError
        Something else.

    Examples
    --------
    >>> check_unseen("zero"), check_unseen(-1), check_unseen((7, 8))
    ('zero', -1, [7, 8])
    """
    if isinstance(unseen, str):
        if unseen not in ("initial", "zero"):
            raise ValueError(
                f"Predictor: 'unseen' must be 'initial', 'zero' or an id, got '{unseen}'."
            )
        return unseen
    many = isinstance(unseen, (list, tuple)) or (isinstance(unseen, np.ndarray) and unseen.ndim)
    for one in unseen if many else [unseen]:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise TypeError(
                f"Predictor: 'unseen' must be 'initial', 'zero', an id or one of each table, "
                f"got {one!r}."
            )
        if not -(2**63) <= one < 2**63:
            raise ValueError(f"Predictor: 'unseen' must be an id of 64 bits, got {one}.")
    return [int(one) for one in unseen] if many else int(unseen)


class DefaultVectors:
    """A vector for each table, in the place of `InitialVectors`: the same for all of its ids.

    Parameters
    ----------
    vectors : (T, D) array of float32
    seed : int

    Examples
    --------
    >>> vectors = DefaultVectors(np.array([[1, 2], [3, 4]], np.float32), seed=1)
    >>> vectors(np.array([1, 0, 1], np.uint32), np.array([7, 8, 9]))[:, 0]
    array([3., 1., 3.], dtype=float32)
    """

    def __init__(self, vectors: Any, seed: int) -> None:
        self.vectors, self.seed, self.width = vectors, seed, vectors.shape[1]

    def to(self, xp: ModuleType) -> DefaultVectors:
        """Return the same for keys of another array module.

        Examples
        --------
        >>> DefaultVectors(np.ones((1, 2), np.float32), seed=1).to(np).width
        2
        """
        return DefaultVectors(arrays.copy_to(xp, self.vectors), self.seed)

    def __call__(self, tables: Any, ids: Any) -> Any:
        """Return the (N, D) float32 vectors of (N,) uint32 tables and (N,) int64 ids."""
        return self.vectors[tables.astype(np.int64)]


class DefaultRows:
    """The rows of a group's default ids, as they are found while its rows go by.

    Parameters
    ----------
    ids : (T,) array of int64
        Of each table, whether it is of this group or not.
    tables : list of int
        Those of the group.
    width : int

    Examples
    --------
    >>> rows = DefaultRows(np.array([7, 8]), tables=[0, 1], width=2)
    >>> rows.missing()
    [0, 1]
    """

    def __init__(self, ids: np.ndarray, tables: list[int], width: int) -> None:
        self._ids, self._tables = ids, tables
        self._vectors = np.zeros((len(ids), width), np.float32)
        self._found = np.zeros(len(ids), bool)

    def are(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return which keys are those of default rows, (N,) bool.

        Examples
        --------
        >>> rows = DefaultRows(np.array([7, 8]), tables=[0, 1], width=2)
        >>> rows.are(np.array([0, 1]), np.array([7, 7]))
        array([ True, False])
        """
        return ids == self._ids[tables]

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Return those of the group's default rows: their tables as uint32, and ids.

        Examples
        --------
        >>> DefaultRows(np.array([7, 8]), tables=[1], width=2).keys()
        (array([1], dtype=uint32), array([8]))
        """
        return np.array(self._tables, np.uint32), self._ids[self._tables]

    def note(self, forgotten: Rows | None, rows: Rows | None) -> None:
        """Take from what goes by, keys that are deleted and rows that are written, what is here.

        Examples
        --------
        See `missing`.
        """
        if forgotten is not None:
            self._found[forgotten.tables[self.are(forgotten.tables, forgotten.ids)]] = False
        if rows is not None:
            own = self.are(rows.tables, rows.ids)
            self._vectors[rows.tables[own]] = rows.vectors[own]
            self._found[rows.tables[own]] = True

    def missing(self) -> list[int]:
        """Return the group's tables whose default id has no row.

        Examples
        --------
        >>> rows = DefaultRows(np.array([7, 8]), tables=[0, 1], width=1)
        >>> key = np.array([1], np.uint32), np.array([8])
        >>> rows.note(None, Rows(*key, np.ones((1, 1), np.float32), {}))
        >>> rows.missing()
        [0]
        """
        return [table for table in self._tables if not self._found[table]]

    def copy(self) -> DefaultRows:
        """Return the same, to note more.

        Examples
        --------
        >>> DefaultRows(np.array([7]), tables=[0], width=1).copy().missing()
        [0]
        """
        other = DefaultRows(self._ids, self._tables, self._vectors.shape[1])
        other._vectors[:], other._found[:] = self._vectors, self._found
        return other

    def vectors(self, seed: int) -> DefaultVectors:
        """Return what unseen ids get.

        Examples
        --------
        >>> DefaultRows(np.array([7]), tables=[0], width=3).vectors(seed=1).width
        3
        """
        return DefaultVectors(self._vectors, seed)


def initial_vectors(unseen: Any, saved: InitialVectors, found: DefaultRows | None) -> Any:
    """Return what unseen ids of a group get, by the rule and what a checkpoint has.

    Examples
    --------
    >>> saved = InitialVectors(2, Constant(0.5), seed=1)
    >>> initial_vectors("zero", saved, None)(np.zeros(1, np.uint32), np.array([7]))
    array([[0., 0.]], dtype=float32)
    """
    if unseen == "initial":
        return saved
    if unseen == "zero":
        return InitialVectors(saved.width, Constant(0.0), saved.seed)
    return found.vectors(saved.seed)
