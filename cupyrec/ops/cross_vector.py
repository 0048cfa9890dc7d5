"""A layer of DCN's cross network. B rows, N columns.

    m[b] = x[b] . weight
    y = x0 * m + bias + x

    dm[b] = dy[b] . x0[b]
    dx = dm * weight + dy            dx0 = dy * m
    dweight = sum over B of dm * x   dbias = sum over B of dy

On a GPU magnitudes below 2^-126 count as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, bulk, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Kernel
from cupyrec.ops import row_pieces

__all__ = ["cross_vector"]

_ELEMENTS, _LEAST_ROWS = 1 << 16, 64  # a block of the CPU
_TERMS = 512  # of a row, added up before they are added to others: long sums lose less


@cpu.loop
def _forward_cpu(x, x0, weight, bias, y, products):
    rows, columns = x.shape
    zero = x.dtype.type(0)
    for b in range(rows):
        product = zero
        for first in range(0, columns, _TERMS):
            part = zero
            for n in range(first, min(first + _TERMS, columns)):
                part += x[b, n] * weight[n]
            product += part
        for n in range(columns):
            y[b, n] = x0[b, n] * product + (bias[n] + x[b, n])
        products[b] = product


@cpu.loop
def _backward_cpu(dy, x, x0, weight, products, dx, dx0, dweight, dbias):
    """One block of rows; dweight and dbias are their sums."""
    rows, columns = x.shape
    zero = x.dtype.type(0)
    for b in range(rows):
        product, dproduct = products[b], zero
        for first in range(0, columns, _TERMS):
            part = zero
            for n in range(first, min(first + _TERMS, columns)):
                part += dy[b, n] * x0[b, n]
            dproduct += part
        for n in range(columns):
            dx[b, n] = dproduct * weight[n] + dy[b, n]
            dx0[b, n] = dy[b, n] * product
        for n in range(columns):  # on its own: of more arrays LLVM makes no vectors
            dweight[n] += dproduct * x[b, n]
            dbias[n] += dy[b, n]


_forward = Kernel(
    "cross_vector.cu", "cross_vector",
    "const float* x, const float* x0, const float* weight, const float* bias, float* y,"
    " float* products, int64_t b",
    row_pieces.forward_geometry,
)  # fmt: skip
_backward = Kernel(
    "cross_vector.cu", "cross_vector_backward",
    "const float* dy, const float* x, const float* x0, const float* weight,"
    " const float* products, float* dx, float* dx0, float* parts, int64_t b, int64_t turns",
    row_pieces.backward_geometry,
)  # fmt: skip


def _forward_device(x: Any, x0: Any, weight: Any, bias: Any, y: Any, products: Any) -> None:
    macros = row_pieces.macros(x.shape[1], x, x0, weight, bias, y)
    sizes = {"B": len(x), "lanes": macros["LANES"], "rows": macros["ROWS"]}
    _forward(x, x0, weight, bias, y, products, len(x), macros=macros, **sizes)


def _backward_device(
    xp: Any, dy: Any, x: Any, x0: Any, weight: Any, products: Any, dx: Any, dx0: Any
) -> Any:
    """(2, N): dweight and dbias."""
    rows, columns = x.shape
    if rows == 0:
        return xp.zeros((2, columns), np.float32)
    macros = row_pieces.macros(columns, dy, x, x0, weight, dx, dx0)
    lanes = macros["LANES"]
    parts, turns = row_pieces.block_sums(xp, rows, columns, lanes), row_pieces.turns(rows, lanes)
    _backward(
        dy, x, x0, weight, products, dx, dx0, parts, rows, turns,
        macros=macros, B=rows, lanes=lanes,
    )  # fmt: skip
    return row_pieces.add_blocks(xp, parts)


class _CrossVector(Function):
    def forward(self, x, x0, weight, bias):
        self.xp = xp = arrays.namespace("cross_vector", x, x0, weight, bias)
        make = arrays.empty if xp is np else xp.empty
        self.x, self.x0, self.weight, bias = map(bulk.contiguous, (x, x0, weight, bias))
        rows, columns = x.shape
        y, self.products = make(x.shape, x.dtype), make(rows, x.dtype)
        if xp is not np:
            _forward_device(self.x, self.x0, self.weight, bias, y, self.products)
            return y

        def block(i: int, j: int) -> None:
            given = self.x[i:j], self.x0[i:j], self.weight, bias
            _forward_cpu(*given, y[i:j], self.products[i:j])

        cpu.parallel(block, rows, max(_LEAST_ROWS, _ELEMENTS // columns))
        return y

    def backward(self, dy):
        xp, x = self.xp, self.x
        dy = bulk.contiguous(dy)
        make = arrays.empty if xp is np else xp.empty
        dx, dx0 = make(x.shape, x.dtype), make(x.shape, x.dtype)
        if xp is not np:
            sums = _backward_device(xp, dy, x, self.x0, self.weight, self.products, dx, dx0)
            return dx, dx0, *sums
        rows, columns = x.shape
        size = max(_LEAST_ROWS, _ELEMENTS // columns)
        sums = np.zeros((-(-rows // size), 2, columns), x.dtype)

        def block(i: int, j: int) -> None:
            given = dy[i:j], x[i:j], self.x0[i:j], self.weight, self.products[i:j]
            _backward_cpu(*given, dx[i:j], dx0[i:j], *sums[i // size])

        cpu.parallel(block, rows, size)
        return dx, dx0, *sums.sum(axis=0)


def cross_vector(x: Any, x0: Any, weight: Any, bias: Any) -> Any:
    """Return y of the formula above.

    Parameters
    ----------
    x : (B, N) array or Tensor of float32, on the CPU also float64
        Output of the layer before, or `x0`.
    x0 : (B, N) array or Tensor of the same dtype
        Input of the network.
    weight, bias : (N,) arrays or Tensors of the same dtype

    Returns
    -------
    (B, N) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, or N = 0.

    Notes
    -----
    Wang et al. 2017, "Deep & Cross Network for Ad Click Predictions", equation 3; OneFlow's
    ``fused_cross_feature_interaction`` of mode "vector".

    Examples
    --------
    >>> x, x0 = np.array([[1.0, 2.0]]), np.array([[10.0, 100.0]])
    >>> cross_vector(x, x0, np.array([3.0, 4.0]), np.array([0.5, 0.25]))
    array([[ 111.5 , 1102.25]])
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, x0, weight, bias)]
    xp = arrays.namespace("cross_vector", *raw)
    floats = (np.float32, np.float64) if xp is np else (np.float32,)
    errors.same_dtype("cross_vector", *floats, x=raw[0], x0=raw[1], weight=raw[2], bias=raw[3])
    sizes = errors.axes(
        "cross_vector", x=(raw[0], "B N"), x0=(raw[1], "B N"), weight=(raw[2], "N"),
        bias=(raw[3], "N"),
    )  # fmt: skip
    if 0 in sizes[1:]:
        raise ValueError(f"cross_vector: N must be at least 1, got shape {raw[0].shape}.")
    return _CrossVector.apply(x, x0, weight, bias)
