"""Which device an array belongs to, and where its memory comes from.

Version 0.1 knows one device: ``cpu``, NumPy's arrays.
"""

from __future__ import annotations

import math
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["empty", "namespace"]


def namespace(where: str, *arrays: Any) -> ModuleType:
    """Return the array module that all `arrays` belong to.

    Parameters
    ----------
    where : str
        Name of the caller, for the error sentence.
    *arrays : array
        Arrays of one device.

    Returns
    -------
    module
        ``numpy``.

    Raises
    ------
    TypeError
        An argument is not an array of a device this version has.

    Examples
    --------
    >>> namespace("f", np.zeros(3)).__name__
    'numpy'
    >>> namespace("f", [1, 2])
    Traceback (most recent call last):
        ...
    TypeError: f: arguments must be NumPy arrays (device 'cpu'), got list.
    """
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{where}: arguments must be NumPy arrays (device 'cpu'), "
                f"got {type(array).__name__}."
            )
    return np


class _Pool:
    """Buffers that are used again once nobody holds a view of them.

    The C library gives large arrays back to the system when they are freed, and the system clears
    every page again for the next one: a seventh of a DLRM step (8,400 page faults), were it not for
    this pool. CuPy has its own.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[np.ndarray]] = {}
        self._used: dict[int, int] = {}  # address of a buffer -> number of the request it served
        self._requests = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """An idle buffer of at least `nbytes`, or else a new one."""
        step = 1 << max(0, nbytes.bit_length() - 4)
        size = -(-nbytes // step) * step  # at most an eighth is wasted, and few sizes are met
        with self._lock:
            self._requests += 1
            for buffer in self._buffers.get(size, ()):
                if _references(buffer) == _IDLE:
                    break
            else:
                self._forget()
                buffer = np.empty(size, np.uint8)
                self._buffers.setdefault(size, []).append(buffer)
            self._used[buffer.ctypes.data] = self._requests
            return buffer[:nbytes]

    def _forget(self) -> None:
        """Free what no request has used for long: other shapes than today's."""
        for size, buffers in self._buffers.items():
            recent = [self._requests - self._used[b.ctypes.data] < _KEPT for b in buffers]
            self._buffers[size] = [b for b, keep in zip(buffers, recent, strict=True) if keep]


def _references(buffer: np.ndarray) -> int:
    return sys.getrefcount(buffer)


#: References to a buffer that only a list holds, as counted from within a loop over that list.
_IDLE = next(_references(buffer) for buffer in [np.empty(1, np.uint8)])
_pool = _Pool()
_POOLED = 1 << 18  # bytes from which on an array comes from the pool
_KEPT = 512  # requests that an unused buffer outlives


def empty(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a new array with arbitrary contents, as `numpy.empty`, from memory used before.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Examples
    --------
    >>> empty((2, 3), np.float32).shape
    (2, 3)
    """
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _POOLED:
        return np.empty(shape, dtype)
    return _pool.take(nbytes).view(dtype).reshape(shape)
