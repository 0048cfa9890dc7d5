"""Arrays in memory as a dataset."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyrec import errors
from cupyrec.data.batch import Batch
from cupyrec.data.rank_slices import RankSlices

__all__ = ["Arrays"]


class Arrays:
    """Rows that lie in NumPy arrays.

    Parameters
    ----------
    dense : (B, num_dense) floating, or None for no values
        Converted to float32. All must be finite.
    ids : (B, num_tables) integer
        Converted to int64; uint64 keeps its bits, so that 2^63 and above become negative.
    labels : (B,) or (B, 1), optional
        0 or 1, as bools, integers or floats.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids in a row.

    Raises
    ------
    TypeError
        An array has another dtype; float ids among them.
    ValueError
        An array has another shape, a value is not finite, or a label not 0 or 1.

    Examples
    --------
    >>> data = Arrays(None, np.array([[7], [-1], [2**40]]), labels=[0, 1, 1])
    >>> [batch.ids.ravel().tolist() for batch in data.batches(2)]
    [[7, -1], [1099511627776]]
    """

    def __init__(
        self, dense: np.ndarray | None, ids: np.ndarray, labels: np.ndarray | None = None
    ) -> None:
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"Arrays: 'ids' must be integers, got {ids.dtype}.")
        errors.axes("Arrays", ids=(ids, "B F"))
        self._ids = ids.astype(np.int64, copy=False)  # of uint64 it keeps the bits
        dense = np.empty((len(ids), 0), np.float32) if dense is None else np.asarray(dense)
        if dense.dtype.kind != "f":
            raise TypeError(f"Arrays: 'dense' must be floating, got {dense.dtype}.")
        errors.axes("Arrays", ids=(ids, "B F"), dense=(dense, "B num_dense"))
        with np.errstate(over="ignore"):  # told of below
            self._dense = dense.astype(np.float32, copy=False)
        _check("dense", "be finite", dense, np.isfinite(self._dense))
        self._labels = None if labels is None else _labels(np.asarray(labels), ids)
        self.num_dense = dense.shape[1]
        self.num_tables = ids.shape[1]

    def of_rank(self, rank: int, ranks: int) -> RankSlices:
        """Return the dataset for one of several ranks: its rows of each batch, see `Batch.of_rank`.

        Raises
        ------
        ValueError, TypeError
            No such rank.

        Examples
        --------
        >>> part = Arrays(None, np.arange(7)[:, None]).of_rank(1, 2)
        >>> [batch.ids.ravel().tolist() for batch in part.batches(4)]
        [[2, 3], [5, 6]]
        """
        return RankSlices(self, rank, ranks)

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over.

        Yields
        ------
        Batch
            Views of the arrays.
        """
        size = errors.positive("Arrays.batches", "batch_size", batch_size)
        if skip < 0:
            raise ValueError(f"Arrays.batches: 'skip' must be at least 0, got {skip}.")
        starts = range(skip * size, len(self._ids), size)
        return (self._batch(slice(start, start + size)) for start in starts)

    def _batch(self, rows: slice) -> Batch:
        labels = None if self._labels is None else self._labels[rows]
        return Batch(self._dense[rows], self._ids[rows], labels)


def _labels(labels: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if labels.dtype.kind not in "biuf":
        raise TypeError(f"Arrays: 'labels' must be numbers, got {labels.dtype}.")
    if labels.ndim == 1:
        labels = labels[:, None]
    errors.axes("Arrays", ids=(ids, "B F"), labels=(labels, "B 1"))
    _check("labels", "be 0 or 1", labels, (labels == 0) | (labels == 1))
    return labels.astype(np.float32, copy=False)


def _check(name: str, rule: str, values: np.ndarray, good: np.ndarray) -> None:
    """Raise ValueError at the first row and column where `good` is false."""
    if not good.all():
        row, column = np.unravel_index(np.argmin(good), good.shape)
        raise ValueError(
            f"Arrays: '{name}' must {rule}, "
            f"got {values[row, column]} in row {row}, column {column}."
        )
