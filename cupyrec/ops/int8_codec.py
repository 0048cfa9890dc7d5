"""Rows as int8 codes with a scale each: what travels between ranks. N rows, D columns.

    s = max |x| over the row, NaN unless all x are finite
    q = round((x / s) * 127), halves away from zero          0 where s is 0 or NaN
    x' = q * (s / 127)

Each operation is rounded once, so that codes are the same on every device. A magnitude below 2^-126
counts as 0, of x and of x'; s / 127 may lie below, so that x' is right for the smallest s too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["int8_decode", "int8_encode"]

_ROWS = 512  # rows a block of the CPU loops
_SMALLEST, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max
_127, _HALF, _0, _NAN = np.float32(127), np.float32(0.5), np.float32(0), np.float32(np.nan)


@cpu.exact_loop
def _encode_cpu(x, codes, scales):
    for i in range(x.shape[0]):
        scale = _0
        for d in range(x.shape[1]):
            magnitude = abs(x[i, d])
            if not magnitude <= _LARGEST:
                scale = _NAN
                break
            scale = max(scale, magnitude)
        if scale < _SMALLEST:
            scale = _0
        scales[i] = scale
        for d in range(x.shape[1]):
            code = np.int32(0)
            if scale > _0 and abs(x[i, d]) >= _SMALLEST:
                t = x[i, d] / scale * _127
                code = np.int32(t)
                rest = t - np.float32(code)  # exact
                if rest >= _HALF:
                    code += 1
                elif rest <= -_HALF:
                    code -= 1
            codes[i, d] = code


@cpu.exact_loop
def _decode_cpu(codes, scales, x):
    for i in range(x.shape[0]):
        step = scales[i] / _127
        for d in range(x.shape[1]):
            value = np.float32(codes[i, d]) * step
            x[i, d] = _0 if abs(value) < _SMALLEST else value


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
    if xp is np:
        cpu.parallel(lambda i, j: _encode_cpu(x[i:j], codes[i:j], scales[i:j]), len(x), _ROWS)
    else:
        _encode_device(xp.ascontiguousarray(x), codes, scales)
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
    if xp is np:
        cpu.parallel(lambda i, j: _decode_cpu(codes[i:j], scales[i:j], out[i:j]), len(out), _ROWS)
    else:
        _decode_device(xp.ascontiguousarray(codes), xp.ascontiguousarray(scales), out)
    return out
