"""Strings to ids: what `fields` does to the fields of a text file, done to columns of strings."""

from __future__ import annotations

import numpy as np

from cupyrec import cpu
from cupyrec.data import fields

__all__ = ["text_ids"]


@cpu.exact_inline
def _hex(data, at, stop):
    """Return the id that hex digits stand for, and whether they are 1 to 16 of them."""
    code, wrong = np.uint64(0), np.uint8(0)
    for i in range(at, stop):
        digit = fields.HEX_DIGITS[data[i]]
        code = (code << np.uint64(4)) | np.uint64(digit)
        wrong |= digit
    return code, wrong < 16 and stop - at <= 16


@cpu.exact_loop
def _integer(data, at, stop):
    """Return the id that [+-] digits stand for, and whether they are that, within int64."""
    negative = data[at] == ord("-")
    at += negative or data[at] == ord("+")
    code, good = np.uint64(0), at < stop
    limit = np.uint64(2**63 - 1) + np.uint64(negative)
    for i in range(at, stop):
        digit = np.uint64(data[i] - np.uint8(ord("0")))
        good &= digit < 10 and code <= (limit - digit) // np.uint64(10)
        code = code * np.uint64(10) + digit
    return (np.uint64(0) - code if negative else code), good


@cpu.exact_inline
def _hash(data, at, stop):
    code = fields.FNV_START
    for i in range(at, stop):
        code = (code ^ np.uint64(data[i])) * fields.FNV_PRIME
    return code


@cpu.exact_loop
def text_ids(data, offsets, bits, first, encoding, ids):
    """Write an id for each string: that of a text file's field with the same bytes.

    Parameters
    ----------
    data : (n,) uint8
        Their bytes, side by side.
    offsets : (N + 1,) int32 or int64
        Where in `data` each string begins, and where the last one ends.
    bits : (m,) uint8
        Bit first + i, the lowest of a byte first, is 0 where string i is missing; empty: none is.
    first : int
    encoding : int
        `fields.HEX`, `INTEGER` or `STRING`.
    ids : (N,) int64
        Written; `fields.MISSING` for strings that are missing or empty.

    Returns
    -------
    int
        Number of the first string that its encoding does not allow, else -1.
    """
    for i in range(len(ids)):
        start, stop, bit = offsets[i], offsets[i + 1], first + i
        if start == stop or (len(bits) and not bits[bit >> 3] >> (bit & 7) & 1):
            ids[i] = fields.MISSING
            continue
        code, good = np.uint64(0), True
        if encoding == fields.HEX:
            code, good = _hex(data, start, stop)
        elif encoding == fields.INTEGER:
            code, good = _integer(data, start, stop)
        else:
            code = _hash(data, start, stop)
        if not good:
            return i
        ids[i] = np.int64(code)
    return -1
