"""Move rows of embedding tables, vector and state together: row to[i] = row from[i]."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.row_memory import RowMemory, row_at

__all__ = ["move_rows"]

_ROWS = 512  # a block


@cpu.exact_loop
def _move_cpu(memory, source, target):
    for i in range(source.size):
        row_at(memory, target[i])[:] = row_at(memory, source[i])


_move = Kernel(
    "move_rows.cu", "move_rows",
    "const uint64_t* chunks, int k, const int64_t* from, const int64_t* to, int64_t n",
    lambda N, stride: Geometry(blocks(N * (stride // 4), 4 * 256), 256),
)  # fmt: skip


def move_rows(memory: RowMemory, source: Any, target: Any) -> None:
    """Copy rows over others.

    Parameters
    ----------
    memory : RowMemory
    source, target : (N,) arrays of int64
        No target twice, and none that is a source.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.arange(12, dtype=np.float32).reshape(3, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=2, stride=4)
    >>> move_rows(memory, np.array([2]), np.array([0]))
    >>> chunk[0]
    array([ 8.,  9., 10., 11.], dtype=float32)
    """
    errors.dtype("move_rows", "memory.chunks", memory.chunks, np.uint64)
    for name, rows in [("source", source), ("target", target)]:
        errors.dtype("move_rows", name, rows, np.int64)
    errors.axes("move_rows", source=(source, "N"), target=(target, "N"))
    xp = arrays.namespace("move_rows", memory.chunks, source, target)
    if xp is not np:
        count, macros = len(source), {"STRIDE": memory.stride}
        source, target = xp.ascontiguousarray(source), xp.ascontiguousarray(target)
        _move(*memory[:2], source, target, count, macros=macros, N=count, stride=memory.stride)
        return
    cpu.parallel(lambda i, j: _move_cpu(memory, source[i:j], target[i:j]), len(source), _ROWS)
