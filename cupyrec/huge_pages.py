"""Huge pages for arrays that are too small for one of their own.

A look-up at a random place of a large table misses the TLB on pages of 4 KB, mostly not on huge
ones of 2 MB, and the kernel makes none of a mapping that is smaller. So there are two allocators of
what lives long and is read at random: `arrays.pages`, the rule, gives an array a mapping of its
own; `HugePages` puts many arrays one behind another in large mappings. It is for parts of one table
that are smaller than a few huge pages, once the table is large beside one: the last is rarely full.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["HugePages"]

_HUGE = 2 << 20
_REGION = 64 << 20  # bytes of a region, or a multiple: addresses only, until they are written to
_LEAST = _HUGE // 8  # bytes from which on an array lies in huge pages


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class _Region:
    """A mapping that ends with its last reference; from the address `free` on nobody has it."""

    def __init__(self, nbytes: int) -> None:
        nbytes = _up(nbytes, _REGION)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes + _HUGE, flags=flags)
        self._start = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.free = _up(self._start, _HUGE)
        self.stop = self.free + nbytes
        self._advise(mmap.MADV_HUGEPAGE, self.free, self.stop)

    def give_back(self, start: int, stop: int) -> None:
        """Return whole pages to the system, which else would fill them again to keep them huge."""
        self._advise(mmap.MADV_NOHUGEPAGE, start // _HUGE * _HUGE, _up(stop, _HUGE))
        self._advise(mmap.MADV_DONTNEED, start, stop)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(advice, start - self._start, stop - start)


class _Piece:
    """What an array and all its views refer to: the memory goes back once they are gone.

    That takes no lock, since the garbage collector may do it anywhere, even where this very thread
    has one; nor need it, since no other array ever lies here.
    """

    def __init__(self, region: _Region, nbytes: int) -> None:
        self._region, self._start = region, region.free
        region.free = self._stop = self._start + _up(nbytes, mmap.PAGESIZE)
        self.__array_interface__ = {
            "data": (self._start, False), "shape": (nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        self._region.give_back(self._start, self._stop)


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
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return HugePages, ()

    @property
    def spare(self) -> int:
        """Bytes behind the last array that came with its huge page."""
        return 0 if self._region is None else -self._region.free % _HUGE

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
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if nbytes < _LEAST:
            return arrays.pages(shape, dtype)
        try:
            with self._lock:
                piece = _Piece(self._with_room(nbytes), nbytes)
        except OSError:  # no room for a region
            return arrays.pages(shape, dtype)
        return np.asarray(piece).view(dtype).reshape(shape)

    def _with_room(self, nbytes: int) -> _Region:
        """The region of the last array, or a new one, and the rest of the last goes back."""
        before = self._region
        if before is None or before.free + nbytes > before.stop:
            self._region = _Region(nbytes)
            if before is not None:
                before.give_back(before.free, before.stop)
        return self._region
