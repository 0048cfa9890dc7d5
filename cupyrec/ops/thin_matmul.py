"""Matrix products on the CPU whose sums are short, or whose results are small.

A BLAS is made for sums of thousands of terms: it first packs both matrices and clears the result,
which pays badly for the 32 or 64 terms of an embedding. Here a tile of the result, 4 rows and 16
columns or with AVX-512 8 and 32, stays in registers over the terms of its sums, added in order, and
reads a and b where they are: a block of b fits in the L1 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import cpu

__all__ = ["FEW_ROWS", "THIN_COLUMNS", "THIN_ROWS", "thin_matmul", "thin_matmul_cpu"]

ir = cgutils.ir

#: Columns of a vector, of which there must be a whole number: two registers, with AVX-512 one.
THIN_COLUMNS = 16
#: Rows of a tile; those beyond the last whole one are slower, one by one.
THIN_ROWS = 8 if cpu.has("avx512f") else 4
#: Rows, of a forward pass of predictions, up to which no product is left to a BLAS, so that a row's
#: bits don't hang on its place: OpenBLAS's kernels for processors without AVX-512 add up otherwise
#: in some rows of their tiles.
FEW_ROWS = 0 if cpu.has("avx512f") else 512
# A tile has enough sums to keep two multiply-adds a cycle going, and loads fewer numbers than it
# has vectors, as far as the registers there are go: 16, with AVX-512 32.
_VECTORS = 2 if cpu.has("avx512f") else 1
_COLUMNS = _VECTORS * THIN_COLUMNS
_TERMS = 128  # of sums at a time: so much of b stays in the L1 cache
_FLOATS = ir.VectorType(ir.FloatType(), THIN_COLUMNS)
_LANES = ir.VectorType(ir.IntType(32), THIN_COLUMNS)


def _tile(rows: int, vectors: int) -> Any:
    """Return what adds a tile of a @ b to `out` if `adds`, else writes it there.

    It takes addresses, and bytes from a row or term to the next.
    """

    @intrinsic
    def tile(_context, a, a_row, a_term, b, b_term, out, out_row, terms, adds):
        def generate(context, builder, _signature, arguments):
            a, a_row, a_term, b, b_term, out, out_row, terms, adds = arguments
            zeros, nothing = ir.Constant(_FLOATS, None), ir.Constant(_FLOATS, ir.Undefined)
            of_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
            name = f"llvm.fmuladd.v{THIN_COLUMNS}f32"
            multiply_add = cgutils.get_or_insert_function(builder.module, of_type, name)

            numbers = [ir.Constant(ir.IntType(64), n) for n in range(max(rows, vectors))]
            apart = ir.Constant(ir.IntType(64), 4 * THIN_COLUMNS)

            def pointer(address, step, times, of=_FLOATS):
                address = builder.add(address, builder.mul(step, times))
                return builder.inttoptr(address, of.as_pointer())

            def pointers(address, step, times):
                address = builder.add(address, builder.mul(step, times))
                return [pointer(address, apart, v) for v in numbers[:vectors]]

            places = [p for r in numbers[:rows] for p in pointers(out, out_row, r)]
            sums = [cgutils.alloca_once(builder, _FLOATS) for _ in places]  # registers, to LLVM
            for place, total in zip(places, sums, strict=True):
                old = builder.load(place, align=4)
                builder.store(builder.select(adds, old, zeros), total)
            with cgutils.for_range(builder, terms) as loop:
                right = [builder.load(p, align=4) for p in pointers(b, b_term, loop.index)]
                left = builder.add(a, builder.mul(a_term, loop.index))
                for r in range(rows):
                    x = builder.load(pointer(left, a_row, numbers[r], ir.FloatType()))
                    x = builder.insert_element(nothing, x, cgutils.int32_t(0))
                    x = builder.shuffle_vector(x, nothing, ir.Constant(_LANES, None))
                    for y, total in zip(right, sums[r * vectors :][:vectors], strict=True):
                        more = builder.call(multiply_add, [x, y, builder.load(total)])
                        builder.store(more, total)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 7, types.int64, types.boolean), generate

    return tile


_rows_tile, _row_tile = _tile(THIN_ROWS, _VECTORS), _tile(1, _VECTORS)
_narrow_rows_tile, _narrow_row_tile = _tile(THIN_ROWS, 1), _tile(1, 1)


@cpu.loop
def thin_matmul_cpu(a, b, out, adds):
    """Write a @ b to `out`, or add it if `adds`; b has a multiple of 16 columns, side by side."""
    a_row, a_term = np.uint64(a.strides[0]), np.uint64(a.strides[1])
    b_term, out_row = np.uint64(b.strides[0]), np.uint64(out.strides[0])
    whole = a.shape[0] - a.shape[0] % THIN_ROWS
    for first in range(0, max(a.shape[1], 1), _TERMS):
        terms, more = min(_TERMS, a.shape[1] - first), adds or first > 0
        left = np.uint64(a.ctypes.data) + np.uint64(first) * a_term
        for column in range(0, b.shape[1], _COLUMNS):
            right = np.uint64(b.ctypes.data) + np.uint64(first) * b_term + np.uint64(4 * column)
            to = np.uint64(out.ctypes.data) + np.uint64(4 * column)
            narrow = b.shape[1] - column < _COLUMNS
            for r in range(0, whole, THIN_ROWS):
                at, place = left + np.uint64(r) * a_row, to + np.uint64(r) * out_row
                if narrow:
                    _narrow_rows_tile(at, a_row, a_term, right, b_term, place, out_row, terms, more)
                else:
                    _rows_tile(at, a_row, a_term, right, b_term, place, out_row, terms, more)
            for r in range(whole, a.shape[0]):
                at, place = left + np.uint64(r) * a_row, to + np.uint64(r) * out_row
                if narrow:
                    _narrow_row_tile(at, a_row, a_term, right, b_term, place, out_row, terms, more)
                else:
                    _row_tile(at, a_row, a_term, right, b_term, place, out_row, terms, more)


def thin_matmul(a: Any, b: Any, out: Any) -> None:
    """Write a @ b to `out`, as ``np.matmul(a, b, out=out)``, on this thread; nothing is checked.

    Parameters
    ----------
    a : (N, K) array of float32
        May be transposed.
    b : (K, M) array of float32
        If M is not a multiple of 16, all is left to NumPy, unless rows are few.
    out : (N, M) array of float32
        Its rows are contiguous.

    Examples
    --------
    >>> out = np.empty((2, 16), np.float32)
    >>> thin_matmul(np.array([[2], [3]], np.float32), np.ones((1, 16), np.float32), out)
    >>> out[:, 0]
    array([2., 3.], dtype=float32)
    """
    terms, columns = b.shape
    if columns % THIN_COLUMNS == 0:
        thin_matmul_cpu(a, np.ascontiguousarray(b), out, False)
    elif len(a) <= FEW_ROWS:
        whole = -(-columns // THIN_COLUMNS) * THIN_COLUMNS
        padded, room = np.zeros((terms, whole), b.dtype), np.empty((len(a), whole), out.dtype)
        padded[:, :columns] = b
        thin_matmul_cpu(a, padded, room, False)
        out[...] = room[:, :columns]
    else:
        np.matmul(a, b, out=out)
