"""The sum of an array over all ranks, with the same bits on each of them and in every run.

Each rank gets a slice of everyone's array, adds them up in order of rank, and gives the sum to all:
2 (N - 1) / N times the array's bytes leave a rank, the least there can be.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.ops.rank_sum import rank_sum
from cupyrec.parallel import devices
from cupyrec.parallel.communicator import Communicator, Transfer

__all__ = ["all_reduce"]

_ALIGNED = 64  # slices begin at multiples of 256 bytes


def all_reduce(ranks: Communicator, what: str, array: Any) -> Future:
    """Put the sum of the ranks' arrays in place of them.

    Parameters
    ----------
    ranks : Communicator
    what : str
        For errors and metrics.
    array : (L,) contiguous array of float32
        Of the same length on every rank.

    Returns
    -------
    concurrent.futures.Future
        Of nothing; `array` must be left alone until then.

    Raises
    ------
    ValueError, TypeError
        Another shape or dtype.

    Examples
    --------
    >>> x = np.ones(3, np.float32)
    >>> all_reduce(Communicator(), "gradients", x).result()
    >>> x
    array([1., 1., 1.], dtype=float32)
    """
    errors.dtype("all_reduce", "array", array, np.float32)
    (length,) = errors.axes("all_reduce", array=(array, "L"))
    xp, size = arrays.namespace("all_reduce", array), ranks.size
    blocks = -(-length // _ALIGNED)
    borders = np.minimum(np.arange(size + 1) * blocks // size * _ALIGNED, length)
    lengths = np.diff(borders)
    own = array[borders[ranks.rank] : borders[ranks.rank + 1]]

    def job() -> None:
        parts = devices.empty(xp, (size, own.size), np.float32)
        ranks.all_to_all(what, Transfer(array, lengths, parts.reshape(-1), [own.size] * size))
        rank_sum(parts, out=own)
        ranks.all_to_all(what, Transfer(own, None, array, lengths))

    if size == 1:
        return ranks.submit(what, lambda: None)
    _compile_sum(xp, size, own.size % 4)
    return ranks.submit(what, job, xp)


@functools.cache
def _compile_sum(xp: ModuleType, ranks: int, rest: int) -> None:
    """Compile it here: the thread that makes MPI calls would fall silent, which others take ill."""
    rank_sum(xp.zeros((ranks, 4 + rest), np.float32))
