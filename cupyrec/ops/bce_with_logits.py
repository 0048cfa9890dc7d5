"""Binary cross-entropy of logits. B samples, T tasks.

    loss = 1/total * sum over b and t of  w * (max(z, 0) - z * y + log(1 + exp(-|z|)))
    dz   = w * (sigmoid(z) - y) / total * gradient_scale

Without weights w is 1, and nothing is read for it. `total` is the size of the *global* batch, so
that ranks' losses and gradients are summed. On a device one kernel writes the loss and, for it has
all at hand, dz; backward multiplies dz by the incoming gradient, if that isn't 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.autograd import Function, Tensor, unit_gradient
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.elementwise import sigmoid
from cupyrec.scratch import counters

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


_LOSSES = 256  # a block
_kernel = Kernel(
    "bce_with_logits.cu", "bce_with_logits",
    "const float* z, const float* y, const float* w, int64_t n, double total, double* parts,"
    " uint32_t* counter, float* loss, float* dz, const float* scale",
    lambda N: Geometry(blocks(N, _LOSSES), 128), optional="w parts counter dz scale",
)  # fmt: skip


def _device(
    xp: Any, logits: Any, labels: Any, weights: Any, total: int, scale: Any, wanted: bool
) -> tuple[Any, Any]:
    """The loss and, where it is wanted, its gradient."""
    n = logits.size
    loss = xp.empty((), np.float32) if n else xp.zeros((), np.float32)
    dz = xp.empty(logits.shape, np.float32) if wanted else None
    count = _kernel.geometry(N=n).grid
    parts = counter = None
    if count > 1:
        parts, counter = xp.empty(count, np.float64), counters(xp, 1)
    others = [array for array in (weights, dz) if array is not None]
    macros = {"VECTOR": vector_width(2, logits, labels, *others)}
    _kernel(logits, labels, weights, n, total, parts, counter, loss, dz, scale, macros=macros, N=n)
    return loss, dz


class _BCEWithLogits(Function):
    def forward(self, logits, labels, weights, total, scale):
        self.xp = xp = arrays.namespace("bce_with_logits", logits, labels)
        self.total = max(1, total)
        if xp is not np:
            inputs = [
                x if x is None else xp.ascontiguousarray(x) for x in (logits, labels, weights)
            ]
            loss, self.dz = _device(xp, *inputs, self.total, scale, any(self.needs))
            return loss
        self.logits, self.labels, self.weights = logits, labels, weights
        self.scale = 1.0 if scale is None else float(scale.item())
        terms = bce_terms(logits, labels)
        if weights is not None:
            terms *= weights
        return np.asarray(terms.sum() / self.total, logits.dtype)

    def backward(self, grad):
        if self.xp is not np:
            return (self.dz if grad is unit_gradient(grad) else self.dz * grad), None
        probability = sigmoid(self.logits.astype(np.float64))
        dz = (probability - self.labels) * (float(grad) * self.scale / self.total)
        if self.weights is not None:
            dz *= self.weights
        return dz.astype(self.logits.dtype), None


def bce_with_logits(
    logits: Any,
    labels: Any,
    weights: Any = None,
    *,
    total: int | None = None,
    gradient_scale: Any = None,
) -> Any:
    """Return the binary cross-entropy of logits against labels: of all tasks, a mean over samples.

    Parameters
    ----------
    logits : (B, T) or (B,) array or Tensor of float32, or on the CPU of float64
    labels : array or Tensor of the same shape and dtype
        In [0, 1]; they get no gradient.
    weights : array or Tensor of the same shape and dtype, optional
        Factor of each loss, 1 by default; see `Batch.weighted`. The mean is not divided by them.
        They get no gradient, and none may be negative, which readers see to.
    total : int, optional
        Number of samples to divide by, B by default.
    gradient_scale : (1,) array of float32, optional
        Factor of the gradient, but not of the loss: `GradientScaler.factor`, at no further launch.

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
    >>> two, labels = np.zeros((1, 2)), np.ones((1, 2))
    >>> bce_with_logits(two, labels, weights=np.array([[1.0, 0.5]])).round(6)
    np.float64(1.039721)
    """
    raw, labels, weights = (
        x.data if isinstance(x, Tensor) else x for x in (logits, labels, weights)
    )
    told = {"logits": raw, "labels": labels}
    if weights is not None:
        told["weights"] = weights
    xp = arrays.namespace("bce_with_logits", *told.values())
    errors.dtype("bce_with_logits", "logits", raw, np.float32, *([np.float64] if xp is np else []))
    for name, array in told.items():
        errors.dtype("bce_with_logits", name, array, raw.dtype)
    shape = "B" if raw.ndim == 1 else "B T"
    batch, *_ = errors.axes("bce_with_logits", **{name: (x, shape) for name, x in told.items()})
    if gradient_scale is not None:
        arrays.namespace("bce_with_logits", raw, gradient_scale)
        errors.dtype("bce_with_logits", "gradient_scale", gradient_scale, np.float32)
        errors.axes("bce_with_logits", gradient_scale=(gradient_scale, "1"))
    total = batch if total is None else total
    return _BCEWithLogits.apply(logits, labels, weights=weights, total=total, scale=gradient_scale)
