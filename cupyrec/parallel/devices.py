"""What messages between ranks need of a device's arrays."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["empty", "event", "pinned_like", "received"]


def event(xp: ModuleType) -> Any:
    """Return what another thread can wait for: the end of all that was given to the current stream.

    None where the host has done it already, as on the CPU and in the simulator.

    Examples
    --------
    >>> event(np)
    """
    if arrays.name(xp) != "cuda":
        return None
    return xp.cuda.get_current_stream().record(xp.cuda.Event(block=True, disable_timing=True))


def empty(xp: ModuleType, shape: Any, dtype: Any) -> Any:
    """Return a new array that messages may be received into at once.

    MPI heeds no stream, while a pool hands memory out again before kernels that use it have run.

    Examples
    --------
    >>> empty(np, (2, 3), np.float32).shape
    (2, 3)
    """
    made = xp.empty(shape, dtype)
    if (given := event(xp)) is not None:
        given.synchronize()
    return made


def pinned_like(array: Any) -> np.ndarray:
    """Return a new array in the host's memory that a GPU's `array` can be copied to and from fast.

    Examples
    --------
    >>> pinned_like(np.zeros(2)).shape
    (2,)
    """
    if arrays.device(array) != "cuda" or not array.size:
        return np.empty(array.shape, array.dtype)
    memory = sys.modules["cupy"].cuda.alloc_pinned_memory(array.nbytes)  # from a pool
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)


def received(array: Any) -> None:
    """Tell the simulator that another process has written an array.

    Examples
    --------
    >>> received(np.zeros(2))
    """
    if arrays.device(array) == "sim":
        array._written()[...] = 1
