"""Payloads read by a thread while training goes on, for the next look-up."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

__all__ = ["ReadAhead"]


class ReadAhead:
    """The rows that the next look-up asks for, from a backing that others may write to.

    Parameters
    ----------
    backing : Backing
    words : int
        Of a payload.

    Examples
    --------
    >>> from cupyrec.embedding.host_rows import HostRows
    >>> rows = HostRows(4)
    >>> rows.write(np.arange(3), np.ones((3, 4), np.uint32))
    >>> ahead, out = ReadAhead(rows, 4), np.empty((2, 4), np.uint32)
    >>> ahead.begin(np.array([2, 0]))
    >>> rows.write(np.array([0]), np.full((1, 4), 5, np.uint32))
    >>> ahead.written(np.array([0]))
    >>> ahead.read(np.array([0, 2]), out)
    >>> out
    array([[5, 5, 5, 5],
           [1, 1, 1, 1]], dtype=uint32)
    """

    def __init__(self, backing: Any, words: int) -> None:
        self._backing, self._words = backing, words
        self._buffer, self._fresh = np.empty((0, words), np.uint32), np.empty(0, bool)
        self._rows, self._thread = np.empty(0, np.int64), None

    def begin(self, rows: np.ndarray) -> None:
        """Begin to read rows (N,), of which none comes twice, in place of those asked for before.

        Examples
        --------
        See the class.
        """
        self.forget()
        if not rows.size:
            return
        self._rows, self._fresh = np.sort(rows), np.ones(rows.size, bool)
        if len(self._buffer) < rows.size:
            self._buffer = np.empty((rows.size, self._words), np.uint32)
        given = self._rows, self._buffer[: rows.size]
        self._thread = threading.Thread(target=self._work, args=given, name="cupyrec-rows")
        self._thread.start()

    def _work(self, rows: np.ndarray, lines: np.ndarray) -> None:
        try:
            self._backing.read(rows, lines)
        except BaseException:  # whoever needs them reads them again, and hears of it
            self._fresh[:] = False

    def written(self, rows: np.ndarray) -> None:
        """Hear that rows have other payloads now.

        Examples
        --------
        See the class.
        """
        if self._rows.size:
            at = np.searchsorted(self._rows, rows)
            at = at[self._rows[np.minimum(at, self._rows.size - 1)] == rows]
            self._fresh[at] = False

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Write payloads to `out` (N, words) of uint32: those that are there, and the rest.

        Examples
        --------
        See the class.
        """
        if self._thread is None:
            self._backing.read(rows, out)
            return
        self._thread.join()
        at = np.minimum(np.searchsorted(self._rows, rows), self._rows.size - 1)
        here = (self._rows[at] == rows) & self._fresh[at]
        np.take(self._buffer, at, axis=0, out=out, mode="clip")
        rest = np.flatnonzero(~here)
        if rest.size:
            lines = np.empty((rest.size, self._words), np.uint32)
            self._backing.read(rows[rest], lines)
            out[rest] = lines
        self._rows, self._thread = np.empty(0, np.int64), None

    def forget(self) -> None:
        """Leave aside what was read; wait for it, since its memory is used again.

        Examples
        --------
        See the class.
        """
        if self._thread is not None:
            self._thread.join()
        self._rows, self._thread = np.empty(0, np.int64), None
