"""Memory of the CPU for arrays that are read at random, too small for a huge page of their own.

A look-up at a random place of a large table misses the TLB on pages of 4 KB, mostly not on huge
ones of 2 MB. The kernel makes none of a mapping that is smaller, so arrays share them here: they
lie one behind another in large regions.
"""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
import threading
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["HugePages"]

_HUGE = 2 << 20
_REGION = 64 << 20  # bytes of a region, unless an array is larger or all so far are much smaller
_LEAST = _HUGE // 8  # bytes from which on an array lies in huge pages


class _Region:
    """A mapping of whole huge pages, which ends with its last reference."""

    def __init__(self, nbytes: int) -> None:
        self.size, self.taken = -(-nbytes // _HUGE) * _HUGE, 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self.size + _HUGE, flags=flags)
        start = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._skipped = -start % _HUGE
        self.address = start + self._skipped
        self._advise(mmap.MADV_HUGEPAGE, 0, self.size)

    def give_back(self, start: int, stop: int) -> None:
        """Return bytes to the system, which else would fill them again to keep their pages huge."""
        first, last = start // _HUGE * _HUGE, -(-stop // _HUGE) * _HUGE
        self._advise(mmap.MADV_NOHUGEPAGE, first, last)
        self._advise(mmap.MADV_DONTNEED, start, stop)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(advice, self._skipped + start, stop - start)


class _Piece:
    """What an array and all its views refer to: the bytes go back once they are gone."""

    def __init__(self, owner: HugePages, region: _Region, nbytes: int) -> None:
        self._owner, self._region, self._start = owner, region, region.taken
        region.taken += nbytes
        self._stop = region.taken

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.__array_interface__ = {
            "data": (self._region.address + self._start, False),
            "shape": shape, "typestr": np.dtype(dtype).str, "version": 3,
        }  # fmt: skip
        return np.asarray(self)

    def __del__(self) -> None:
        self._owner._free(self._region, self._start, self._stop)


class HugePages:
    """Zeros that lie one behind another in huge pages, where the system has them.

    The memory of an array goes back to the system with it. Of a huge page that others use still,
    the kernel takes it when it runs short, and no array gets it again, so they should die in about
    the order in which they were made. Small arrays are plain ones. Any thread may make arrays and
    let them go. A copy is empty.

    Examples
    --------
    >>> pages = HugePages()
    >>> x = pages.zeros((1000, 100), np.int64)
    >>> x.any(), pages.spare
    (np.False_, 1294336)
    """

    def __init__(self) -> None:
        self._region: _Region | None = None  # of the last array
        self._taken = 0  # bytes, ever
        self._lock = threading.Lock()
        # The garbage collector may end an array anywhere, even where this thread has the lock.
        self._dead: collections.deque[tuple[_Region, int, int]] = collections.deque()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return HugePages, ()

    @property
    def spare(self) -> int:
        """Bytes behind the last array that came with its huge page."""
        return 0 if self._region is None else -self._region.taken % _HUGE

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return zeros, as `numpy.zeros`.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype

        Raises
        ------
        MemoryError
            There is no room.

        Examples
        --------
        See the class.
        """
        shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
        shape = tuple(map(int, shape))
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return arrays.pages(shape, dtype)
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with self._lock:
                if self._region is None or self._region.taken + nbytes > self._region.size:
                    self._begin(max(nbytes, min(4 * self._taken, _REGION)))
                piece = _Piece(self, self._region, nbytes)
                self._taken += nbytes
        except OSError:  # no room for a region
            return arrays.pages(shape, dtype)
        self._give_back()
        return piece.array(shape, dtype)

    def _begin(self, nbytes: int) -> None:
        """Take a region, and give back what the last one came with too much."""
        before, self._region = self._region, _Region(nbytes)
        if before is not None:
            before.give_back(before.taken, before.size)

    def _free(self, region: _Region, start: int, stop: int) -> None:
        self._dead.append((region, start, stop))
        self._give_back()

    def _give_back(self) -> None:
        """Return memory of the dead, unless the lock is taken: who has it looks afterwards."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                while self._dead:
                    region, start, stop = self._dead.popleft()
                    region.give_back(start, stop)
            finally:
                self._lock.release()
