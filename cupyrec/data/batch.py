"""What a dataset yields."""

from __future__ import annotations

import dataclasses

import numpy as np

from cupyrec import arrays

__all__ = ["Batch"]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a click log.

    Attributes
    ----------
    dense : (B, num_dense) float32
    ids : (B, num_tables) int64
    labels : (B, 1) float32, or None where they are not known

    Examples
    --------
    >>> len(Batch(np.zeros((3, 1), np.float32), np.zeros((3, 2), np.int64)))
    3
    """

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray | None = None

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
        return Batch(*(None if c is None else arrays.copy_to(xp, c) for c in columns))
