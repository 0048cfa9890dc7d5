"""The tier `cached_host` below its cache: rows by number in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.kernel import blocks
from cupyrec.ops.payload_rows import copy_in, copy_out
from cupyrec.ops.row_memory import RowMemory

__all__ = ["HostRows"]

_CHUNK_BYTES = 64 << 20
_ROWS = 1 << 16  # rows told at a time


class HostRows:
    """Lines of 4-byte words by number, in chunks that never move; they grow without limit.

    Parameters
    ----------
    words : int
        Of a row; a multiple of 4.

    Examples
    --------
    >>> rows = HostRows(4)
    >>> rows.write(np.array([1, 0]), np.array([[1] * 4, [2] * 4], np.uint32))
    >>> out = np.empty((1, 4), np.uint32)
    >>> rows.read(np.array([1]), out)
    >>> len(rows), out
    (2, array([[1, 1, 1, 1]], dtype=uint32))
    """

    in_memory = True
    disk_bytes = 0

    def __init__(self, words: int) -> None:
        errors.positive("HostRows", "words", words)
        self.words, self._len, self.meta = words, 0, {}
        self._chunks: list[np.ndarray] = []
        k = max(0, (_CHUNK_BYTES // (4 * words)).bit_length() - 1)
        self._memory = RowMemory(np.empty(0, np.uint64), k, words)

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        """Bytes of the rows; memory that waits for more is addresses only."""
        return len(self) * self.words * 4

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Write rows to `out` (N, words) of uint32.

        Raises
        ------
        ValueError
            There is no such row.

        Examples
        --------
        See the class.
        """
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise ValueError(
                f"HostRows.read: rows must lie in [0, {len(self)}), "
                f"got {rows.min()} to {rows.max()}."
            )
        copy_out(self._memory, rows, out)

    def write(self, rows: np.ndarray, lines: np.ndarray) -> None:
        """Give rows the words of `lines` (N, words) of uint32, new numbers among them.

        Examples
        --------
        See the class.
        """
        length = max(len(self), int(rows.max(initial=-1)) + 1)
        size = 1 << self._memory.k
        for c in range(len(self._chunks), blocks(length, size)):
            self._chunks.append(arrays.pages((size, self.words), np.uint32))
            self._locate(c)
        copy_in(self._memory, rows, np.ascontiguousarray(lines))
        self._len = length

    def truncate(self, count: int) -> None:
        """Forget rows from number `count` on.

        Examples
        --------
        >>> rows = HostRows(4)
        >>> rows.write(np.array([0]), np.ones((1, 4), np.uint32))
        >>> rows.truncate(0)
        >>> len(rows)
        0
        """
        self._len = min(self._len, count)
        used = blocks(self._len, 1 << self._memory.k)
        del self._chunks[used:]
        self._memory = self._memory._replace(chunks=self._memory.chunks[:used].copy())

    def records(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all rows, some at a time: their numbers (N,) and words (N, words) of uint32.

        Examples
        --------
        >>> list(HostRows(4).records())
        []
        """
        for first in range(0, len(self), _ROWS):
            rows = np.arange(first, min(first + _ROWS, len(self)))
            lines = np.empty((rows.size, self.words), np.uint32)
            self.read(rows, lines)
            yield rows, lines

    def commit(self, meta: dict[str, Any]) -> None:
        """Keep `meta`; memory lasts as long as the process.

        Examples
        --------
        >>> HostRows(4).commit({})
        """
        self.meta = meta

    def close(self) -> None:
        """Let the memory go.

        Examples
        --------
        >>> HostRows(4).close()
        """
        self.truncate(0)

    def _locate(self, known: int) -> None:
        addresses = np.array([arrays.address(c) for c in self._chunks[known:]], np.uint64)
        chunks = np.concatenate([self._memory.chunks[:known], addresses])
        self._memory = self._memory._replace(chunks=chunks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._locate(0)  # a copy's chunks lie elsewhere
