"""Rows as int8 codes with a scale each: what travels between ranks. N rows, D columns.

    s = max |x| over the row, NaN unless all x are finite
    q = round((x / s) * 127), halves away from zero          0 where s is 0 or NaN
    x' = q * (s / 127)

or, rounded at random by the 16 bits r of `cupyrec.ops.stochastic_rounding`, so that the mean of q
is (x / s) * 127 up to 2^-16,

    q = floor((x / s) * 127 + (r + 1/2) / 2^16)

Each operation is rounded once, so that codes are the same on every device. A magnitude below 2^-126
counts as 0, of x and of x'; s / 127 may lie below, so that x' is right for the smallest s too.
Encoded to the nearest, x' up to 2^127 comes out as itself again; beyond, it may be infinite.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.stochastic_rounding import draw_chances
from cupyrec.ops.vector_sums import ask_ahead

__all__ = [
    "decode_rows", "decoded", "encode_rows", "int8_decode", "int8_encode", "rows_of_block",
    "step_of",
]  # fmt: skip

_NUMBERS = 1 << 16  # a block of the CPU loops
_INFINITE, _SMALLEST, _SIGN = map(np.uint32, (0x7F800000, 0x00800000, 0x80000000))  # bits
_BELOW_HALF = np.uint32(0x3EFFFFFF)  # of the largest number below 1/2
_127, _0, _NAN = np.float32(127), np.float32(0), np.float32(np.nan)
_TINY, _FRACTION = np.float32(2.0**-126), np.float32(2.0**-17)


@cpu.exact_loop
def encode_rows(x, order, rounding, codes, scales) -> None:
    """Encode rows x[order[i]] as number i, or x[i] if there is no order.

    Parameters
    ----------
    x : (M, D) contiguous array of float32
    order : (N,) array of int64, or None
    rounding : tuple or None
        Tables and ids of the rows of `x`, seed and step as uint64.
    codes : (N, D) array of int8
    scales : (N,) array of float32

    Examples
    --------
    >>> codes, scales = np.empty((1, 2), np.int8), np.empty(1, np.float32)
    >>> encode_rows(np.array([[2, -1]], np.float32), None, None, codes, scales)
    >>> codes, scales
    (array([[127, -64]], dtype=int8), array([2.], dtype=float32))
    """
    bits, width = x.view(np.uint32), x.shape[1]
    chances = np.empty(width if rounding is not None else 0, np.uint16)
    for i in range(codes.shape[0]):
        at = i if order is None else order[i]
        ask_ahead(x, order, i)
        most = np.uint32(0)
        for d in range(width):  # of integers: a maximum of floats would not be taken side by side
            most = max(most, bits[at, d] & ~_SIGN)
        scale = np.uint32(most).view(np.float32)
        if most >= _INFINITE:
            scale = _NAN
        elif most < _SMALLEST:
            scale = _0
        scales[i] = scale
        if not scale > _0:
            codes[i] = 0
            continue
        if rounding is not None:
            tables, ids, seed, step = rounding
            draw_chances(tables[at], ids[at], seed, step, chances)
        for d in range(width):
            value = x[at, d]  # read in any case, or it would be read under a mask
            t = (value if bits[at, d] & ~_SIGN >= _SMALLEST else _0) / scale * _127
            if rounding is None:  # what lies just below a half stays below after the addition
                t += np.uint32(bits[at, d] & _SIGN | _BELOW_HALF).view(np.float32)
                code = np.int32(t)
            else:
                t += np.float32(2 * np.int32(chances[d]) + 1) * _FRACTION
                code = np.int32(t)
                code -= np.int32(np.float32(code) > t)
            codes[i, d] = np.int8(code)


@cpu.exact_inline
def step_of(scale) -> np.float32:
    """What a code of 1 stands for in a row of this scale."""
    return scale / _127


@cpu.exact_inline
def decoded(code, step) -> np.float32:
    """The number that a code stands for."""
    value = np.float32(code) * step
    return _0 if abs(value) < _TINY else value


@cpu.exact_loop
def decode_rows(codes, scales, order, x) -> None:
    """Decode codes to rows x[order[i]], or x[i] if there is no order: see `encode_rows`.

    Examples
    --------
    >>> x = np.zeros((2, 2), np.float32)
    >>> codes, scales = np.array([[127, -64]], np.int8), np.array([12.7], np.float32)
    >>> decode_rows(codes, scales, np.array([1]), x)
    >>> x
    array([[ 0. ,  0. ],
           [12.7, -6.4]], dtype=float32)
    """
    for i in range(codes.shape[0]):
        at = i if order is None else order[i]
        ask_ahead(x, order, i)
        step = step_of(scales[i])
        for d in range(codes.shape[1]):
            x[at, d] = decoded(codes[i, d], step)


def rows_of_block(width: int) -> int:
    """Return how many rows a block of CPU loops has: so many that Python's part is small.

    Examples
    --------
    >>> rows_of_block(16)
    4096
    """
    return max(1, _NUMBERS // width)


def _tile(pieces: int) -> int:
    """Rows of `pieces` loads that a warp decodes: so many that each lane has 8 loads to do."""
    return min(64, max(4, 256 // pieces // 4 * 4))


_encode = Kernel(
    "int8_codec.cu", "int8_encode", "const float* x, int8_t* codes, float* scales, int64_t n",
    lambda N, lanes, rows: Geometry(blocks(N, 256 // lanes * rows), 256),
)  # fmt: skip
_decode = Kernel(
    "int8_codec.cu", "int8_decode", "const int8_t* codes, const float* scales, float* x, int64_t n",
    lambda N, tile: Geometry(blocks(N, tile * 8), 256),
)  # fmt: skip


def _vector(width: int, x: Any, codes: Any) -> int:
    vector = vector_width(width, x)
    while codes.__cuda_array_interface__["data"][0] % vector:
        vector //= 2
    return vector


def _encode_device(x: Any, codes: Any, scales: Any) -> None:
    count, width = x.shape
    vector = _vector(width, x, codes)
    pieces = width // vector
    lanes = min(32, 1 << (pieces - 1).bit_length())
    rows = max(1, 4 // blocks(pieces, lanes))  # so that a lane has 4 loads in flight
    macros = {"DIM": width, "VECTOR": vector, "LANES": lanes, "ROWS": rows}
    _encode(x, codes, scales, count, macros=macros, N=count, lanes=lanes, rows=rows)


def _decode_device(codes: Any, scales: Any, x: Any) -> None:
    count, width = x.shape
    vector = _vector(width, x, codes)
    tile = _tile(width // vector)
    macros = {"DIM": width, "VECTOR": vector, "TILE": tile}
    _decode(codes, scales, x, count, macros=macros, N=count, tile=tile)


def _check(where: str, **given: tuple[Any, Any, str]) -> ModuleType:
    """The module of the arrays, each of which comes with its dtype and axes."""
    for name, (array, dtype, _) in given.items():
        errors.dtype(where, name, array, dtype)
    errors.axes(where, **{name: (array, axes) for name, (array, _, axes) in given.items()})
    name, (array, *_) = next(iter(given.items()))
    errors.columns(where, name, array)
    return arrays.namespace(where, *(array for array, _, _ in given.values()))


def int8_encode(x: Any, out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return the codes and scales of rows.

    Parameters
    ----------
    x : (N, D) array of float32
    out : pair of arrays, optional
        Where the codes and scales go.

    Returns
    -------
    codes : (N, D) array of int8
    scales : (N,) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree.

    Examples
    --------
    >>> codes, scales = int8_encode(np.array([[1, -0.5, 0.25], [np.inf, 1, 0]], np.float32))
    >>> codes, scales
    (array([[127, -64,  32],
           [  0,   0,   0]], dtype=int8), array([ 1., nan], dtype=float32))
    """
    given = {"x": (x, np.float32, "N D")}
    xp = _check("int8_encode", **given)
    if out is None:
        make = arrays.empty if xp is np else xp.empty
        out = make(x.shape, np.int8), make(len(x), np.float32)
    codes, scales = out
    given |= {"out[0]": (codes, np.int8, "N D"), "out[1]": (scales, np.float32, "N")}
    _check("int8_encode", **given)
    x = xp.ascontiguousarray(x)
    if xp is not np:
        _encode_device(x, codes, scales)
        return codes, scales

    def block(i: int, j: int) -> None:
        encode_rows(x[i:j], None, None, codes[i:j], scales[i:j])

    cpu.parallel(block, len(x), rows_of_block(x.shape[1]))
    return codes, scales


def int8_decode(codes: Any, scales: Any, out: Any = None) -> Any:
    """Return the rows that codes and scales stand for; NaN where the scale is.

    Parameters
    ----------
    codes : (N, D) array of int8
    scales : (N,) array of float32
    out : (N, D) array of float32, optional
        Where the rows go.

    Returns
    -------
    (N, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree.

    Examples
    --------
    >>> int8_decode(np.array([[127, -64, 0]], np.int8), np.array([12.7], np.float32))
    array([[12.7, -6.4,  0. ]], dtype=float32)
    """
    given = {"codes": (codes, np.int8, "N D"), "scales": (scales, np.float32, "N")}
    xp = _check("int8_decode", **given)
    if out is None:
        out = (arrays.empty if xp is np else xp.empty)(codes.shape, np.float32)
    _check("int8_decode", **given, out=(out, np.float32, "N D"))
    if xp is not np:
        _decode_device(xp.ascontiguousarray(codes), xp.ascontiguousarray(scales), out)
        return out

    def block(i: int, j: int) -> None:
        decode_rows(codes[i:j], scales[i:j], None, out[i:j])

    cpu.parallel(block, len(out), rows_of_block(out.shape[1]))
    return out
