"""Matrix products on the CPU whose sums are short, or whose results are small.

A BLAS is made for sums of thousands of terms: it first packs both matrices and clears the result,
which pays badly for the 32 or 64 terms of an embedding. Here a tile of 4 rows and 16 columns of the
result stays in registers over the terms of its sums, added in order, and reads a and b where they
are: a block of b fits in the L1 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import cpu

__all__ = ["thin_matmul"]

ir = cgutils.ir

_ROWS, _COLUMNS = 4, 16  # of a tile: enough sums to keep two multiply-adds a cycle going
_TERMS = 128  # of sums at a time: so much of b stays in the L1 cache
_TILE_ROW = ir.VectorType(ir.FloatType(), _COLUMNS)  # two registers, with AVX-512 one
_LANES = ir.VectorType(ir.IntType(32), _COLUMNS)


def _tile(rows: int) -> Any:
    """Return what adds a tile of a @ b to `out` if `adds`, else writes it there.

    It takes addresses, and bytes from a row or term to the next.
    """

    @intrinsic
    def tile(_context, a, a_row, a_term, b, b_term, out, out_row, terms, adds):
        def generate(context, builder, _signature, arguments):
            a, a_row, a_term, b, b_term, out, out_row, terms, adds = arguments
            zeros, nothing = ir.Constant(_TILE_ROW, None), ir.Constant(_TILE_ROW, ir.Undefined)
            of_type = ir.FunctionType(_TILE_ROW, [_TILE_ROW] * 3)
            name = f"llvm.fmuladd.v{_COLUMNS}f32"
            multiply_add = cgutils.get_or_insert_function(builder.module, of_type, name)

            def pointer(address, step, times, of=_TILE_ROW):
                address = builder.add(address, builder.mul(step, times))
                return builder.inttoptr(address, of.as_pointer())

            numbers = [ir.Constant(ir.IntType(64), r) for r in range(rows)]
            places = [pointer(out, out_row, r) for r in numbers]
            sums = [cgutils.alloca_once(builder, _TILE_ROW) for _ in places]  # registers, to LLVM
            for place, total in zip(places, sums, strict=True):
                old = builder.load(place, align=4)
                builder.store(builder.select(adds, old, zeros), total)
            with cgutils.for_range(builder, terms) as loop:
                right = builder.load(pointer(b, b_term, loop.index), align=4)
                left = builder.add(a, builder.mul(a_term, loop.index))
                for r, total in zip(numbers, sums, strict=True):
                    x = builder.load(pointer(left, a_row, r, ir.FloatType()))
                    x = builder.insert_element(nothing, x, cgutils.int32_t(0))
                    x = builder.shuffle_vector(x, nothing, ir.Constant(_LANES, None))
                    more = builder.call(multiply_add, [x, right, builder.load(total)])
                    builder.store(more, total)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 7, types.int64, types.boolean), generate

    return tile


_rows_tile, _row_tile = _tile(_ROWS), _tile(1)


@cpu.loop
def _matmul_cpu(a, b, out):
    a_row, a_term = np.uint64(a.strides[0]), np.uint64(a.strides[1])
    b_term, out_row = np.uint64(b.strides[0]), np.uint64(out.strides[0])
    whole = a.shape[0] - a.shape[0] % _ROWS
    for first in range(0, max(a.shape[1], 1), _TERMS):
        terms = min(_TERMS, a.shape[1] - first)
        left = np.uint64(a.ctypes.data) + np.uint64(first) * a_term
        for column in range(0, b.shape[1], _COLUMNS):
            right = np.uint64(b.ctypes.data) + np.uint64(first) * b_term + np.uint64(4 * column)
            to = np.uint64(out.ctypes.data) + np.uint64(4 * column)
            for r in range(0, whole, _ROWS):
                at, place = left + np.uint64(r) * a_row, to + np.uint64(r) * out_row
                _rows_tile(at, a_row, a_term, right, b_term, place, out_row, terms, first > 0)
            for r in range(whole, a.shape[0]):
                at, place = left + np.uint64(r) * a_row, to + np.uint64(r) * out_row
                _row_tile(at, a_row, a_term, right, b_term, place, out_row, terms, first > 0)


def thin_matmul(a: Any, b: Any, out: Any) -> None:
    """Write a @ b to `out`, as ``np.matmul(a, b, out=out)``, on this thread; nothing is checked.

    Parameters
    ----------
    a : (N, K) array of float32
        May be transposed.
    b : (K, M) array of float32
        If M is not a multiple of 16, all is left to NumPy.
    out : (N, M) array of float32
        Its rows are contiguous.

    Examples
    --------
    >>> out = np.empty((2, 16), np.float32)
    >>> thin_matmul(np.array([[2], [3]], np.float32), np.ones((1, 16), np.float32), out)
    >>> out[:, 0]
    array([2., 3.], dtype=float32)
    """
    if b.shape[1] % _COLUMNS:
        np.matmul(a, b, out=out)
    else:
        _matmul_cpu(a, np.ascontiguousarray(b), out)
