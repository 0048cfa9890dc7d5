"""A cache in the host's memory between a GPU's and the files of the tier `cached_ssd`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec.embedding.row_cache import TAIL, Backing, RowCache
from cupyrec.ops.embedding_rows import FLOAT32
from cupyrec.ops.payload_rows import copy_in, copy_out

__all__ = ["HostCache"]


class HostCache:
    """A backing that keeps in memory what its own is asked for most.

    Parameters
    ----------
    backing : Backing
    words : int
        Of a payload.
    rows : int
        That the cache holds.

    Notes
    -----
    A lock lets one thread in at a time, as look-ups change what is where: one reads ahead.

    Examples
    --------
    >>> from cupyrec.embedding.host_rows import HostRows
    >>> rows = HostCache(HostRows(4), 4, 32)
    >>> rows.write(np.array([1, 0]), np.array([[1] * 4, [2] * 4], np.uint32))
    >>> out = np.empty((1, 4), np.uint32)
    >>> rows.read(np.array([1]), out)
    >>> len(rows), out
    (2, array([[1, 1, 1, 1]], dtype=uint32))
    """

    in_memory = False

    def __init__(self, backing: Backing, words: int, rows: int) -> None:
        self.backing, self.words, self._lock = backing, words, threading.RLock()
        self._len = len(backing)
        self._cache = RowCache(rows, words, FLOAT32, _Plain(backing, words), np)

    def __len__(self) -> int:
        return self._len

    meta = property(lambda self: self.backing.meta)
    disk_bytes = property(lambda self: self.backing.disk_bytes)
    nbytes = property(lambda self: self.backing.nbytes + self._cache.nbytes)

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Write payloads to `out` (N, words) of uint32.

        Examples
        --------
        See the class.
        """
        with self._lock:
            slots, missing, _, absent = self._find(rows)
            if len(missing):
                lines = np.empty((len(missing), self.words), np.uint32)
                self.backing.read(absent, lines)
                slots[missing] = self._admit(absent, lines, dirty=False)
            copy_out(self._cache.memory, slots, out)

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        """Give rows payloads (N, words) of uint32.

        Examples
        --------
        See the class.
        """
        with self._lock:
            slots, missing, _, absent = self._find(rows)
            if len(missing):
                slots[missing] = self._admit(absent, lines[missing], dirty=True)
            copy_in(self._cache.memory, slots, np.ascontiguousarray(lines))
            self._cache.mark(slots)
            self._len = max(self._len, int(rows.max(initial=-1)) + 1)

    def _find(self, rows: np.ndarray) -> tuple:
        self._cache.begin()
        return self._cache.find(np.zeros(len(rows), np.uint32), rows, np.ones(len(rows), np.int64))

    def _admit(self, rows: np.ndarray, lines: np.ndarray, dirty: bool) -> np.ndarray:
        tailed = np.empty((len(rows), self.words + TAIL), np.uint32)
        tailed[:, :-TAIL] = lines
        keys = np.zeros(len(rows), np.uint32), rows
        counts = np.ones(len(rows), np.int64)
        return self._cache.admit(*keys, rows, counts, tailed, dirty=dirty)

    def truncate(self, count: int) -> None:
        """Forget rows from number `count` on.

        Examples
        --------
        >>> from cupyrec.embedding.host_rows import HostRows
        >>> HostCache(HostRows(4), 4, 32).truncate(0)
        """
        with self._lock:
            self._cache.flush()
            self._cache.clear()
            self.backing.truncate(count)
            self._len = min(self._len, count)

    def records(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all rows, some at a time: their numbers (N,) and payloads.

        Examples
        --------
        >>> from cupyrec.embedding.host_rows import HostRows
        >>> list(HostCache(HostRows(4), 4, 32).records())
        []
        """
        with self._lock:
            self._cache.flush()
            yield from self.backing.records()

    def commit(self, meta: dict[str, Any]) -> None:
        """Make rows last, and `meta`.

        Examples
        --------
        >>> from cupyrec.embedding.host_rows import HostRows
        >>> HostCache(HostRows(4), 4, 32).commit({})
        """
        with self._lock:
            self._cache.flush()
            self.backing.commit(meta)

    def close(self) -> None:
        """Let files go; what changed since the last commit is forgotten.

        Examples
        --------
        >>> from cupyrec.embedding.host_rows import HostRows
        >>> HostCache(HostRows(4), 4, 32).close()
        """
        self.backing.close()


class _Plain:
    """The backing of the cache below: its payloads without the tails of its own keys."""

    def __init__(self, backing: Backing, words: int) -> None:
        self._backing, self._words = backing, words

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        self._backing.write(rows, np.ascontiguousarray(lines[:, : self._words]))
