"""Layer normalization. B rows, N columns; mean and variance are those of a row.

    xhat = (x - mean) * rstd            rstd = 1 / sqrt(variance + eps), of the biased variance
    y = xhat * weight + bias

    dx = rstd * (g - mean of g - xhat * mean of g * xhat)           g = dy * weight
    dweight = sum over B of dy * xhat        dbias = sum over B of dy

The variance is that of the differences from the mean, whose own mean mends both (Chan, Golub and
LeVeque 1983): in float32 a mean may be large without harm. On a GPU magnitudes below 2^-126 count
as zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Kernel
from cupyrec.ops import row_pieces

__all__ = ["layer_norm"]

_ELEMENTS, _LEAST_ROWS = 1 << 16, 64  # a block of the CPU
_TERMS = 512  # of a row, added up before they are added to others: long sums lose less


@cpu.loop
def _forward_cpu(x, weight, bias, eps, y, means, rstds):
    rows, columns = x.shape
    zero, one, count = x.dtype.type(0), x.dtype.type(1), x.dtype.type(columns)
    for b in range(rows):
        total = rest = squares = zero
        for first in range(0, columns, _TERMS):
            part = zero
            for n in range(first, min(first + _TERMS, columns)):
                part += x[b, n]
            total += part
        mean = total / count
        for first in range(0, columns, _TERMS):
            part = square = zero
            for n in range(first, min(first + _TERMS, columns)):
                difference = x[b, n] - mean
                part += difference
                square += difference * difference
            rest += part
            squares += square
        mean += rest / count
        variance = (squares - rest * rest / count) / count
        variance = zero if variance < zero else variance  # NaN stays NaN
        rstd = one / np.sqrt(variance + eps)
        for n in range(columns):
            y[b, n] = (x[b, n] - mean) * rstd * weight[n] + bias[n]
        means[b], rstds[b] = mean, rstd


@cpu.loop
def _backward_cpu(x, dy, weight, means, rstds, dx, dweight, dbias):
    """One block of rows; dweight and dbias are their sums."""
    rows, columns = x.shape
    zero, count = x.dtype.type(0), x.dtype.type(columns)
    for b in range(rows):
        mean, rstd = means[b], rstds[b]
        total = products = zero
        for first in range(0, columns, _TERMS):
            part = product = zero
            for n in range(first, min(first + _TERMS, columns)):
                xhat, g = (x[b, n] - mean) * rstd, dy[b, n] * weight[n]
                part += g
                product += g * xhat
            total += part
            products += product
        total /= count
        products /= count
        for n in range(columns):
            xhat = (x[b, n] - mean) * rstd
            dx[b, n] = rstd * (dy[b, n] * weight[n] - total - xhat * products)
        for n in range(columns):  # on its own: of more arrays LLVM makes no vectors
            dweight[n] += dy[b, n] * ((x[b, n] - mean) * rstd)
            dbias[n] += dy[b, n]


_forward = Kernel(
    "layer_norm.cu", "layer_norm",
    "const float* x, const float* weight, const float* bias, float eps, float* y, float* mean,"
    " float* rstd, int64_t b",
    row_pieces.forward_geometry,
)  # fmt: skip
_backward = Kernel(
    "layer_norm.cu", "layer_norm_backward",
    "const float* x, const float* dy, const float* weight, const float* mean, const float* rstd,"
    " float* dx, float* parts, int64_t b, int64_t turns",
    row_pieces.backward_geometry,
)  # fmt: skip


def _forward_device(
    x: Any, weight: Any, bias: Any, eps: float, y: Any, mean: Any, rstd: Any
) -> None:
    macros = row_pieces.macros(x.shape[1], x, weight, bias, y)
    sizes = {"B": len(x), "lanes": macros["LANES"], "rows": macros["ROWS"]}
    _forward(x, weight, bias, eps, y, mean, rstd, len(x), macros=macros, **sizes)


def _backward_device(xp: Any, x: Any, dy: Any, weight: Any, mean: Any, rstd: Any, dx: Any) -> Any:
    """(2, N): dweight and dbias."""
    rows, columns = x.shape
    if rows == 0:
        return xp.zeros((2, columns), np.float32)
    macros = row_pieces.macros(columns, x, dy, weight, dx)
    lanes = macros["LANES"]
    parts, turns = row_pieces.block_sums(xp, rows, columns, lanes), row_pieces.turns(rows, lanes)
    _backward(x, dy, weight, mean, rstd, dx, parts, rows, turns, macros=macros, B=rows, lanes=lanes)
    return row_pieces.add_blocks(xp, parts)


class _LayerNorm(Function):
    def forward(self, x, weight, bias, eps):
        self.xp = xp = arrays.namespace("layer_norm", x, weight, bias)
        make = arrays.empty if xp is np else xp.empty
        shape, columns = x.shape, x.shape[-1]
        rows = math.prod(shape[:-1])
        self.x = x = xp.ascontiguousarray(x).reshape(rows, columns)
        self.weight, bias = xp.ascontiguousarray(weight), xp.ascontiguousarray(bias)
        y = make(x.shape, x.dtype)
        self.statistics = mean, rstd = make(rows, x.dtype), make(rows, x.dtype)
        if xp is not np:
            _forward_device(x, self.weight, bias, eps, y, mean, rstd)
            return y.reshape(shape)
        eps = x.dtype.type(eps)

        def block(i: int, j: int) -> None:
            _forward_cpu(x[i:j], self.weight, bias, eps, y[i:j], mean[i:j], rstd[i:j])

        cpu.parallel(block, rows, max(_LEAST_ROWS, _ELEMENTS // columns))
        return y.reshape(shape)

    def backward(self, dy):
        xp, x, (mean, rstd) = self.xp, self.x, self.statistics
        shape = dy.shape
        dy = xp.ascontiguousarray(dy).reshape(x.shape)
        dx = (arrays.empty if xp is np else xp.empty)(x.shape, x.dtype)
        if xp is not np:
            dweight, dbias = _backward_device(xp, x, dy, self.weight, mean, rstd, dx)
            return dx.reshape(shape), dweight, dbias
        rows, columns = x.shape
        size = max(_LEAST_ROWS, _ELEMENTS // columns)
        sums = np.zeros((-(-rows // size), 2, columns), x.dtype)

        def block(i: int, j: int) -> None:
            _backward_cpu(
                x[i:j], dy[i:j], self.weight, mean[i:j], rstd[i:j], dx[i:j], *sums[i // size]
            )

        cpu.parallel(block, rows, size)
        return dx.reshape(shape), *sums.sum(axis=0)


def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5) -> Any:
    """Return y of the formula above.

    Parameters
    ----------
    x : (..., N) array or Tensor of float32, on the CPU also float64
    weight, bias : (N,) arrays or Tensors of the same dtype
    eps : float
        Added to the variance.

    Returns
    -------
    (..., N) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, rows without a column, or `eps` below 0.

    Notes
    -----
    Ba, Kiros and Hinton 2016, "Layer Normalization".

    Examples
    --------
    >>> layer_norm(np.array([[1.0, 5.0], [7.0, 7.0]]), np.ones(2), np.array([0.0, 10.0]), eps=0.5)
    array([[-0.94280904, 10.94280904],
           [ 0.        , 10.        ]])
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, weight, bias)]
    xp = arrays.namespace("layer_norm", *raw)
    floats = (np.float32, np.float64) if xp is np else (np.float32,)
    errors.same_dtype("layer_norm", *floats, x=raw[0], weight=raw[1], bias=raw[2])
    (columns,) = errors.axes("layer_norm", weight=(raw[1], "N"), bias=(raw[2], "N"))
    if columns == 0 or raw[0].shape[-1:] != (columns,):
        raise ValueError(
            "layer_norm: 'x' must have a last axis of N like 'weight', at least 1, "
            f"got shape {raw[0].shape} for N = {columns}."
        )
    return _LayerNorm.apply(x, weight, bias, eps=errors.at_least_0("layer_norm", "eps", eps))
