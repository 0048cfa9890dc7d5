"""What a dataset yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.ragged import Bags

__all__ = ["Batch", "share_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a click log.

    Attributes
    ----------
    dense : (B, num_dense) float32
    ids : (B, num_tables) int64, or Bags of num_tables fields
    labels : (B, T) float32, or None where they are not known
        Of T tasks, most often one.
    weights : (B, T) float32, optional
        Factors of the samples' losses, 1 by default.
    first : int
        Number of its first row among those of the step, of which other ranks may have some.
    total : int, optional
        How many rows the step has; B by default.

    Examples
    --------
    >>> len(Batch(np.zeros((3, 1), np.float32), np.zeros((3, 2), np.int64)))
    3
    """

    dense: np.ndarray
    ids: np.ndarray | Bags
    labels: np.ndarray | None = None
    first: int = 0
    total: int = -1
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.total < 0:
            object.__setattr__(self, "total", len(self))

    def __len__(self) -> int:
        return len(self.dense)

    def to(self, device: str) -> Batch:
        """Return the batch on ``cpu``, ``cuda`` or ``sim``.

        Raises
        ------
        ValueError, RuntimeError
            No such device, or none here.

        Examples
        --------
        >>> Batch(np.zeros((3, 1), np.float32), np.zeros((3, 2), np.int64)).to("cpu").ids.shape
        (3, 2)
        """
        xp = arrays.module(device)

        def moved(column: Any) -> Any:
            return column.to(xp) if isinstance(column, Bags) else arrays.copy_to(xp, column)

        return self._each(moved)

    def of_rank(self, rank: int, ranks: int) -> Batch:
        """Return a rank's rows, as views: none at all where there are more ranks than rows.

        Examples
        --------
        >>> batch = Batch(np.zeros((5, 1), np.float32), np.zeros((5, 2), np.int64))
        >>> [(part.first, len(part), part.total) for part in map(batch.of_rank, range(2), [2] * 2)]
        [(0, 2, 5), (2, 3, 5)]
        """
        return self.part(*share_of(len(self), rank, ranks))

    def part(self, start: int, stop: int) -> Batch:
        """Return the rows from `start` on and before `stop`, as views.

        Examples
        --------
        >>> part = Batch(np.zeros((5, 1), np.float32), np.zeros((5, 2), np.int64)).part(1, 3)
        >>> part.first, len(part), part.total
        (1, 2, 5)
        """

        def rows(column: Any) -> Any:
            return column.part(start, stop) if isinstance(column, Bags) else column[start:stop]

        return dataclasses.replace(self._each(rows), first=self.first + start)

    def weighted(self, tasks: Sequence[float] = (), positives: float = 1.0) -> Batch:
        """Return the batch, on the CPU, with its weights times those of tasks and classes.

        Parameters
        ----------
        tasks : sequence of float
            Factor of each task's loss; none: 1.
        positives : float
            Factor of the losses of samples whose label is 1.

        Raises
        ------
        ValueError
            Another number of tasks than labels have, or no labels.

        Examples
        --------
        >>> labels = np.array([[0, 1], [1, 1]], np.float32)
        >>> batch = Batch(np.zeros((2, 1), "f"), np.zeros((2, 1), np.int64), labels)
        >>> batch.weighted(tasks=[1, 0.5], positives=3).weights.tolist()
        [[1.0, 1.5], [3.0, 1.5]]
        """
        if self.labels is None:
            raise ValueError("Batch.weighted: the batch must have labels, got none.")
        count = self.labels.shape[1]
        if len(tasks) not in (0, count):
            raise ValueError(
                f"Batch.weighted: 'tasks' must have a weight for each of {count} labels, "
                f"got {len(tasks)}."
            )
        weights = np.where(self.labels > 0, np.float32(positives), np.float32(1))
        weights *= np.asarray(tasks if len(tasks) else [1.0] * count, np.float32)
        if self.weights is not None:
            weights *= self.weights
        return dataclasses.replace(self, weights=weights)

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        """The batch with each of its columns that there are changed."""
        names = "dense", "ids", "labels", "weights"
        columns = {name: getattr(self, name) for name in names}
        changed = {name: change(c) for name, c in columns.items() if c is not None}
        return dataclasses.replace(self, **changed)


def share_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a rank's first row, and of that behind its last one.

    Examples
    --------
    >>> share_of(5, 0, 2), share_of(5, 1, 2)
    ((0, 2), (2, 5))
    """
    return rows * rank // ranks, rows * (rank + 1) // ranks
