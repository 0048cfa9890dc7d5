"""Arrays in memory as a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cupyrec import errors
from cupyrec.data.batch import Batch
from cupyrec.data.rank_slices import RankSlices
from cupyrec.ragged import Bags

__all__ = ["Arrays"]


class Arrays:
    """Rows that lie in NumPy arrays.

    Parameters
    ----------
    dense : (B, num_dense) floating, or None for no values
        Converted to float32. All must be finite.
    ids : (B, num_tables) integer, or Bags
        Converted to int64; uint64 keeps its bits, so that 2^63 and above become negative.
    labels : (B,) or (B, T), optional
        0 or 1, as bools, integers or floats; of T tasks.
    weights : (B,) or (B, T), optional
        Factors of the samples' losses: of all tasks, or of each.
    task_names : sequence of str, optional
        Of the T tasks, by which `evaluate` tells of them; numbers by default.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids in a row.
    task_names : list of str

    Raises
    ------
    TypeError
        An array has another dtype; float ids among them.
    ValueError
        An array has another shape, a value is not finite, a label not 0 or 1, a weight negative,
        there are weights without labels, or not as many names as tasks.

    Examples
    --------
    >>> data = Arrays(None, np.array([[7], [-1], [2**40]]), labels=[0, 1, 1])
    >>> [batch.ids.ravel().tolist() for batch in data.batches(2)]
    [[7, -1], [1099511627776]]
    """

    def __init__(
        self,
        dense: np.ndarray | None,
        ids: np.ndarray | Bags,
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        *,
        task_names: Sequence[str] = (),
    ) -> None:
        if not isinstance(ids, Bags):
            ids = np.asarray(ids)
            if ids.dtype.kind not in "iu":
                raise TypeError(f"Arrays: 'ids' must be integers, got {ids.dtype}.")
            errors.axes("Arrays", ids=(ids, "B F"))
            ids = ids.astype(np.int64, copy=False)  # of uint64 it keeps the bits
        dense = np.empty((len(ids), 0), np.float32) if dense is None else np.asarray(dense)
        if dense.dtype.kind != "f":
            raise TypeError(f"Arrays: 'dense' must be floating, got {dense.dtype}.")
        like = np.broadcast_to(0, ids.shape)  # Bags have no axes themselves
        errors.axes("Arrays", ids=(like, "B F"), dense=(dense, "B num_dense"))
        with np.errstate(over="ignore"):  # told of below
            values = dense.astype(np.float32, copy=False)
        _check("dense", "be finite", dense, np.isfinite(values))
        if labels is not None:
            labels = _labels(np.asarray(labels), like)
        if weights is not None:
            weights = _weights(np.asarray(weights), labels)
        self._dense, self._ids, self._labels, self._weights = values, ids, labels, weights
        self.num_dense, self.num_tables = dense.shape[1], ids.shape[1]
        self.task_names = list(task_names)
        if self.task_names and (labels is None or len(self.task_names) != labels.shape[1]):
            told = "no labels" if labels is None else f"{labels.shape[1]} labels"
            raise ValueError(f"Arrays: 'task_names' must name {told}, got {self.task_names}.")

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
        skip = errors.count("Arrays.batches", "skip", skip)
        count = len(self._ids)
        starts = range(skip * size, count, size)
        return (self._batch(start, min(start + size, count)) for start in starts)

    def _batch(self, start: int, stop: int) -> Batch:
        ids, labels, weights = self._ids, self._labels, self._weights
        return Batch(
            self._dense[start:stop],
            ids.part(start, stop) if isinstance(ids, Bags) else ids[start:stop],
            None if labels is None else labels[start:stop],
            weights=None if weights is None else weights[start:stop],
        )


def _labels(labels: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if labels.dtype.kind not in "biuf":
        raise TypeError(f"Arrays: 'labels' must be numbers, got {labels.dtype}.")
    if labels.ndim == 1:
        labels = labels[:, None]
    errors.axes("Arrays", ids=(ids, "B F"), labels=(labels, "B T"))
    _check("labels", "be 0 or 1", labels, (labels == 0) | (labels == 1))
    return labels.astype(np.float32, copy=False)


def _weights(weights: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
    """Those of each task; of several, one column has the same of all."""
    if labels is None:
        raise ValueError("Arrays: 'weights' must come with labels, got none.")
    if weights.dtype.kind not in "iuf":
        raise TypeError(f"Arrays: 'weights' must be numbers, got {weights.dtype}.")
    if weights.ndim == 1:
        errors.axes("Arrays", labels=(labels, "B T"), weights=(weights, "B"))
        weights = np.repeat(weights[:, None], labels.shape[1], axis=1)
    errors.axes("Arrays", labels=(labels, "B T"), weights=(weights, "B T"))
    good = (weights >= 0) & (weights <= np.finfo(np.float32).max)
    _check("weights", "be finite and not negative", weights, good)
    return weights.astype(np.float32, copy=False)


def _check(name: str, rule: str, values: np.ndarray, good: np.ndarray) -> None:
    """Raise ValueError at the first row and column where `good` is false."""
    if not good.all():
        row, column = np.unravel_index(np.argmin(good), good.shape)
        raise ValueError(
            f"Arrays: '{name}' must {rule}, "
            f"got {values[row, column]} in row {row}, column {column}."
        )
