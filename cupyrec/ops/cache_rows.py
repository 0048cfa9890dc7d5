"""Copies of rows between a cache and payloads, lines of what backings hold of a row.

A payload is the row's `stride` words, then 4 words: low and high word of the id, table, count.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.cache_sets import CacheSets
from cupyrec.ops.row_memory import RowMemory, row_addresses, row_of

__all__ = ["fill_rows", "take_rows"]

_ROWS = 512  # a block of a CPU loop
_NEAR, _RECORD = 16, 32  # slots to the one that is asked for; bytes of a record
_PIECES = 4 * 256  # of 4 words, a block of a kernel


@cpu.exact_loop
def _fill_cpu(memory, lines, slots, payloads):
    addresses = row_addresses(memory, slots)
    for u in range(lines.size):
        row_of(memory, addresses, u).view(np.uint32)[:] = payloads[lines[u], : memory.stride]


@cpu.exact_loop
def _take_cpu(memory, records, lines, slots, payloads):
    addresses = row_addresses(memory, slots)
    for u in range(lines.size):
        if u + _NEAR < lines.size:
            at = np.uint64(slots[u + _NEAR]) * np.uint64(_RECORD)
            cpu.prefetch(np.uint64(records.ctypes.data) + at)
        line, record = payloads[lines[u]], records[slots[u]]
        line[: memory.stride] = row_of(memory, addresses, u).view(np.uint32)
        for to, word in enumerate((0, 1, 2, 4), memory.stride):
            line[to] = record[word]


def _lines(slots: np.ndarray, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of lines i to j - 1 have a slot, and these slots."""
    lines = i + np.flatnonzero(slots[i:j] >= 0)
    return lines, slots[lines]


_fill = Kernel(
    "cache_rows.cu", "fill_rows",
    "const uint64_t* chunks, int k, const int64_t* slots, const uint32_t* payloads, int64_t n",
    lambda N, stride: Geometry(blocks(N * (stride // 4), _PIECES), 256),
)  # fmt: skip
_take = Kernel(
    "cache_rows.cu", "take_rows",
    "const uint64_t* chunks, int k, const uint32_t* records, const int64_t* slots,"
    " uint32_t* payloads, int64_t n",
    lambda N, stride: Geometry(blocks(N * (stride // 4 + 1), _PIECES), 256),
)  # fmt: skip


def fill_rows(memory: RowMemory, slots: Any, payloads: Any) -> None:
    """Write the rows of payloads into slots.

    Parameters
    ----------
    memory : RowMemory
        Its rows are the slots.
    slots : (N,) array of int64
        None twice; lines of negative ones are passed over. They are not checked.
    payloads : (N, stride + 4) array of uint32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree.

    Examples
    --------
    >>> chunk = np.zeros((4, 4), np.uint32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=2, stride=4)
    >>> fill_rows(memory, np.array([2, -1]), np.arange(16, dtype=np.uint32).reshape(2, 8))
    >>> chunk[2]
    array([0, 1, 2, 3], dtype=uint32)
    """
    xp, n = _check("fill_rows", memory, slots, payloads), len(slots)
    if xp is np:
        cpu.parallel(lambda i, j: _fill_cpu(memory, *_lines(slots, i, j), payloads), n, _ROWS)
        return
    given = xp.ascontiguousarray(slots), xp.ascontiguousarray(payloads)
    _fill(*memory[:2], *given, n, macros={"STRIDE": memory.stride}, N=n, stride=memory.stride)


def take_rows(memory: RowMemory, sets: CacheSets, slots: Any, payloads: Any) -> None:
    """Write what slots hold into payloads: row, key and count.

    Parameters
    ----------
    memory : RowMemory
        Its rows are the slots.
    sets : CacheSets
        Whose slots they are.
    slots : (N,) array of int64
        Lines of negative ones stay as they are. They are not checked.
    payloads : (N, stride + 4) array of uint32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree.

    Examples
    --------
    >>> sets, tables, ids = CacheSets(32), np.array([3], np.uint32), np.array([7])
    >>> slots = sets.plan(tables, ids, now=1, since=1).slots
    >>> sets.put(slots, tables, ids, np.array([0]), np.array([5]), now=1)
    >>> chunk = np.ones((32, 4), np.uint32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=5, stride=4)
    >>> payloads = np.empty((1, 8), np.uint32)
    >>> take_rows(memory, sets, slots, payloads)
    >>> payloads
    array([[1, 1, 1, 1, 7, 0, 3, 5]], dtype=uint32)
    """
    xp, n = _check("take_rows", memory, slots, payloads, sets.words), len(slots)
    if xp is np:
        records = sets.words
        cpu.parallel(
            lambda i, j: _take_cpu(memory, records, *_lines(slots, i, j), payloads), n, _ROWS
        )
        return
    given = sets.words, xp.ascontiguousarray(slots), payloads
    _take(*memory[:2], *given, n, macros={"STRIDE": memory.stride}, N=n, stride=memory.stride)


def _check(where: str, memory: RowMemory, slots: Any, payloads: Any, *others: Any) -> ModuleType:
    """The arrays' module."""
    errors.dtype(where, "memory.chunks", memory.chunks, np.uint64)
    errors.dtype(where, "slots", slots, np.int64)
    errors.dtype(where, "payloads", payloads, np.uint32)
    errors.axes(where, slots=(slots, "N"), payloads=(payloads, f"N {memory.stride + 4}"))
    return arrays.namespace(where, memory.chunks, slots, payloads, *others)
