"""What messages between ranks need of devices: their arrays, and work in order over two threads.

The thread that makes all MPI calls works on a stream of its own of the GPU of whoever asks. It
begins when all has been done that this one had been given, and the result is there when the future
has it: no stream needs to wait for another.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, streams

__all__ = ["Given", "Room", "empty", "fetched", "finish", "pinned", "pinned_like", "received"]


class Given:
    """What a thread has given to devices by now, for another thread to go on from.

    Parameters
    ----------
    *modules : module
        Array modules; NumPy's work is done when it has been given.

    Examples
    --------
    >>> given = Given(np)
    >>> with given.taken_up():
    ...     pass
    """

    def __init__(self, *modules: ModuleType) -> None:
        self._of = [(xp, xp.cuda.Device(), _event(xp)) for xp in set(modules) if xp is not np]

    @contextlib.contextmanager
    def taken_up(self) -> Iterator[None]:
        """Work on the same GPUs, which are each thread's own choice, once they have done all that.

        At the end they have done what they were given within this context, too.

        Examples
        --------
        See the class.
        """
        with contextlib.ExitStack() as stack:
            for xp, device, event in self._of:
                stack.enter_context(device)
                stack.enter_context(streams.exchange_stream(xp))
                event.synchronize()
            yield
            for xp, *_ in self._of:
                finish(xp)


class Room:
    """Memory of this thread's stream, for what another thread will know the size of.

    A pool hands memory out again to the stream that it came from, which nothing holds for the work
    of another: so the other thread must not make what this one is to use.

    Parameters
    ----------
    xp : module
    guess : int
        Items that will do, most likely.
    dtype : dtype

    Examples
    --------
    >>> room = Room(np, 10, np.int64)
    >>> room.of(3).shape, room.of(11).shape
    ((3,), (11,))
    """

    def __init__(self, xp: ModuleType, guess: int, dtype: Any) -> None:
        self._xp, self._dtype = xp, dtype
        self._made = xp.empty(guess, dtype)
        self._stream = contextlib.nullcontext() if xp is np else xp.cuda.get_current_stream()

    def of(self, count: int) -> Any:
        """Return an array for messages of so many items.

        Examples
        --------
        See the class.
        """
        if count <= len(self._made):
            return self._made[:count]
        with self._stream:
            return empty(self._xp, count, self._dtype)  # when that stream has done all: rare


def _event(xp: ModuleType) -> Any:
    """The end of all that was given to the current stream."""
    return xp.cuda.get_current_stream().record(xp.cuda.Event(block=True, disable_timing=True))


def finish(xp: ModuleType) -> None:
    """Wait until all is done that was given to this thread's current stream.

    Examples
    --------
    >>> finish(np)
    """
    if xp is not np:
        _event(xp).synchronize()


def empty(xp: ModuleType, shape: Any, dtype: Any) -> Any:
    """Return a new array that messages may be received into at once.

    MPI heeds no stream, while a pool hands memory out again before kernels that use it have run.

    Examples
    --------
    >>> empty(np, (2, 3), np.float32).shape
    (2, 3)
    """
    made = xp.empty(shape, dtype)
    finish(xp)
    return made


def pinned(xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a new array in the host's memory that is copied to and from a device fast.

    Examples
    --------
    >>> pinned(np, (2, 3), np.uint32).shape
    (2, 3)
    """
    if xp is np:
        return arrays.empty(shape, dtype)
    size = math.prod(shape)
    if arrays.name(xp) != "cuda" or not size:
        return np.empty(shape, dtype)
    dtype = np.dtype(dtype)
    memory = sys.modules["cupy"].cuda.alloc_pinned_memory(size * dtype.itemsize)  # from a pool
    return np.frombuffer(memory, dtype, size).reshape(shape)


def pinned_like(array: Any) -> np.ndarray:
    """Return a new array in the host's memory that a GPU's `array` can be copied to and from fast.

    Examples
    --------
    >>> pinned_like(np.zeros(2)).shape
    (2,)
    """
    return pinned(arrays.namespace("pinned_like", array), array.shape, array.dtype)


def fetched(array: Any) -> np.ndarray:
    """Return a copy of a device's array, from where messages can be sent.

    Examples
    --------
    >>> fetched(np.zeros(2))
    array([0., 0.])
    """
    if arrays.device(array) != "cuda" or not array.size:
        return arrays.to_host(array)
    return array.get(out=pinned_like(array))


def received(array: Any) -> None:
    """Tell the simulator that another process has written an array.

    Examples
    --------
    >>> received(np.zeros(2))
    """
    if arrays.device(array) == "sim":
        array._written()[...] = 1
