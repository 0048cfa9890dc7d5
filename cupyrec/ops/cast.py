"""Casts between float32 and the types of 16 bits, float16 and bfloat16.

    y = x rounded to the nearest number of y's type, ties to even; inf and NaN stay
    dx = dy, cast to the type of x

Matmuls of 16 bits want rows of whole 16 bytes: `padded` and `cast_matrices` put zeros at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.halves import value_macros

__all__ = ["cast", "cast_array", "cast_matrices", "padded", "padded_width", "rounded", "widen"]

_PIECE = 8  # numbers a thread


def _geometry(pieces: int) -> Geometry:
    return Geometry(blocks(pieces, 256), 256)


_rows = Kernel(
    "cast.cu", "cast_rows",
    "const source_t* x, result_t* y, int64_t rows, int64_t columns, int64_t stride,"
    " int64_t pieces",
    _geometry,
)  # fmt: skip
_matrices = Kernel(
    "cast.cu", "cast_matrices",
    "const int64_t* table, int count, const source_t* x, int64_t rows, int64_t columns,"
    " int64_t last, result_t* y, int64_t pieces",
    _geometry, optional="x",
)  # fmt: skip


def _macros(source: Any, result: Any) -> dict[str, object]:
    """Of a kernel's two types, of which one is float32, or both are the same."""
    source, result = value_macros(source), value_macros(result)
    return {
        "source_t": source["value_t"],
        "result_t": result["value_t"],
        "BRAIN": source["BRAIN"] or result["BRAIN"],
    }


def padded_width(columns: int) -> int:
    """Return the next multiple of 8: numbers of 16 bits in whole 16 bytes.

    Examples
    --------
    >>> padded_width(13)
    16
    """
    return -(-columns // _PIECE) * _PIECE


def cast_array(x: Any, dtype: Any) -> Any:
    """Return x in another type, itself where it is of that type; see `cast`.

    Examples
    --------
    >>> cast_array(np.array([1.0]), np.float16)
    array([1.], dtype=float16)
    """
    xp, dtype = arrays.namespace("cast", x), np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if xp is np:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype)
    x, y = xp.ascontiguousarray(x), xp.empty(x.shape, dtype)
    _launch(_rows, x, y, 1, x.size, x.size)
    return y


def padded(x: Any, dtype: Any) -> Any:
    """Return x (B, N) as (B, 8 * ceil(N / 8)) of 16 bits, zero beyond column N.

    It is x itself where that is so already.

    Examples
    --------
    >>> padded(np.ones((1, 3), np.float32), np.float16)
    array([[1., 1., 1., 0., 0., 0., 0., 0.]], dtype=float16)
    """
    xp = arrays.namespace("cast", x)
    x, width = xp.ascontiguousarray(x), padded_width(x.shape[1])
    if (x.dtype, x.shape[1]) == (dtype, width):
        return x
    if xp is np:
        return np.pad(cast_array(x, dtype), ((0, 0), (0, width - x.shape[1])))
    y = xp.empty((len(x), width), dtype)
    _launch(_rows, x, y, *x.shape, width)
    return y


def _launch(kernel: Kernel, x: Any, y: Any, rows: int, columns: int, stride: int) -> None:
    if x.dtype != y.dtype and {x.dtype, y.dtype} <= set(arrays.HALVES):
        x = cast_array(x, np.float32)  # a kernel knows one type of 16 bits
    pieces = rows * blocks(stride, _PIECE)
    macros = _macros(x.dtype, y.dtype)
    kernel(
        arrays.bits(x), arrays.bits(y), rows, columns, stride, pieces, macros=macros, pieces=pieces
    )


_tables: dict[tuple, Any] = {}  # by what they hold
_MOST_TABLES = 4096  # of a few hundred bytes; captured graphs read those of models in use


def cast_matrices(xs: Sequence[Any], dtype: Any, last: Any = None) -> list[Any]:
    """Return vectors and matrices of float32 in 16 bits, on a device in one launch.

    Rows and columns are padded with zeros to multiples of 8.

    Parameters
    ----------
    xs : sequence of (M, N) or (N,) arrays of float32
        C-contiguous, and in the same place in most calls: a device keeps their addresses.
    dtype : dtype
    last : (B, N) array of float32, optional
        One more, from wherever it lies; C-contiguous, and no row is added to it.

    Returns
    -------
    list of (8 * ceil(M / 8), 8 * ceil(N / 8)) or (8 * ceil(N / 8),) arrays
        And of one (B, 8 * ceil(N / 8)).

    Examples
    --------
    >>> cast_matrices([np.ones((2, 3), np.float32)], np.float16)[0].shape
    (8, 8)
    """
    xp, dtype = arrays.namespace("cast", *xs), np.dtype(dtype)
    shapes = [tuple(map(padded_width, x.shape)) for x in xs]
    if xp is np:
        pads = (
            [(0, m - n) for m, n in zip(s, x.shape, strict=True)]
            for s, x in zip(shapes, xs, strict=True)
        )
        made = [np.pad(cast_array(x, dtype), pad) for x, pad in zip(xs, pads, strict=True)]
        return made if last is None else [*made, padded(last, dtype)]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
    size = (0, 0) if last is None else last.shape
    wide = size[0], padded_width(size[1])
    flat = xp.empty(ends[-1] + wide[0] * wide[1], dtype)
    rows = tuple(
        (arrays.address(x), x.size // x.shape[-1], x.shape[-1], shape[-1], end // _PIECE)
        for x, shape, end in zip(xs, shapes, ends, strict=False)
    )
    key = xp.__name__, rows
    if key not in _tables:
        if len(_tables) >= _MOST_TABLES:
            del _tables[next(iter(_tables))]  # the oldest
        _tables[key] = arrays.copy_to(xp, np.array(rows, np.int64))
    pieces = flat.size // _PIECE
    _matrices(
        _tables[key], len(xs), last, *size, ends[-1] // _PIECE, arrays.bits(flat), pieces,
        macros=_macros(np.float32, dtype), pieces=pieces,
    )  # fmt: skip
    made = [
        flat[i:j].reshape(shape) for shape, i, j in zip(shapes, ends[:-1], ends[1:], strict=True)
    ]
    return made if last is None else [*made, flat[ends[-1] :].reshape(wide)]


class _Cast(Function):
    def forward(self, x, dtype):
        self.dtype = x.dtype
        return cast_array(x, dtype)

    def backward(self, grad):
        return (cast_array(grad, self.dtype),)


def cast(x: Any, dtype: Any) -> Any:
    """Return x in another floating type, with a gradient in x's own.

    Parameters
    ----------
    x : array or Tensor of float32, float16 or bfloat16, on the CPU also float64
    dtype : dtype
        One of these.

    Raises
    ------
    TypeError
        Another dtype.

    Notes
    -----
    Casts of mixed precision, Micikevicius et al. 2018.

    Examples
    --------
    >>> cast(np.array([1.0, 65520.0], np.float32), "float16")
    array([ 1., inf], dtype=float16)
    """
    raw = x.data if isinstance(x, Tensor) else x
    xp = arrays.namespace("cast", raw)
    floats = [np.float32, *arrays.HALVES, *([np.float64] if xp is np else [])]
    errors.dtype("cast", "x", raw, *floats)
    known = next((d for d in map(np.dtype, floats) if dtype in (d, d.name, d.type)), None)
    if known is None:
        names = " or ".join(np.dtype(d).name for d in floats)
        raise TypeError(f"cast: 'dtype' must be {names}, got {dtype!r}.")
    return x if raw.dtype == known else _Cast.apply(x, dtype=known)


def widen(x: Any) -> Any:
    """Return x of 16 bits in float32, as `cast` does, and any other x itself.

    Examples
    --------
    >>> widen(np.ones(2, np.float16)), widen(np.ones(1))
    (array([1., 1.], dtype=float32), array([1.]))
    """
    return cast(x, np.float32) if x.dtype in arrays.HALVES else x


def rounded(x: np.ndarray, half: np.dtype | None) -> np.ndarray:
    """Return x of the CPU as float32 that is rounded to a type of 16 bits; itself for None.

    Examples
    --------
    >>> rounded(np.array([0.1], np.float32), np.dtype(np.float16))
    array([0.09997559], dtype=float32)
    """
    return x if half is None else cast_array(x, half).astype(np.float32)
