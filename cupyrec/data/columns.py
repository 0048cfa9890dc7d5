"""Columns to rows: the loops that write Arrow's columns into the arrays of a batch.

They read its buffers, validity bits included, where they lie.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from cupyrec import cpu
from cupyrec.data import fields

__all__ = [
    "FLOAT32", "FLOAT64", "ID", "INT32", "INT64", "LABEL", "LIST", "NUMBER", "PLACE", "TYPE",
    "WEIGHT", "WHAT", "fill", "pick", "write",
]  # fmt: skip

#: What a column is.
ID, NUMBER, LABEL, WEIGHT, LIST = range(5)
#: The type of its values.
INT32, INT64, FLOAT32, FLOAT64 = range(4)
#: Places in the row of a table that tells of a column.
WHAT, PLACE, LOG, BUCKET, TYPE, VALUES, BITS, FIRST = range(8)
_TILE = 2048  # rows that are written column after column while they stay in the cache

_LOGARITHMS = np.array([math.log1p(k) for k in range(4096)])  # most numbers are small and whole


@cpu.exact_loop
def write(table, rows, dense, ids, labels, weights):
    """Write columns into rows of arrays.

    Parameters
    ----------
    table : (C, 8) int64
        For each column: what it is, its place in the row, whether its logarithm is taken, and the
        place of its bucket in `ids` or -1; then its type, the address of its values, that of its
        validity bits or 0, and the first of these bits.
    rows : int
    dense, ids, labels, weights : (B, num_dense) float32, (B, num_tables) int64, (B, T) float32
        Written. A missing value is 0.0 in `dense` and `fields.MISSING` in `ids`.

    Returns
    -------
    row, column : int
        Where a value is that may not be there; else -1.
    """
    for low in range(0, rows, _TILE):
        high = min(low + _TILE, rows)
        for column in range(len(table)):
            told, kind = table[column], table[column, TYPE]
            if told[WHAT] == LIST:  # `fill` writes them
                continue
            address = cpu.pointer(np.uint64(told[VALUES]))
            arrays = told, low, high, dense, ids, labels, weights
            if kind == INT32:
                bad = _write_column(carray(address, (high,), np.int32), *arrays)
            elif kind == INT64:
                bad = _write_column(carray(address, (high,), np.int64), *arrays)
            elif kind == FLOAT32:
                bad = _write_column(carray(address, (high,), np.float32), *arrays)
            else:
                bad = _write_column(carray(address, (high,), np.float64), *arrays)
            if bad >= 0:
                return bad, column
    return -1, -1


@cpu.exact_inline
def _write_column(values, told, low, high, dense, ids, labels, weights):
    """Write a column's rows from `low` on; return the first that may not be so, else -1."""
    what, place, bucket, first = told[WHAT], told[PLACE], told[BUCKET], told[FIRST]
    holes = told[BITS] != 0
    bits = carray(cpu.pointer(np.uint64(told[BITS])), ((first + high + 7) // 8,), np.uint8)
    if what == ID and not holes:
        for i in range(low, high):
            ids[i, place] = np.int64(values[i])
    elif what == ID:
        for i in range(low, high):  # a branch would often be mispredicted
            there = np.int64(_is_there(bits, first + i))
            ids[i, place] = (np.int64(values[i]) & -there) | (fields.MISSING & (there - 1))
    elif what == NUMBER and not told[LOG] and bucket < 0:
        finite = True
        if holes:
            for i in range(low, high):
                value = np.float32(float(values[i]))  # as `fields.parse`
                there = _is_there(bits, first + i) != 0
                value = value if there else np.float32(0)
                finite &= np.isfinite(value)
                dense[i, place] = value
        else:
            for i in range(low, high):
                value = np.float32(float(values[i]))
                finite &= np.isfinite(value)
                dense[i, place] = value
        if not finite:
            return low + np.argmin(np.isfinite(dense[low:high, place]))
    elif what == NUMBER:
        for i in range(low, high):
            there = not holes or _is_there(bits, first + i)
            value, number = _number(float(values[i]), told[LOG]) if there else (0.0, 0)
            if not np.isfinite(np.float32(value)):
                return i
            dense[i, place] = value
            if bucket >= 0:
                ids[i, bucket] = number
    else:
        for i in range(low, high):
            value = float(values[i])
            if what == LABEL:
                good = value == 0 or value == 1
            else:
                good = value >= 0 and np.isfinite(np.float32(value))
            if not good or (holes and not _is_there(bits, first + i)):
                return i
            if what == LABEL:
                labels[i, place] = value
            else:
                weights[i] = value
    return -1


@cpu.exact_inline
def _is_there(bits, number):
    return bits[number >> 3] >> (number & 7) & 1


@cpu.exact_inline
def _number(value, logarithmic):
    """Return a number as `dense` has it, and its bucket, as `fields.parse` does."""
    size = abs(value)
    if not size < np.inf:
        return value, 0
    small = size < len(_LOGARITHMS) and size == int(size)
    logarithm = _LOGARITHMS[int(size)] if small else math.log1p(size)
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


@cpu.exact_loop
def pick(places, bits, first, codes, ids):
    """Write codes[places[i]] into each `ids[i]` but those whose validity bit first + i is 0."""
    for i in range(len(places)):
        if len(bits) == 0 or _is_there(bits, first + i):
            ids[i] = codes[places[i]]
