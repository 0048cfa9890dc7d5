"""Text to numbers: the loops that turn the bytes of a delimited file into ids and values.

One pass over the bytes, straight into the arrays of a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import cpu

__all__ = [
    "ENCODINGS", "HEX", "IGNORE", "INTEGER", "LABEL", "MISSING", "NUMERIC", "RULES", "STRING",
    "WEIGHT", "log1p", "parse", "shown",
]  # fmt: skip

#: Id of an empty categorical field: INT64_MIN.
MISSING = np.int64(-(2**63))
#: What a column of the file is read as; those from HEX on become ids.
IGNORE, LABEL, WEIGHT, NUMERIC, HEX, INTEGER, STRING = range(7)
ENCODINGS = {"hex": HEX, "integer": INTEGER, "string": STRING}
#: What values must be, by encoding, else kind.
RULES = {
    "label": "the label must be 0 or 1",
    "weight": "the weight must be a finite number of at least 0",
    "numeric": "must be a finite number",
    "hex": "must be 1 to 16 hex digits",
    "integer": "must be an integer of 64 bits",
}

_NEWLINE, _PLUS, _MINUS, _POINT, _ZERO, _E, _QUOTE = b'\n+-.0e"'
# Fowler, Noll and Vo's hash 1a. Saved models hold such ids: it never changes.
FNV_START, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)

HEX_DIGITS = np.full(256, 255, np.uint8)  # byte -> its value as a hex digit, 255 if it is none
for _digit in range(16):
    HEX_DIGITS[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


_POWERS = 10.0 ** np.arange(23)  # exact
_LOGARITHMS = np.array([math.log1p(k) for k in range(4096)])


def shown(text: bytes | str) -> str:
    """Return a value as sentences show it: not more of it than tells which it is.

    Examples
    --------
    >>> print(shown(b"caf\\xe9"), len(shown("x" * 1000)))
    'caf\\\\xe9' 65
    """
    text = text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")
    return repr(text[:60] + "..." if len(text) > 60 else text)


@intrinsic
def _byte(_context: Any, _at: Any) -> Any:
    """The byte at an address: loops that pass an array on count references, which takes as long as
    reading a field."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], cgutils.voidptr_t))

    return types.uint8(types.intp), generate


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
def _number(at):
    """Read [+-] digits [. digits] [e [+-] digits] as float64; return (end, value or NaN).

    Digits after the 19th significant one count as zeros.
    """
    negative = _byte(at) == _MINUS
    if negative or _byte(at) == _PLUS:
        at += 1
    digits, power, seen, point = np.uint64(0), 0, 0, False
    while True:
        byte = _byte(at)
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
        down = _byte(at) == _MINUS
        if down or _byte(at) == _PLUS:
            at += 1
        exponent, seen = 0, 0
        while _ZERO <= _byte(at) <= _ZERO + 9:
            exponent = min(10 * exponent + (_byte(at) - _ZERO), 1 << 40)
            seen += 1
            at += 1
        power += -exponent if down else exponent
    if not seen:
        return at, np.nan
    value = _scale(digits, power)
    return at, -value if negative else value


@cpu.exact_loop
def _integer(at):
    """Read [+-] digits within int64; return (end, value, whether it is that)."""
    negative = _byte(at) == _MINUS
    signed = negative or _byte(at) == _PLUS
    at += signed
    start, value, good = at, np.uint64(0), True
    limit = np.uint64(2**63 - 1) + np.uint64(negative)
    while _ZERO <= _byte(at) <= _ZERO + 9:
        digit = np.uint64(_byte(at) - _ZERO)
        good &= value <= (limit - digit) // np.uint64(10)
        value = value * np.uint64(10) + digit
        at += 1
    if negative:
        value = np.uint64(0) - value
    return at, value, good and at > start


@cpu.exact_inline
def log1p(size):
    """Return ln(1 + size) of a number of at least 0 or NaN; most are small and whole."""
    if size < len(_LOGARITHMS):
        whole = np.uint64(size)
        if whole == size:
            return _LOGARITHMS[whole]
    return math.log1p(size)


@cpu.exact_inline
def _id(kind, at, stop, separator):
    """Read what stands before `stop`, a separator or the line's end as an id, MISSING if nothing
    does; return (end, id, whether it is one)."""
    start, code, good = at, np.uint64(0), True
    if kind == HEX:
        digit = HEX_DIGITS[_byte(at)]
        while digit < 16:
            code = (code << np.uint64(4)) | np.uint64(digit)
            at += 1
            digit = HEX_DIGITS[_byte(at)]
        good = at - start <= 16
    elif kind == INTEGER:
        if _byte(at) != stop and _byte(at) != separator and _byte(at) != _NEWLINE:
            at, code, good = _integer(at)
    else:  # STRING, IGNORE
        code = FNV_START
        while _byte(at) != separator and _byte(at) != _NEWLINE:
            if _byte(at) == stop:
                if stop != _QUOTE or _byte(at + 1) != _QUOTE:
                    break
                at += 1  # a doubled quote is one
            code = (code ^ np.uint64(_byte(at))) * FNV_PRIME
            at += 1
    return at, np.int64(code) if at > start else MISSING, good


@cpu.exact_loop
def parse(
    data, delimiter, quotes, columns, row, used, dense, ids, labels, weights, lengths, bagged
):  # fmt: skip
    """Read lines into rows from `row` on, until the bytes or the rows run out.

    Parameters
    ----------
    data : (n,) uint8
        Whole lines: the last byte is a newline, so no field needs a bound of its own.
    quotes : bool
        Whether a field may stand in quotes.
    columns : (C, 5) int64
        For each column: what it is read as, its place in the row, whether its logarithm is taken,
        the place of its bucket in `ids` or -1, and what stands between the ids of a bag or -1.
    dense, ids, labels, weights : (B, num_dense) float32, (B, num_tables) int64, (B, T) float32
        Written. An empty field is 0.0 in `dense` and `MISSING` in `ids`.
    lengths, bagged : (B, num_tables) int64, (N,) int64
        Of bags `ids` tells where in `bagged`, from `used` on, they begin, and `lengths` how many
        ids they have.

    Returns
    -------
    row, used, column : int
        Where to go on. After a malformed line they are those of its beginning, and `column` is
        where reading it failed; else `column` is -1.
    """
    rows, last, at = len(dense), len(columns) - 1, np.intp(data.ctypes.data)
    end = at + len(data)
    while at < end and row < rows:
        begin = used
        for column in range(last + 1):
            kind, place, separator = columns[column, 0], columns[column, 1], columns[column, 4]
            quoted = quotes and _byte(at) == _QUOTE
            at += quoted
            stop, good = _QUOTE if quoted else delimiter, True
            if separator >= 0:
                first, more = used, _byte(at) != stop and _byte(at) != _NEWLINE
                if quoted and _byte(at) == stop:  # which may begin a doubled one
                    more = _byte(at + 1) == _QUOTE
                while more:
                    at, bagged[used], good = _id(kind, at, stop, separator)
                    used += 1
                    more = good and _byte(at) == separator
                    at += more
                ids[row, place], lengths[row, place] = first, used - first
            elif kind == NUMERIC:
                value, bucket = 0.0, 0
                if _byte(at) != stop and _byte(at) != _NEWLINE:
                    at, value = _number(at)
                    if columns[column, 2] or columns[column, 3] >= 0:
                        logarithm = log1p(abs(value))
                        bucket = 1 if value < 0 else 2 + int(2 * logarithm)
                        if columns[column, 2]:
                            value = math.copysign(logarithm, value)
                    good = np.isfinite(np.float32(value))
                dense[row, place] = value
                if columns[column, 3] >= 0:
                    ids[row, columns[column, 3]] = bucket
            elif kind == LABEL:
                at, value = _number(at)
                labels[row, place] = value
                good = value == 0 or value == 1
            elif kind == WEIGHT:
                at, value = _number(at)
                weights[row] = value
                good = value >= 0 and np.isfinite(np.float32(value))
            else:
                at, code, good = _id(kind, at, stop, separator)
                if kind != IGNORE:
                    ids[row, place] = code
            if quoted:
                good = good and _byte(at) == _QUOTE
                at += good
            if not good or _byte(at) != (delimiter if column < last else _NEWLINE):
                return row, begin, column
            at += 1
        row += 1
    return row, used, -1
