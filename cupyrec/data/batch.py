"""What a dataset yields."""

from __future__ import annotations

import dataclasses

import numpy as np

from cupyrec import arrays

__all__ = ["Batch", "share_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a click log.

    Attributes
    ----------
    dense : (B, num_dense) float32
    ids : (B, num_tables) int64
    labels : (B, 1) float32, or None where they are not known
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
    ids: np.ndarray
    labels: np.ndarray | None = None
    first: int = 0
    total: int = -1

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
        columns = (self.dense, self.ids, self.labels)
        moved = (None if c is None else arrays.copy_to(xp, c) for c in columns)
        return Batch(*moved, self.first, self.total)

    def of_rank(self, rank: int, ranks: int) -> Batch:
        """Return a rank's rows, as views: none at all where there are more ranks than rows.

        Examples
        --------
        >>> batch = Batch(np.zeros((5, 1), np.float32), np.zeros((5, 2), np.int64))
        >>> [(part.first, len(part), part.total) for part in map(batch.of_rank, range(2), [2] * 2)]
        [(0, 2, 5), (2, 3, 5)]
        """
        first, stop = share_of(len(self), rank, ranks)
        columns = (self.dense, self.ids, self.labels)
        rows = (None if c is None else c[first:stop] for c in columns)
        return Batch(*rows, self.first + first, self.total)


def share_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a rank's first row, and of that behind its last one.

    Examples
    --------
    >>> share_of(5, 0, 2), share_of(5, 1, 2)
    ((0, 2), (2, 5))
    """
    return rows * rank // ranks, rows * (rank + 1) // ranks
