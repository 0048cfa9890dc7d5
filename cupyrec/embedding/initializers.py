"""Initial vectors of ids that a table has not seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cupyrec.ops.initial_vectors import uniform_vectors

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high), by Philox of (seed, table, id, column).

    Raises
    ------
    ValueError
        A bound is not finite, or low > high.

    Examples
    --------
    >>> import numpy as np
    >>> vectors = Uniform(-0.1, 0.1)(np.zeros(1, np.uint32), np.array([42]), 4, seed=1)
    >>> bool((abs(vectors) <= 0.1).all())
    True
    """

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(
                f"Uniform: 'low' <= 'high' must be finite, got {self.low} and {self.high}."
            )

    def __call__(self, tables: Any, ids: Any, width: int, seed: int) -> Any:
        return uniform_vectors(tables, ids, width, seed, self.low, self.high)
