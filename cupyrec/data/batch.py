"""What a dataset yields."""

from __future__ import annotations

import dataclasses

import numpy as np

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
