"""Copies between lines of an array and rows in the CPU's memory: line i and row rows[i]."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import cpu, errors
from cupyrec.ops.row_memory import RowMemory, row_addresses, row_of

__all__ = ["copy_in", "copy_out"]

_ROWS = 4096  # a block


@cpu.exact_loop
def _out_cpu(memory, rows, lines):
    addresses = row_addresses(memory, rows)
    for i in range(rows.size):
        words = row_of(memory, addresses, i)
        for j in range(lines.shape[1]):
            lines[i, j] = words[j]


@cpu.exact_loop
def _in_cpu(memory, rows, lines):
    addresses = row_addresses(memory, rows)
    for i in range(rows.size):
        words = row_of(memory, addresses, i)
        for j in range(lines.shape[1]):
            words[j] = lines[i, j]


def copy_out(memory: RowMemory, rows: np.ndarray, lines: np.ndarray) -> None:
    """Copy rows to lines.

    Parameters
    ----------
    memory : RowMemory
        On the CPU.
    rows : (N,) array of int64
    lines : (N, words) array of uint32
        At most as many words as a row has: its first ones.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.uint32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> lines = np.empty((1, 4), np.uint32)
    >>> copy_out(memory, np.array([1]), lines)
    >>> lines
    array([[4, 5, 6, 7]], dtype=uint32)
    """
    _copy("copy_out", _out_cpu, memory, rows, lines)


def copy_in(memory: RowMemory, rows: np.ndarray, lines: np.ndarray) -> None:
    """Copy lines to rows, of which none comes twice.

    Parameters
    ----------
    memory, rows, lines
        As of `copy_out`.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.zeros((2, 4), np.uint32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> copy_in(memory, np.array([1]), np.full((1, 4), 7, np.uint32))
    >>> chunk[1]
    array([7, 7, 7, 7], dtype=uint32)
    """
    _copy("copy_in", _in_cpu, memory, rows, lines)


def _copy(where: str, loop: Any, memory: RowMemory, rows: Any, lines: Any) -> None:
    errors.dtype(where, "rows", rows, np.int64)
    errors.dtype(where, "lines", lines, np.uint32)
    errors.axes(where, rows=(rows, "N"), lines=(lines, "N words"))
    if lines.shape[1] > memory.stride:
        raise ValueError(
            f"{where}: 'lines' must have at most {memory.stride} words like a row, "
            f"got {lines.shape[1]}."
        )
    lines = lines.view(np.float32)  # as loops see rows; they copy bits
    cpu.parallel(lambda i, j: loop(memory, rows[i:j], lines[i:j]), len(rows), _ROWS)
