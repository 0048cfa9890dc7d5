"""A bit of each row number, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu

__all__ = ["RowBits"]

_1, _63 = np.uint64(1), np.int64(63)


@cpu.exact_loop
def _bit(row):
    return _1 << np.uint64(row & _63)


@cpu.exact_loop
def _set_cpu(words, rows):
    for row in rows:
        words[row >> 6] |= _bit(row)


@cpu.exact_loop
def _clear_cpu(words, rows):
    for row in rows:
        if row >> 6 < words.size:
            words[row >> 6] &= ~_bit(row)


@cpu.exact_loop
def _has_cpu(words, rows, out):
    for i in range(rows.size):
        row = rows[i]
        out[i] = 0 <= row >> 6 < words.size and words[row >> 6] & _bit(row) != 0


class RowBits:
    """A set of row numbers, of an eighth of a byte each up to the largest.

    Examples
    --------
    >>> bits = RowBits()
    >>> bits.set(np.array([0, 5, 200]))
    >>> bits.clear(np.array([0, 1]))
    >>> bits.has(np.array([-1, 0, 5, 200, 10**9]))
    array([False, False,  True,  True, False])
    >>> bits.truncate(200)
    >>> bits.fill(2)
    >>> bits.has(np.array([0, 1, 2, 5, 200]))
    array([ True,  True, False,  True, False])
    """

    def __init__(self) -> None:
        self._words = np.zeros(0, np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes; what waits for larger numbers are addresses only."""
        return self._words.nbytes

    def set(self, rows: Any) -> None:
        """Add numbers, (N,) int64.

        Examples
        --------
        See the class.
        """
        self._reach(int(rows.max(initial=-1)) + 1)
        _set_cpu(self._words, rows)

    def clear(self, rows: Any) -> None:
        """Remove numbers, (N,) int64, those that are there.

        Examples
        --------
        See the class.
        """
        _clear_cpu(self._words, rows)

    def has(self, rows: Any) -> Any:
        """Return which of the numbers (N,) int64 are there, (N,) bool; none below 0 is.

        Examples
        --------
        See the class.
        """
        out = np.empty(rows.size, bool)
        _has_cpu(self._words, rows, out)
        return out

    def fill(self, count: int) -> None:
        """Add the numbers below `count`.

        Examples
        --------
        See the class.
        """
        self._reach(count)
        self._words[: count // 64] = ~np.uint64(0)
        self.set(np.arange(count // 64 * 64, count))

    def truncate(self, count: int) -> None:
        """Remove the numbers from `count` on.

        Examples
        --------
        See the class.
        """
        self.clear(np.arange(count, -(-count // 64) * 64))
        self._words[-(-count // 64) :] = 0

    def _reach(self, count: int) -> None:
        """Have a word for each of so many numbers."""
        if count > 64 * self._words.size:
            words = arrays.pages(max(16, 2 * self._words.size, -(-count // 64)), np.uint64)
            words[: self._words.size] = self._words
            self._words = words
