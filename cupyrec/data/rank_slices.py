"""What one of several ranks gets of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyrec import errors
from cupyrec.data.batch import Batch

__all__ = ["RankSlices"]


class RankSlices:
    """A rank's rows of each batch of any dataset, as many as those of the others, or one more.

    Every rank makes whole batches and takes its rows of them, so that a batch is the same for any
    number of ranks, and that all see as many batches: one without rows for this rank too. Where
    that costs more than a view, a dataset has a way of its own: see `TSV.of_rank`.

    Parameters
    ----------
    dataset : dataset
        The same on every rank.
    rank, ranks : int

    Raises
    ------
    ValueError, TypeError
        No such rank.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyrec.data import Arrays
    >>> data = Arrays(None, np.arange(7)[:, None])
    >>> [batch.ids.ravel().tolist() for batch in RankSlices(data, 1, 2).batches(4)]
    [[2, 3], [5, 6]]
    """

    def __init__(self, dataset: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = errors.rank("RankSlices", rank, ranks)
        self.dataset, self.task_names = dataset, getattr(dataset, "task_names", ())

    def of_rank(self, rank: int, ranks: int) -> RankSlices:
        """Return those of another rank.

        Examples
        --------
        >>> RankSlices([], 0, 2).of_rank(1, 2).rank
        1
        """
        return RankSlices(self.dataset, rank, ranks)

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over the batches, of `batch_size` rows of all ranks together.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over.
        """
        for batch in self.dataset.batches(batch_size, skip=skip):
            yield batch.of_rank(self.rank, self.ranks)
