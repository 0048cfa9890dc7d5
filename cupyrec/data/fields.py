"""Text to numbers: the loops that turn the bytes of a delimited file into ids and values.

One pass over the bytes, straight into the arrays of a batch.
"""

from __future__ import annotations

import math

import numpy as np

from cupyrec import cpu

__all__ = ["HEX", "IGNORE", "INTEGER", "LABEL", "MISSING", "NUMERIC", "STRING", "parse"]

#: Id of an empty categorical field: INT64_MIN.
MISSING = np.int64(-(2**63))
#: What a column of the file is read as; those from HEX on become ids.
IGNORE, LABEL, NUMERIC, HEX, INTEGER, STRING = range(6)

_NEWLINE, _PLUS, _MINUS, _POINT, _ZERO, _E = b"\n+-.0e"
# Fowler, Noll and Vo's hash 1a. Saved models hold such ids: it never changes.
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)

_HEX_DIGITS = np.full(256, 255, np.uint8)  # byte -> its value as a hex digit, 255 if it is none
for _digit in range(16):
    _HEX_DIGITS[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


_POWERS = 10.0 ** np.arange(23)  # exact


@cpu.exact_loop
def _scale(digits, power):
    """Return digits * 10^power as float64.

    Rounded once for digits < 2^53 and |power| <= 22 (Clinger 1990); elsewhere within a few units of
    the last place, far below what the rounding to float32 leaves.
    """
    value = float(digits)
    if digits == 0:
        return value
    if abs(power) > 22:
        return value * 10.0 ** float(power)
    return value * _POWERS[power] if power >= 0 else value / _POWERS[-power]


@cpu.exact_loop
def _number(data, at):
    """Read [+-] digits [. digits] [e [+-] digits] as float64; return (end, value or NaN).

    Digits after the 19th significant one count as zeros.
    """
    negative = data[at] == _MINUS
    if negative or data[at] == _PLUS:
        at += 1
    digits, power, seen, point = np.uint64(0), 0, 0, False
    while True:
        byte = data[at]
        if _ZERO <= byte <= _ZERO + 9:
            seen += 1
            if digits < np.uint64(10**18):
                digits = digits * np.uint64(10) + np.uint64(byte - _ZERO)
                power -= point
            else:
                power += not point
        elif byte == _POINT and not point:
            point = True
        else:
            break
        at += 1
    if seen and byte | 32 == _E:
        at += 1
        down = data[at] == _MINUS
        if down or data[at] == _PLUS:
            at += 1
        exponent, seen = 0, 0
        while _ZERO <= data[at] <= _ZERO + 9:
            exponent = min(10 * exponent + (data[at] - _ZERO), 1 << 40)
            seen += 1
            at += 1
        power += -exponent if down else exponent
    if not seen:
        return at, np.nan
    value = _scale(digits, power)
    return at, -value if negative else value


@cpu.exact_loop
def _integer(data, at):
    """Read [+-] digits within int64; return (end, value, whether it is that)."""
    negative = data[at] == _MINUS
    signed = negative or data[at] == _PLUS
    at += signed
    start, value, good = at, np.uint64(0), True
    limit = np.uint64(2**63 - 1) + np.uint64(negative)
    while _ZERO <= data[at] <= _ZERO + 9:
        digit = np.uint64(data[at] - _ZERO)
        good &= value <= (limit - digit) // np.uint64(10)
        value = value * np.uint64(10) + digit
        at += 1
    if negative:
        value = np.uint64(0) - value
    return at, value, good and at > start


@cpu.exact_loop
def parse(data, at, delimiter, columns, row, dense, ids, labels):
    """Read lines from byte `at` into rows from `row` on, until the bytes or the rows run out.

    Parameters
    ----------
    data : (n,) uint8
        Whole lines: the last byte is a newline, so no field needs a bound of its own.
    columns : (C, 4) int64
        For each column: what it is read as, its place in the row, whether its logarithm is taken,
        and the place of its bucket in `ids` or -1.
    dense, ids, labels : (B, num_dense) float32, (B, num_tables) int64, (B, 1) float32
        Written. An empty field is 0.0 in `dense` and `MISSING` in `ids`.

    Returns
    -------
    at, row, column : int
        Where to go on. After a malformed line `at` is that line's start, and `column` is where
        reading it failed; else `column` is -1.
    """
    size, rows, last = len(data), len(dense), len(columns) - 1
    while at < size and row < rows:
        line = at
        for column in range(last + 1):
            kind, place = columns[column, 0], columns[column, 1]
            start, code, good = at, np.uint64(0), True
            if kind == HEX:
                digit = _HEX_DIGITS[data[at]]
                while digit < 16:
                    code = (code << np.uint64(4)) | np.uint64(digit)
                    at += 1
                    digit = _HEX_DIGITS[data[at]]
                good = at - start <= 16
            elif kind == INTEGER:
                if data[at] != delimiter and data[at] != _NEWLINE:
                    at, code, good = _integer(data, at)
            elif kind == NUMERIC:
                value, bucket = 0.0, 0
                if data[at] != delimiter and data[at] != _NEWLINE:
                    at, value = _number(data, at)
                    logarithm = math.log1p(abs(value))
                    bucket = 1 if value < 0 else 2 + int(2 * logarithm)
                    if columns[column, 2]:
                        value = math.copysign(logarithm, value)
                    good = np.isfinite(np.float32(value))
                dense[row, place] = value
                if columns[column, 3] >= 0:
                    ids[row, columns[column, 3]] = bucket
            elif kind == LABEL:
                at, value = _number(data, at)
                labels[row, 0] = value
                good = value == 0 or value == 1
            else:  # STRING, IGNORE
                code = _FNV_START
                while data[at] != delimiter and data[at] != _NEWLINE:
                    code = (code ^ np.uint64(data[at])) * _FNV_PRIME
                    at += 1
            if kind >= HEX:
                ids[row, place] = np.int64(code) if at > start else MISSING
            if not good or data[at] != (delimiter if column < last else _NEWLINE):
                return line, row, column
            at += 1
        row += 1
    return at, row, -1
