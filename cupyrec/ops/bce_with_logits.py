"""Binary cross-entropy of logits. B samples.

    loss = 1/total * sum over b of  max(z, 0) - z * y + log(1 + exp(-|z|))
    dz   = (sigmoid(z) - y) / total

`total` is the size of the *global* batch, so that ranks' losses and gradients are summed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.elementwise import sigmoid

__all__ = ["bce_terms", "bce_with_logits"]


def bce_terms(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return each sample's loss, in float64.

    Parameters
    ----------
    logits, labels : arrays of one shape

    Examples
    --------
    >>> bce_terms(np.array([0.0, 1e9]), np.array([1.0, 1.0])).round(6)
    array([0.693147, 0.      ])
    """
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN is passed on, for the caller to see
        return np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))


_SAMPLES = 256  # a block
_loss = Kernel(
    "bce_with_logits.cu", "bce_loss",
    "const float* z, const float* y, int64_t n, double total, double* parts, float* loss",
    lambda B: Geometry(blocks(B, _SAMPLES), 128), optional="parts",
)  # fmt: skip
_add_parts = Kernel(
    "bce_with_logits.cu", "bce_add_parts",
    "const double* parts, int64_t n, double total, float* loss", lambda: Geometry(1, 128),
)  # fmt: skip
_gradient = Kernel(
    "bce_with_logits.cu", "bce_gradient",
    "const float* z, const float* y, const float* grad, float total, int64_t n, float* dz",
    lambda B: Geometry(blocks(B, _SAMPLES), 128),
)  # fmt: skip


def _forward_kernels(xp: Any, logits: Any, labels: Any, total: int) -> Any:
    if not logits.size:
        return xp.zeros((), np.float32)
    n, macros = logits.size, {"VECTOR": vector_width(2, logits, labels)}
    loss = xp.empty((), np.float32)
    count = _loss.geometry(B=n).grid
    parts = xp.empty(count, np.float64) if count > 1 else None
    _loss(logits, labels, n, total, parts, loss, macros=macros, B=n)
    if parts is not None:
        _add_parts(parts, count, total, loss, macros=macros)
    return loss


def _backward_kernel(xp: Any, logits: Any, labels: Any, total: int, grad: Any) -> Any:
    n, dz = logits.size, xp.empty(logits.shape, np.float32)
    macros = {"VECTOR": vector_width(2, logits, labels, dz)}
    _gradient(logits, labels, grad, total, n, dz, macros=macros, B=n)
    return dz


class _BCEWithLogits(Function):
    def forward(self, logits, labels, total):
        self.xp = xp = arrays.namespace("bce_with_logits", logits, labels)
        self.total = max(1, total)
        if xp is not np:
            logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
        self.logits, self.labels = logits, labels
        if xp is not np:
            return _forward_kernels(xp, logits, labels, self.total)
        return np.asarray(bce_terms(logits, labels).sum() / self.total, logits.dtype)

    def backward(self, grad):
        if self.xp is not np:
            return _backward_kernel(self.xp, self.logits, self.labels, self.total, grad), None
        probability = sigmoid(self.logits.astype(np.float64))
        dz = (probability - self.labels) * (float(grad) / self.total)
        return dz.astype(self.logits.dtype), None


def bce_with_logits(logits: Any, labels: Any, *, total: int | None = None) -> Any:
    """Return the mean binary cross-entropy of logits against labels.

    Parameters
    ----------
    logits : (B, 1) or (B,) array or Tensor of float32, or on the CPU of float64
    labels : array or Tensor of the same shape and dtype
        In [0, 1]; they get no gradient.
    total : int, optional
        Number of samples to divide by, B by default.

    Returns
    -------
    () array or Tensor
        0 for an empty batch.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> bce_with_logits(np.array([[0.0]]), np.array([[1.0]])).round(6)
    np.float64(0.693147)
    """
    raw, labels = (x.data if isinstance(x, Tensor) else x for x in (logits, labels))
    xp = arrays.namespace("bce_with_logits", raw, labels)
    errors.dtype("bce_with_logits", "logits", raw, np.float32, *([np.float64] if xp is np else []))
    errors.dtype("bce_with_logits", "labels", labels, raw.dtype)
    shape = "B" if raw.ndim == 1 else "B 1"
    (batch,) = errors.axes("bce_with_logits", logits=(raw, shape), labels=(labels, shape))
    return _BCEWithLogits.apply(logits, labels, total=batch if total is None else total)
