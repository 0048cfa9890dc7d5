"""A layer of DCN-v2's cross network. B rows, N columns, weight (N, N).

    z = x @ weight.T + bias
    y = x0 * z + x

    dz = dy * x0                     dx0 = dy * z
    dx = dz @ weight + dy
    dweight = dz.T @ x               dbias = sum over B of dz

On a GPU all sums are of cublasLt's matmuls, bias, dy and dbias included; besides there is one
kernel forward, one backward.

With `amp`, a type of 16 bits, the matmuls' x, weight and dz are rounded to it; sums and all else
are float32. On a GPU rows are then padded with zeros to 16 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, cublaslt, errors, streams
from cupyrec.autograd import Function, Tensor
from cupyrec.cublaslt import Epilogue
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.cast import cast_matrices, padded, padded_width, rounded
from cupyrec.ops.fused_mlp import matmul_block, row_block, weight_cuts
from cupyrec.ops.halves import half_type, value_macros

__all__ = ["combine", "combine_backward", "cross_matrix"]


@cpu.loop
def _forward_cpu(z, x0, x, y):
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            y[b, n] = x0[b, n] * z[b, n] + x[b, n]


@cpu.loop
def _backward_cpu(dy, z, x0, dz, dx0):
    for b in range(dy.shape[0]):
        for n in range(dy.shape[1]):
            dz[b, n] = dy[b, n] * x0[b, n]
            dx0[b, n] = dy[b, n] * z[b, n]


class _CrossMatrix(Function):
    """With `amp`, arrays of float32 hold what is rounded to 16 bits."""

    def forward(self, x, x0, weight, bias, amp, tf32):
        self.amp, rows, columns = amp, *x.shape
        x, self.x0, bias = map(np.ascontiguousarray, (x, x0, bias))
        self.x, self.weight = rounded(x, amp), rounded(np.ascontiguousarray(weight), amp)
        self.z, y = arrays.empty(x.shape, x.dtype), arrays.empty(x.shape, x.dtype)

        def block(i: int, j: int) -> None:
            matmul_block(self.x[i:j], self.weight.T, self.z[i:j])
            self.z[i:j] += bias
            _forward_cpu(self.z[i:j], self.x0[i:j], x[i:j], y[i:j])

        with cpu.serial_blas():
            cpu.parallel(block, rows, row_block(rows, columns))
        return y

    def backward(self, dy):
        rows, columns = dy.shape
        size = row_block(rows, columns)
        dy = np.ascontiguousarray(dy)
        dz, dx, dx0 = (arrays.empty(dy.shape, dy.dtype) for _ in range(3))
        dweight, dbias = self.grad_room(2), self.grad_room(3)
        sums = np.zeros((blocks(rows, size), columns), dy.dtype)
        cuts = weight_cuts(columns, columns)

        def block(i: int, j: int) -> None:
            _backward_cpu(dy[i:j], self.z[i:j], self.x0[i:j], dz[i:j], dx0[i:j])
            dz[i:j] = rounded(dz[i:j], self.amp)
            np.sum(dz[i:j], axis=0, out=sums[i // size])
            matmul_block(dz[i:j], self.weight, dx[i:j])
            dx[i:j] += dy[i:j]

        def weight_block(i: int, j: int) -> None:
            for n, m in cuts[i:j]:
                np.matmul(dz[:, n].T, self.x[:, m], out=dweight[n, m])

        with cpu.serial_blas():
            cpu.parallel(block, rows, size)
            cpu.parallel(weight_block, len(cuts), 1)
        sums.sum(axis=0, out=dbias)
        return dx, dx0, dweight, dbias


def _geometry(n: int) -> Geometry:
    return Geometry(blocks(n, 256), 256)


_forward = Kernel(
    "cross_matrix.cu", "cross_matrix",
    "const float* z, const float* x0, const float* x, float* y, int64_t count", _geometry,
)  # fmt: skip
_backward = Kernel(
    "cross_matrix.cu", "cross_matrix_backward",
    "const float* dy, const float* z, const float* x0, value_t* dz, float* dx0, int64_t count",
    _geometry,
)  # fmt: skip


def _macros(vector: int, dz: Any, columns: int) -> dict[str, object]:
    sizes = {"VECTOR": vector, "COLUMNS": columns, "FILLED": dz.shape[1]}
    return sizes | value_macros(dz.dtype)


def combine(z: Any, x0: Any, x: Any) -> Any:
    """Return x0 * z + x of three contiguous (B, N) arrays.

    Examples
    --------
    >>> combine(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)))
    array([[2., 2.]])
    """
    xp = arrays.namespace("cross_matrix", z, x0, x)
    y = xp.empty(x.shape, x.dtype)
    if xp is np:
        _forward_cpu(z, x0, x, y)
        return y
    vector = vector_width(x.size, z, x0, x, y)
    macros = _macros(vector, z, x.shape[1])
    _forward(z, x0, x, y, x.size, macros=macros, n=x.size // vector)
    return y


def combine_backward(dy: Any, z: Any, x0: Any, amp: np.dtype | None) -> tuple[Any, Any]:
    """Return dz = dy * x0, with `amp` rounded and in rows of whole 16 bytes, and dx0 = dy * z.

    Examples
    --------
    >>> combine_backward(*[np.full((1, 2), n, np.float32) for n in (2, 3, 4)], None)
    (array([[8., 8.]], dtype=float32), array([[6., 6.]], dtype=float32))
    """
    xp, (rows, columns) = arrays.namespace("cross_matrix", dy, z, x0), dy.shape
    dx0 = xp.empty(dy.shape, dy.dtype)
    if xp is np:
        dz = np.empty(dy.shape, dy.dtype)
        _backward_cpu(dy, z, x0, dz, dx0)
        return dz if amp is None else padded(dz, amp), dx0
    filled = columns if amp is None else padded_width(columns)
    dz = xp.empty((rows, filled), np.float32 if amp is None else amp)
    vector = vector_width(math.gcd(columns, filled), dy, z, x0, dz, dx0)
    macros, count = _macros(vector, dz, columns), rows * filled
    _backward(dy, z, x0, arrays.bits(dz), dx0, count, macros=macros, n=count // vector)
    return dz, dx0


class _CrossMatrixOnDevice(Function):
    def forward(self, x, x0, weight, bias, amp, tf32):
        self.xp = xp = arrays.namespace("cross_matrix", x, x0, weight, bias)
        x, self.x0, weight, bias = map(xp.ascontiguousarray, (x, x0, weight, bias))
        self.amp, self.tf32 = amp, tf32 and amp is None
        self.weight, self.x = (weight, x) if amp is None else cast_matrices([weight], amp, x)
        self.z = xp.empty(x.shape, np.float32)
        cublaslt.matmul(
            self.x, self.weight[: x.shape[1]], self.z, transpose_b=True,
            epilogue=Epilogue.BIAS, bias=bias, tf32=self.tf32,
        )  # fmt: skip
        return combine(self.z, self.x0, x)

    def backward(self, dy):
        xp, dy = self.xp, self.xp.ascontiguousarray(dy)
        rows, columns = dy.shape
        dz, dx0 = combine_backward(dy, self.z, self.x0, self.amp)
        dx = xp.empty(dy.shape, np.float32)
        dweight, dbias = self.grad_room(2), self.grad_room(3)
        summed = min(rows, columns) > 1  # cublasLt does not for one row or column
        with streams.second_stream(xp) as second:
            with second(dz):
                epilogue = dict(epilogue=Epilogue.BGRADB, bias=dbias) if summed else {}
                cublaslt.matmul(
                    dz[:, :columns], self.x[:, :columns], dweight,
                    transpose_a=True, tf32=self.tf32, **epilogue,
                )  # fmt: skip
                if not summed:
                    dz[:, :columns].astype(np.float32, copy=False).sum(axis=0, out=dbias)
            cublaslt.matmul(dz, self.weight[:, :columns], dx, added=dy, tf32=self.tf32)
        return dx, dx0, dweight, dbias


def cross_matrix(
    x: Any, x0: Any, weight: Any, bias: Any, *, amp: str | None = None, tf32: bool = False
) -> Any:
    """Return y of the formula above.

    Parameters
    ----------
    x : (B, N) array or Tensor of float32, on the CPU also float64
        Output of the layer before, or `x0`.
    x0 : (B, N) array or Tensor of the same dtype
        Input of the network.
    weight : (N, N) array or Tensor of the same dtype
    bias : (N,) array or Tensor of the same dtype
    amp : {None, "float16", "bfloat16"}
        What is multiplied in, see above; arrays are then float32.
    tf32 : bool
        Whether a GPU may round what it multiplies to TF32, 10 bits of the fraction.

    Returns
    -------
    (B, N) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, or N = 0.

    Notes
    -----
    Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", equation 2; OneFlow's
    ``fused_cross_feature_interaction`` of mode "matrix".

    Examples
    --------
    >>> x, x0, weight = np.array([[1.0, 2.0]]), np.array([[10.0, 100.0]]), np.eye(2)
    >>> cross_matrix(x, x0, weight, np.array([0.5, 0.25]))
    array([[ 16., 227.]])
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, x0, weight, bias)]
    xp = arrays.namespace("cross_matrix", *raw)
    half = half_type("cross_matrix", amp)
    floats = (np.float32, np.float64) if xp is np and half is None else (np.float32,)
    errors.same_dtype("cross_matrix", *floats, x=raw[0], x0=raw[1], weight=raw[2], bias=raw[3])
    sizes = errors.axes(
        "cross_matrix", x=(raw[0], "B N"), x0=(raw[1], "B N"), weight=(raw[2], "N N"),
        bias=(raw[3], "N"),
    )  # fmt: skip
    if 0 in sizes[1:]:
        raise ValueError(f"cross_matrix: N must be at least 1, got shape {raw[0].shape}.")
    op = _CrossMatrix if xp is np else _CrossMatrixOnDevice
    return op.apply(x, x0, weight, bias, amp=half, tf32=tf32)
