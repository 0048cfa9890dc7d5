"""Rows of embedding tables in memory: where they lie, and their gather. U rows, N outputs, D width.

A row is its vector of D float32, then the optimizer's state, padded to `stride` floats. Rows lie in
chunks of 2^k rows that never move: row r is row r % 2^k of chunk r // 2^k. Loops get the chunks'
addresses, k and the stride.

    out[i] = vector of row rows[inverse[i]]; a row of -1 - j is vector j of `unseen`
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = [
    "RowMemory", "check_rows", "gather_rows", "row_at", "row_kernel", "update_rows", "write_rows",
]  # fmt: skip

_ROWS = 512  # rows a block of a CPU loop
_WARPS = 8  # a block of a kernel


class RowMemory(NamedTuple):
    """What a loop or kernel needs to reach rows.

    Attributes
    ----------
    chunks : (number of chunks,) array of uint64
        Addresses of the chunks, on their device; there they are multiples of 16.
    k : int
        A chunk holds 2^k rows.
    stride : int
        Floats a row, state and padding included; a multiple of 4.

    Examples
    --------
    >>> chunk = np.zeros((4, 8), np.float32)
    >>> RowMemory(np.array([chunk.ctypes.data], np.uint64), k=2, stride=8).stride
    8
    """

    chunks: Any
    k: int
    stride: int


@intrinsic
def _pointer(_context, address):
    """An integer address as a pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@cpu.exact_loop
def row_at(memory, row) -> np.ndarray:
    """Row number `row` as an array of `stride` float32."""
    chunk = memory.chunks[row >> memory.k]
    at = (row & ((1 << memory.k) - 1)) * memory.stride * 4
    return carray(_pointer(chunk + np.uint64(at)), (memory.stride,), np.float32)


@cpu.exact_loop
def _gather_cpu(memory, rows, inverse, unseen, out):
    for i in range(inverse.size):
        row = rows[inverse[i]]
        if row >= 0:
            vector = row_at(memory, row)
            for d in range(out.shape[1]):
                out[i, d] = vector[d]
        else:
            for d in range(out.shape[1]):
                out[i, d] = unseen[-1 - row, d]


@cpu.exact_loop
def _write_cpu(memory, first_row, values):
    for i in range(values.shape[0]):
        row = row_at(memory, first_row + i)
        for d in range(values.shape[1]):
            row[d] = values[i, d]
        for d in range(values.shape[1], memory.stride):
            row[d] = np.float32(0)


def _tile(pieces: int) -> int:
    """Vectors of `pieces` loads that a warp gathers: so many that each lane has 16 loads to do."""
    return min(32, max(4, 512 // pieces // 4 * 4))


_gather = Kernel(
    "embedding_rows.cu", "gather_rows",
    "const uint64_t* chunks, int k, int stride, const int64_t* rows, const int64_t* inverse,"
    " const float* unseen, float* out, int64_t n",
    lambda N, tile: Geometry(blocks(N, tile * _WARPS), 32 * _WARPS),
)  # fmt: skip
_write = Kernel(
    "embedding_rows.cu", "write_rows",
    "const uint64_t* chunks, int k, int64_t first_row, const float* values, int64_t n",
    lambda N, stride: Geometry(blocks(N * (stride // 4), 4 * 256), 256),
)  # fmt: skip


def check_rows(where: str, memory: RowMemory, rows: Any, g: Any, parts: int = 1) -> None:
    """Raise TypeError or ValueError unless `rows`, and `g` for each, are as the updates take them.

    Whether the rows are there is not looked at: they come from the store.

    Examples
    --------
    >>> memory = RowMemory(np.empty(0, np.uint64), k=0, stride=4)
    >>> check_rows("f", memory, np.array([0]), np.zeros((1, 3), np.float32), parts=2)
    Traceback (most recent call last):
        ...
    ValueError: f: 'g' must have 2 * D <= 4, the floats of a row, got shape (1, 3).
    """
    errors.dtype(where, "rows", rows, np.int64)
    errors.dtype(where, "g", g, np.float32)
    errors.axes(where, rows=(rows, "U"), g=(g, "U D"))
    _check_width(where, memory, "g", g, parts)


def row_kernel(file: str, name: str, constants: str) -> Kernel:
    """Declare the kernel of an update of rows, which `update_rows` launches.

    Parameters
    ----------
    file, name : str
    constants : str
        Parameters between the gradient and the pointer `scale`.

    Examples
    --------
    >>> kernel = row_kernel("sgd.cu", "sgd_rows", "float rate")
    >>> kernel.geometry(U=100, D=128, vector=4)
    Geometry(grid=13, block=256, shared=0)
    """
    return Kernel(
        file, name,
        "const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,"
        f" {constants}, const float* scale, int64_t row_count",
        lambda U, D, vector: Geometry(blocks(U * D // vector, 256), 256), optional="scale",
    )  # fmt: skip


def update_rows(
    xp: ModuleType, kernel: Kernel, memory: RowMemory, rows: Any, g: Any, *constants: Any
) -> None:
    """Launch a `row_kernel` on what `check_rows` has passed; `scale` is the last constant.

    Examples
    --------
    See `cupyrec.ops.sgd.sgd_rows`.
    """
    rows, g = xp.ascontiguousarray(rows), xp.ascontiguousarray(g)
    (count, width), vector = g.shape, vector_width(g.shape[1], g)
    kernel(
        *memory, rows, g, *constants, count,
        macros={"DIM": width, "VECTOR": vector}, U=count, D=width, vector=vector,
    )  # fmt: skip


def _check_width(where: str, memory: RowMemory, name: str, array: Any, parts: int) -> None:
    errors.dtype(where, "memory.chunks", memory.chunks, np.uint64)
    errors.columns(where, name, array)
    if parts * array.shape[1] > memory.stride:  # the loops would write into the next row
        raise ValueError(
            f"{where}: '{name}' must have {parts} * D <= {memory.stride}, the floats of a row, "
            f"got shape {array.shape}."
        )


def gather_rows(memory: RowMemory, rows: Any, inverse: Any, unseen: Any, out: Any) -> None:
    """Write the vectors of rows to `out`, by the formula above.

    Parameters
    ----------
    memory : RowMemory
        Its chunks lie on the device of the other arrays.
    rows : (U,) array of int64
    inverse : (N,) array of int64
    unseen : (M, D) array of float32
    out : (N, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, D = 0. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> out = np.empty((3, 2), np.float32)
    >>> unseen = np.array([[8, 9]], np.float32)
    >>> gather_rows(memory, np.array([1, -1]), np.array([0, 1, 0]), unseen, out)
    >>> out
    array([[4., 5.],
           [8., 9.],
           [4., 5.]], dtype=float32)
    """
    errors.dtype("gather_rows", "rows", rows, np.int64)
    errors.dtype("gather_rows", "inverse", inverse, np.int64)
    errors.dtype("gather_rows", "unseen", unseen, np.float32)
    errors.dtype("gather_rows", "out", out, np.float32)
    errors.axes(
        "gather_rows", rows=(rows, "U"), inverse=(inverse, "N"), out=(out, "N D"),
        unseen=(unseen, "M D"),
    )  # fmt: skip
    _check_width("gather_rows", memory, "out", out, 1)
    xp = arrays.namespace("gather_rows", memory.chunks, rows, inverse, unseen, out)
    if xp is not np:
        count, width = out.shape
        rows, inverse, unseen = map(xp.ascontiguousarray, (rows, inverse, unseen))
        vector = vector_width(width, unseen, out)
        tile = _tile(width // vector)
        _gather(
            *memory, rows, inverse, unseen, out, count,
            macros={"DIM": width, "VECTOR": vector, "TILE": tile}, N=count, tile=tile,
        )  # fmt: skip
        return

    def block(i: int, j: int) -> None:
        _gather_cpu(memory, rows, inverse[i:j], unseen, out[i:j])

    cpu.parallel(block, len(inverse), _ROWS)


def write_rows(memory: RowMemory, first_row: int, values: Any) -> None:
    """Write `values` to consecutive rows from `first_row` on, and zeros to their padding.

    Parameters
    ----------
    memory : RowMemory
    first_row : int
    values : (N, up to stride) array of float32

    Raises
    ------
    ValueError, TypeError
        Another shape or dtype, D = 0. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.ones((2, 4), np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> write_rows(memory, 1, np.array([[5, 6, 7]], np.float32))
    >>> chunk[1]
    array([5., 6., 7., 0.], dtype=float32)
    """
    errors.dtype("write_rows", "values", values, np.float32)
    errors.axes("write_rows", values=(values, "N D"))
    _check_width("write_rows", memory, "values", values, 1)
    xp = arrays.namespace("write_rows", memory.chunks, values)
    if xp is not np:
        values = xp.ascontiguousarray(values)
        count, width = values.shape
        macros = {"DIM": width, "VECTOR": vector_width(width, values), "STRIDE": memory.stride}
        _write(
            memory.chunks, memory.k, first_row, values, count,
            macros=macros, N=count, stride=memory.stride,
        )  # fmt: skip
        return

    def block(i: int, j: int) -> None:
        _write_cpu(memory, first_row + i, values[i:j])

    cpu.parallel(block, len(values), _ROWS)
