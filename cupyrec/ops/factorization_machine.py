"""Sum of the dot products of all pairs of features. B batch, F features, D width.

    X = [dense, sparse]  (B, F, D);  s[b] = sum over f of X[b, f]
    out[b] = sum over r and c < r of X[b, r] . X[b, c] = 1/2 sum over d of (s^2 - sum over f of X^2)

    dX[b, f] = grad[b] (s[b] - X[b, f])

The second-order term of a factorization machine (Rendle 2010). Instead of the difference of squares
each number is multiplied by the sum of those before it: as few operations, and nothing cancels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, bulk, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.halves import in_float32, value_macros

__all__ = ["factorization_machine"]

_NAME = "factorization_machine"
_SAMPLES = 64  # samples a block of the CPU loops
_HELD = 112  # numbers of a sample that a thread of the backward kernel holds at once
_BATCH = 9  # features that are loaded at once where they are not held
_LANES = 8  # of a sample, if it has as many columns: with fewer a large batch leaves a GPU idle


@cpu.loop
def _forward_cpu(dense, sparse, out):
    """One block of samples."""
    sums = np.empty(sparse.shape[2], sparse.dtype)
    for b in range(sparse.shape[0]):
        sums[:] = 0
        for d in range(dense.shape[1]):
            sums[d] = dense[b, d]
        pairs = sparse.dtype.type(0)
        for f in range(sparse.shape[1]):
            for d in range(sums.size):
                pairs += sparse[b, f, d] * sums[d]
                sums[d] += sparse[b, f, d]
        out[b, 0] = pairs


@cpu.loop
def _backward_cpu(grad, dense, sparse, ddense, dsparse):
    sums = np.empty(sparse.shape[2], sparse.dtype)
    for b in range(sparse.shape[0]):
        g = grad[b, 0]
        sums[:] = 0
        for d in range(dense.shape[1]):
            sums[d] = dense[b, d]
        for f in range(sparse.shape[1]):
            for d in range(sums.size):
                sums[d] += sparse[b, f, d]
        for d in range(dense.shape[1]):
            ddense[b, d] = g * (sums[d] - dense[b, d])
        for f in range(sparse.shape[1]):
            for d in range(sums.size):
                dsparse[b, f, d] = g * (sums[d] - sparse[b, f, d])


def _geometry(B: int, lanes: int) -> Geometry:
    return Geometry(blocks(B * lanes, 256), 256)


_forward = Kernel(
    "factorization_machine.cu", "factorization_machine_forward",
    "const value_t* dense, const value_t* sparse, float* out, int64_t batch", _geometry,
)  # fmt: skip
_backward = Kernel(
    "factorization_machine.cu", "factorization_machine_backward",
    "const float* grad, const value_t* dense, const value_t* sparse, value_t* ddense,"
    " value_t* dsparse, int64_t batch",
    _geometry,
)  # fmt: skip


def _cut(values: list[Any], held: bool) -> dict[str, Any]:
    """Macros of a kernel that reads X, the first two of `values`, and may write the others.

    All features are loaded at once if they are to be `held` and fit; else some at a time.
    """
    dense, sparse = values[:2]
    features, width = sparse.shape[1] + (dense.shape[1] > 0), sparse.shape[2]
    size = sparse.dtype.itemsize
    vector = math.gcd(16 // size, width, *(arrays.address(a) // size for a in values))
    while vector > 1 and (width < _LANES * vector or (held and features * vector > _HELD)):
        vector //= 2
    held &= features * vector <= _HELD
    return {
        "FEATURES": features, "WIDTH": width, "DENSE": int(dense.shape[1] > 0), "VECTOR": vector,
        "LANES": min(32, 1 << (width // vector - 1).bit_length()),
        "BATCH": features if held else blocks(features, blocks(features, _BATCH)),
    } | value_macros(sparse.dtype)  # fmt: skip


def _forward_device(dense: Any, sparse: Any, out: Any) -> None:
    values = [dense, sparse]
    macros = _cut(values, held=False)
    given = (*map(arrays.bits, values), out, len(out))
    _forward(*given, macros=macros, B=len(out), lanes=macros["LANES"])


def _backward_device(grad: Any, dense: Any, sparse: Any, ddense: Any, dsparse: Any) -> None:
    values = [dense, sparse, ddense, dsparse]
    macros = _cut(values, held=True)
    given = (grad, *map(arrays.bits, values), len(grad))
    _backward(*given, macros=macros, B=len(grad), lanes=macros["LANES"])


class _FactorizationMachine(Function):
    def forward(self, dense, sparse):
        xp = arrays.namespace(_NAME, sparse)
        if dense is None:  # loops and kernels know it by its width of 0
            dense = xp.empty((sparse.shape[0], 0), sparse.dtype)
        self.dense, self.sparse = bulk.contiguous(dense), bulk.contiguous(sparse)
        half = sparse.dtype in arrays.HALVES
        out = xp.zeros((len(sparse), 1), np.float32 if half else sparse.dtype)
        if xp is np:

            def block(i: int, j: int) -> None:
                in_float32(_forward_cpu, (self.dense[i:j], self.sparse[i:j]), (), [out[i:j]])

            cpu.parallel(block, len(out), _SAMPLES)
        elif self.dense.size or self.sparse.size:
            _forward_device(self.dense, self.sparse, out)
        return out

    def backward(self, grad):
        xp = arrays.namespace(_NAME, grad)
        grad = xp.ascontiguousarray(grad)
        make = arrays.empty if xp is np else xp.empty
        ddense, dsparse = (make(a.shape, a.dtype) for a in (self.dense, self.sparse))
        if xp is np:

            def block(i: int, j: int) -> None:
                inputs = grad[i:j], self.dense[i:j], self.sparse[i:j]
                in_float32(_backward_cpu, inputs, (), [ddense[i:j], dsparse[i:j]])

            cpu.parallel(block, len(grad), _SAMPLES)
        elif self.dense.size or self.sparse.size:
            _backward_device(grad, self.dense, self.sparse, ddense, dsparse)
        return ddense, dsparse


def factorization_machine(dense: Any, sparse: Any) -> Any:
    """Return the sum of the dot products of all pairs of a sample's features.

    Parameters
    ----------
    dense : (B, D) array or Tensor of float32, float64, float16 or bfloat16 (ml_dtypes'), or None
        One more feature.
    sparse : (B, F, D) array or Tensor of the same dtype
        The features.

    Returns
    -------
    (B, 1) array or Tensor
        float32; of float64 float64.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree; D = 0; on a device other than the CPU also
        float64.

    Notes
    -----
    The second-order term of S. Rendle, Factorization machines, 2010, whose equation 5 leaves D
    multiplications a feature.

    Examples
    --------
    >>> dense, sparse = np.array([[1.0, 2.0]]), np.array([[[3.0, 4.0], [5.0, 6.0]]])
    >>> factorization_machine(dense, sparse)
    array([[67.]])
    """
    dense_data, data = (a.data if isinstance(a, Tensor) else a for a in (dense, sparse))
    arrays.namespace(_NAME, data)
    errors.dtype(_NAME, "sparse", data, np.float32, np.float64, *arrays.HALVES)
    if dense_data is None:
        errors.axes(_NAME, sparse=(data, "B F D"))
    else:
        arrays.namespace(_NAME, dense_data, data)
        errors.dtype(_NAME, "dense", dense_data, data.dtype)
        errors.axes(_NAME, dense=(dense_data, "B D"), sparse=(data, "B F D"))
    if arrays.device(data) != "cpu":
        errors.dtype(f"{_NAME} on a device", "sparse", data, np.float32, *arrays.HALVES)
    if data.shape[2] == 0:
        raise ValueError(f"{_NAME}: D must be at least 1, got shape {data.shape}.")
    return _FactorizationMachine.apply(dense, sparse)
