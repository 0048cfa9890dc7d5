"""Gradients of a linear layer with one output. B rows, N columns.

    y = x @ weight.T + bias                         weight (1, N), bias (1,)

    dweight = dy.T @ x        dbias = sum over B of dy
    dx = dy * weight                                or, where x = max(z, 0) * keep / (1 - rate),
    dz = dy * weight * (x > 0) / (1 - rate)         the gradient of z, and its sum over B

cublasLt takes four launches for them, since its bias gradients and masked matmuls don't come with
one row or column. Here x is read once. Of floats of 16 bits sums are float32, before dx is rounded.
Rows of x may end in columns that just fill them up, of zero weight: dweight and dx_sum lack these.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.halves import value_macros
from cupyrec.scratch import counters

__all__ = ["single_output_backward"]

_ROWS, _LEAST_ROWS = 4, 64  # rows of a thread at a time, of a block
_MOST_BLOCKS, _MOST_PARTS = 2048, 256  # of a launch, and of a tile of columns
_SPAN = 64  # columns of a tile


def _part_rows(rows: int, tiles: int, lanes: int) -> int:
    """Rows of a block: few, while there are not too many blocks or parts to add up."""
    least = max(_LEAST_ROWS, 256 // lanes * _ROWS)
    most = max(1, min(_MOST_PARTS, _MOST_BLOCKS // tiles))
    return least * max(1, blocks(rows, least * most))


def _geometry(B: int, tiles: int, lanes: int) -> Geometry:
    return Geometry(max(1, blocks(B, _part_rows(B, tiles, lanes))) * tiles, 256)


_backward = Kernel(
    "single_output.cu", "single_output_backward",
    "const float* dy, const value_t* x, const value_t* weight, float* parts, double* bias_parts,"
    " uint32_t* counters, float* dweight, float* dbias, value_t* dx, float* dx_sum, float scale,"
    " int64_t b, int64_t n, int64_t kept, int64_t turns, int64_t tiles",
    _geometry, optional="parts bias_parts counters dx dx_sum",
)  # fmt: skip


def _launch(
    xp: Any, dy: Any, x: Any, weight: Any, dweight: Any, dbias: Any, dx: Any, dx_sum: Any,
    scale: float | None,
) -> None:  # fmt: skip
    (rows, columns), size = x.shape, x.dtype.itemsize
    typed = [x, weight] if dx is None else [x, weight, dx]
    vector = math.gcd(16 // size, columns, *(arrays.address(a) // size for a in typed))
    needed = max(2, 1 << (blocks(columns, vector) - 1).bit_length())
    lanes = min(32, _SPAN // vector, needed)
    tiles = max(1, blocks(columns, lanes * vector))
    sizes = {"B": rows, "tiles": tiles, "lanes": lanes}
    scratch: tuple = None, None, None
    parts = _geometry(**sizes).grid // tiles
    if parts > 1:
        shape = tiles, parts, 2 * lanes * vector
        scratch = xp.empty(shape, np.float32), xp.empty(parts, np.float64), counters(xp, tiles)
    if size == 2:
        x, weight = x.view(np.uint16), weight.view(np.uint16)
        dx = None if dx is None else dx.view(np.uint16)
    macros = {"VECTOR": vector, "LANES": lanes, "RELU": int(scale is not None)}
    macros |= value_macros(typed[0].dtype)
    turns = _part_rows(rows, tiles, lanes) // (256 // lanes * _ROWS)
    _backward(
        dy, x, weight, *scratch, dweight, dbias, dx, dx_sum, 1.0 if scale is None else scale,
        rows, columns, dweight.size, turns, tiles, macros=macros, **sizes,
    )  # fmt: skip


def single_output_backward(
    dy: Any,
    x: Any,
    weight: Any,
    dweight: Any,
    dbias: Any,
    dx: Any = None,
    dx_sum: Any = None,
    scale: float | None = None,
) -> None:
    """Write the gradients of the formula above; all arrays are C-contiguous.

    Parameters
    ----------
    dy : (B, 1) array of float32
    x : (B, N) array of float32, float16 or bfloat16 (ml_dtypes')
    weight : (1, N) array of the same dtype
    dweight : (1, K) array of float32
        Of the first K <= N columns.
    dbias : (1,) array of float32
    dx : (B, N) array of x's dtype, optional
        With `scale` it becomes dz.
    dx_sum : (K,) array of float32, optional
        Becomes dx summed over B.
    scale : float, optional
        1 / (1 - rate) where x comes from ReLU and dropout, 1 without dropout.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> x, weight = np.array([[1, 0], [2, 3]], "f"), np.array([[10, 20]], "f")
    >>> dweight, dbias, dz = np.empty((1, 2), "f"), np.empty(1, "f"), np.empty((2, 2), "f")
    >>> single_output_backward(np.ones((2, 1), "f"), x, weight, dweight, dbias, dz, scale=2.0)
    >>> dweight, dbias, dz
    (array([[3., 3.]], dtype=float32), array([2.], dtype=float32), array([[20.,  0.],
           [20., 40.]], dtype=float32))
    """
    where = "single_output_backward"
    outputs = {"dweight": (dweight, "1 K"), "dbias": (dbias, "1"), "dx_sum": (dx_sum, "K")}
    named = {"dy": (dy, "B 1"), "x": (x, "B N"), "weight": (weight, "1 N"), "dx": (dx, "B N")}
    named = {name: pair for name, pair in (named | outputs).items() if pair[0] is not None}
    xp = arrays.namespace(where, *(array for array, _ in named.values()))
    errors.dtype(where, "x", x, np.float32, *arrays.HALVES)
    for name, (array, _) in named.items():
        errors.dtype(where, name, array, x.dtype if name in ("x", "weight", "dx") else np.float32)
    errors.axes(where, **named)
    if dweight.size > x.shape[1]:
        raise ValueError(
            f"{where}: 'dweight' must have at most {x.shape[1]} columns, got shape {dweight.shape}."
        )
    if xp is not np:
        _launch(xp, dy, x, weight, dweight, dbias, dx, dx_sum, scale)
        return
    _cpu(dy, x.astype(np.float32), weight.astype(np.float32), dweight, dbias, dx, dx_sum, scale)


@np.errstate(over="ignore", invalid="ignore")  # inf and NaN are passed on
def _cpu(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, dweight: np.ndarray, dbias: np.ndarray,
    dx: np.ndarray | None, dx_sum: np.ndarray | None, scale: float | None,
) -> None:  # fmt: skip
    kept = dweight.size
    np.matmul(dy.T, x[:, :kept], out=dweight)
    np.sum(dy, axis=0, out=dbias)
    slopes = dy * weight
    if scale is not None:
        slopes = np.where(x > 0, slopes * np.float32(scale), np.float32(0))
    if dx is not None:
        dx[...] = slopes
    if dx_sum is not None:
        np.sum(slopes[:, :kept], axis=0, out=dx_sum)
