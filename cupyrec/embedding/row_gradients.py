"""The gradients of rows in a step."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec.ops.segment_sum import segment_sum
from cupyrec.ops.unique_keys import unique_keys

__all__ = ["RowGradients", "summed"]


class RowGradients(NamedTuple):
    """Gradients of rows, each row once.

    Attributes
    ----------
    rows : (U,) array of int64
        Places of the rows.
    values : (U, D) array of float32
    tables : (U,) array of uint32
    ids : (U,) array of int64
        The rows' keys.
    squares : float or None
        Sum of the squares of `values`, where it is known.
    epoch : int
        Of the store, when it gave the places.

    Examples
    --------
    See `summed`.
    """

    rows: Any
    values: Any
    tables: Any
    ids: Any
    squares: float | None = None
    epoch: int = 0

    def of(self, numbers: Any) -> RowGradients:
        """Return those of some of the rows, by their numbers here.

        Examples
        --------
        >>> part = RowGradients(*map(np.arange, (3, 3, 3, 3)))
        >>> part.of(np.array([2])).rows
        array([2])
        """
        parts = [array[numbers] for array in self[:4]]
        return RowGradients(*parts, epoch=self.epoch)


def summed(xp: ModuleType, width: int, parts: Sequence[RowGradients]) -> RowGradients:
    """Return the sum of the gradients of several look-ups, each row once again.

    Parameters
    ----------
    xp : module
        Array module of the parts.
    width : int
        D.
    parts : sequence of RowGradients

    Examples
    --------
    >>> key = np.zeros(1, np.uint32), np.array([7])
    >>> part = RowGradients(np.array([3]), np.ones((1, 2), np.float32), *key)
    >>> total = summed(np, 2, [part, part])
    >>> total.rows, total.values
    (array([3]), array([[2., 2.]], dtype=float32))
    """
    if not parts:
        rows, values = xp.empty(0, np.int64), xp.empty((0, width), np.float32)
        return RowGradients(rows, values, xp.empty(0, np.uint32), xp.empty(0, np.int64))
    if len(parts) == 1:
        return parts[0]
    epochs = {part.epoch for part in parts}
    rows, values, tables, ids = map(xp.concatenate, zip(*(part[:4] for part in parts), strict=True))
    keys = unique_keys(tables, ids)
    first = keys.positions[keys.offsets[:-1]]
    values = segment_sum(values, keys.offsets, keys.positions)
    epoch = epochs.pop() if len(epochs) == 1 else -1  # no store's: the places are looked up anew
    return RowGradients(rows[first], values, keys.tables, keys.ids, epoch=epoch)
