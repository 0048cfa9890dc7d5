"""Batches of any lengths as batches of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyrec.data.batch import Batch
from cupyrec.ragged import Bags

__all__ = ["rebatched"]


def rebatched(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Yield the same rows in batches of `size`; the last may be smaller.

    Yields
    ------
    Batch
        Arrays of its own.

    Examples
    --------
    >>> parts = [Batch(np.zeros((n, 0), "f"), np.arange(n)[:, None]) for n in (1, 3, 1)]
    >>> [batch.ids.ravel().tolist() for batch in rebatched(parts, 2)]
    [[0, 0], [1, 2], [0]]
    """
    parts, missing = [], size
    for batch in batches:
        at = 0
        while at < len(batch):
            parts.append(batch.part(at, min(at + missing, len(batch))))
            at, missing = at + len(parts[-1]), missing - len(parts[-1])
            if missing == 0:
                yield _joined(parts)
                parts, missing = [], size
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[Batch]) -> Batch:
    def joined(name: str) -> Any:
        columns = [getattr(part, name) for part in parts]
        if columns[0] is None:
            return None
        return Bags.joined(columns) if isinstance(columns[0], Bags) else np.concatenate(columns)

    names = "dense", "ids", "labels", "weights"
    return Batch(**{name: joined(name) for name in names})
