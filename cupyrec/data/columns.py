"""Columns to rows: the loops that write Arrow's columns into the arrays of a batch.

They read its buffers, validity bits included, where they lie.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import cpu
from cupyrec.data import fields

__all__ = [
    "FLOAT32", "FLOAT64", "ID", "INT32", "INT64", "LABEL", "LIST", "NUMBER", "PLACE", "TYPE",
    "WEIGHT", "WHAT", "fill", "write",
]  # fmt: skip

#: What a column is.
ID, NUMBER, LABEL, WEIGHT, LIST = range(5)
#: The type of its values.
INT32, INT64, FLOAT32, FLOAT64 = range(4)
#: Places in the row of a table that tells of a column.
WHAT, PLACE, LOG, BUCKET, TYPE, VALUES, BITS, FIRST, AMONG = range(9)
_TILE = 64  # rows that are written column after column: they stay in L1, their bits are one word


@intrinsic
def _lowest(_context: Any, _word: Any) -> Any:
    """The number of the lowest bit of a word that is 1."""

    def generate(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


@cpu.exact_loop
def write(table, start, dense, ids, labels, weights):
    """Write rows of columns, from row `start` on, into arrays.

    Parameters
    ----------
    table : (C, 9) int64
        For each column: what it is, its place in the row, whether its logarithm is taken, and the
        place of its bucket in `ids` or -1; then its type, the address of its values, that of its
        validity bits or 0, the first of these bits, and the address of the ids among which its
        values are places or 0, of which there is one at least.
    start : int
    dense, ids, labels, weights : (B, num_dense) float32, (B, num_tables) int64, (B, T) float32
        Written. A missing value is 0.0 in `dense` and `fields.MISSING` in `ids`.

    Returns
    -------
    row, column : int
        Where a value is that may not be there; else -1.
    """
    for at in range(0, len(dense), _TILE):
        rows, low = min(_TILE, len(dense) - at), start + at
        tile = (_tile(dense, at, rows), _tile(ids, at, rows),
                _tile(labels, at, rows), _tile(weights, at, rows))  # fmt: skip
        for column in range(len(table)):
            what, kind = table[column, WHAT], table[column, TYPE]
            if what == LIST:  # `fill` writes them
                continue
            holes, among = np.uint64(0), table[column, AMONG]
            if table[column, BITS]:
                holes = _holes(table[column, BITS], table[column, FIRST] + low, rows)
            place, bucket = table[column, PLACE], table[column, BUCKET]
            how = kind, what, place, table[column, LOG], bucket, holes, among
            width = 4 if kind == INT32 or kind == FLOAT32 else 8
            address = table[column, VALUES] + low * width
            for line in range(2 * width, 3 * width):  # of the tile after the next
                cpu.prefetch_far(np.uint64(address + _TILE * line))
            values = _at(address)
            if kind == INT32:
                bad = _write_column(carray(values, (rows,), np.int32), how, tile)
            elif kind == INT64:
                bad = _write_column(carray(values, (rows,), np.int64), how, tile)
            elif kind == FLOAT32:
                bad = _write_column(carray(values, (rows,), np.float32), how, tile)
            else:
                bad = _write_column(carray(values, (rows,), np.float64), how, tile)
            if bad >= 0:
                return low + bad, column
    return -1, -1


@cpu.exact_inline
def _at(address):
    return cpu.pointer(np.uint64(address))


@cpu.exact_inline
def _tile(array, first, rows):
    """Rows of an array, which unlike a slice have no references to count."""
    width = array.shape[1]
    address = array.ctypes.data + first * width * array.itemsize
    return carray(_at(address), (rows, width), array.dtype)


@cpu.exact_inline
def _holes(address, first, rows):
    """Validity bits of some rows, at most 64, as a word that has 1 where a value is missing."""
    address, skip = address + (first >> 3), first & 7
    size = (skip + rows + 7) >> 3  # no other bytes may be read
    near, there = carray(_at(address), (size,), np.uint8), np.uint64(0)
    if size >= 8:
        there = carray(_at(address), (1,), np.uint64)[0] >> np.uint64(skip)
    else:
        for i in range(size):
            there |= np.uint64(near[i]) << np.uint64(8 * i)
        there >>= np.uint64(skip)
    if size == 9:
        there |= np.uint64(near[8]) << np.uint64(64 - skip)
    return ~there & (~np.uint64(0) >> np.uint64(64 - rows))


@cpu.exact_inline
def _write_column(values, how, tile):
    """Write a column's values; return the number of the first that may not be so, else -1."""
    (kind, what, place, logarithmic, bucket, holes, among), (dense, ids, labels, weights) = (
        how,
        tile,
    )
    if what == ID:
        if among:
            known = carray(_at(among), (1,), np.int64)
            for i in range(len(values)):
                there = ~holes >> np.uint64(i) & np.uint64(1)  # else the place may be any
                ids[i, place] = known[np.uint64(values[i]) * there]
        else:
            for i in range(len(values)):
                ids[i, place] = np.int64(values[i])
        while holes:
            ids[_lowest(holes), place] = fields.MISSING
            holes &= holes - np.uint64(1)
    elif what == NUMBER:
        if not logarithmic and bucket < 0:
            for i in range(len(values)):
                dense[i, place] = float(values[i])  # rounded twice, as `fields.parse` does
        else:
            for i in range(len(values)):
                value, number = _number(float(values[i]), logarithmic)
                dense[i, place] = value
                if bucket >= 0:
                    ids[i, bucket] = number
        while holes:
            i = _lowest(holes)
            dense[i, place] = 0
            if bucket >= 0:
                ids[i, bucket] = 0
            holes &= holes - np.uint64(1)
        if kind == FLOAT32 or kind == FLOAT64:
            for i in range(len(values)):
                if not np.isfinite(dense[i, place]):
                    return i
    else:
        for i in range(len(values)):
            value = float(values[i])
            if what == LABEL:
                good = value == 0 or value == 1
            else:
                good = value >= 0 and np.isfinite(np.float32(value))
            if not good or holes >> np.uint64(i) & np.uint64(1):
                return i
            if what == LABEL:
                labels[i, place] = value
            else:
                weights[i] = value
    return -1


@cpu.exact_inline
def _number(value, logarithmic):
    """Return a number as `dense` has it, and its bucket, as `fields.parse` does."""
    if not abs(value) < np.inf:
        return value, 0
    logarithm = fields.log1p(abs(value))
    bucket = 1 if value < 0 else 2 + int(2 * logarithm)
    return math.copysign(logarithm, value) if logarithmic else value, bucket


@cpu.exact_loop
def fill(ids, lists, flat):
    """Write the bags of rows side by side: lists of ids, elsewhere the one of `ids`."""
    at = 0
    for row in range(len(ids)):
        for table in range(ids.shape[1]):
            if lists[table, 2] == 0:
                flat[at] = ids[row, table]
                at += 1
            else:
                starts = carray(cpu.pointer(np.uint64(lists[table, 1])), (row + 1,), np.int64)
                lengths = carray(cpu.pointer(np.uint64(lists[table, 2])), (row + 1,), np.int64)
                end = starts[row] + lengths[row]
                values = carray(cpu.pointer(np.uint64(lists[table, 0])), (end,), np.int64)
                for i in range(starts[row], end):
                    flat[at] = values[i]
                    at += 1
