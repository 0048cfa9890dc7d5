"""Note in rows when they were last looked up, and how often: two words of int32, a row's life.

word at      = step
word at + 1  = min(word at + 1 + offsets[u + 1] - offsets[u], 2**31 - 1)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.row_memory import RowMemory, row_address
from cupyrec.ops.vector_sums import vector_at

__all__ = ["touch_rows"]

_ROWS = 4096  # a block of the CPU loop
_AHEAD = 32  # rows to the one that is asked for
_MOST = (1 << 31) - 1


@cpu.exact_loop
def _touch_cpu(memory, rows, offsets, at, step, counts):
    addresses = np.zeros(rows.size, np.uint64)  # of lives; 0 where a row is passed over
    for u in range(rows.size):
        if rows[u] >= 0:
            addresses[u] = row_address(memory, rows[u]) + np.uint64(4 * at)
    for u in range(rows.size):
        if u + _AHEAD < rows.size:
            cpu.prefetch_far(addresses[u + _AHEAD])
        counts[u] = 0
        if addresses[u]:
            life = vector_at(addresses[u], 2).view(np.int32)
            more, room = offsets[u + 1] - offsets[u], _MOST - np.int64(life[1])
            counts[u] = _MOST if more >= room else life[1] + more
            life[0], life[1] = step, counts[u]


_touch = Kernel(
    "row_life.cu", "touch_rows",
    "const uint64_t* chunks, int k, int stride, const int64_t* rows, const int64_t* offsets,"
    " int at, int step, int* counts, int64_t row_count",
    lambda U: Geometry(blocks(U, 256), 256),
)  # fmt: skip


def touch_rows(memory: RowMemory, rows: Any, offsets: Any, at: int, step: int) -> Any:
    """Note that rows were looked up, by the formula above; their other words stay as they are.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice; negative ones are passed over.
    offsets : (U + 1,) array of int64
        Ascending: row u was looked up offsets[u + 1] - offsets[u] times.
    at : int
        Word of a row where its life lies; at + 2 <= stride.
    step : int
        0 <= step < 2**31.

    Returns
    -------
    (U,) array of int32
        Word at + 1 afterwards; 0 for rows that are passed over.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, numbers out of range. Row numbers and the order
        of offsets are not checked.

    Examples
    --------
    >>> chunk = np.zeros((2, 4), np.int32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> touch_rows(memory, np.array([1, -1]), np.array([0, 3, 5]), at=2, step=7)
    array([3, 0], dtype=int32)
    >>> chunk
    array([[0, 0, 0, 0],
           [0, 0, 7, 3]], dtype=int32)
    """
    errors.dtype("touch_rows", "memory.chunks", memory.chunks, np.uint64)
    errors.dtype("touch_rows", "rows", rows, np.int64)
    errors.dtype("touch_rows", "offsets", offsets, np.int64)
    (count,) = errors.axes("touch_rows", rows=(rows, "U"))
    errors.axes("touch_rows", offsets=(offsets, str(count + 1)))
    at, step = errors.count("touch_rows", "at", at), errors.count("touch_rows", "step", step)
    if at + 2 > memory.stride:  # the loops would write into the next row
        raise ValueError(
            f"touch_rows: rows must have 'at' + 2 = {at + 2} words, "
            f"got a stride of {memory.stride}."
        )
    if step > _MOST:
        raise ValueError(f"touch_rows: 'step' must be less than 2**31, got {step}.")
    xp = arrays.namespace("touch_rows", memory.chunks, rows, offsets)
    counts = xp.empty(count, np.int32)
    if xp is not np:
        rows, offsets = xp.ascontiguousarray(rows), xp.ascontiguousarray(offsets)
        given, macros = (rows, offsets, at, step, counts, count), {"PAIRED": int(at % 2 == 0)}
        _touch(*memory[:3], *given, macros=macros, U=count)
        return counts

    def block(i: int, j: int) -> None:
        _touch_cpu(memory, rows[i:j], offsets[i : j + 1], at, step, counts[i:j])

    cpu.parallel(block, count, _ROWS)
    return counts
