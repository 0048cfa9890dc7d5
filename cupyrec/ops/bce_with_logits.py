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

__all__ = ["bce_with_logits"]


class _BCEWithLogits(Function):
    def forward(self, logits, labels, total):
        self.logits, self.labels, self.total = logits, labels, max(1, total)
        z = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):  # NaN is passed on, for the caller to see
            terms = np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))
        return np.asarray(terms.sum() / self.total, logits.dtype)

    def backward(self, grad):
        z = self.logits.astype(np.float64)
        e = np.exp(-np.abs(z))
        probability = np.where(z >= 0, 1, e) / (1 + e)
        dz = (probability - self.labels) * (float(grad) / self.total)
        return dz.astype(self.logits.dtype), None


def bce_with_logits(logits: Any, labels: Any, *, total: int | None = None) -> Any:
    """Return the mean binary cross-entropy of logits against labels.

    Parameters
    ----------
    logits : (B, 1) array or Tensor of float32 or float64
    labels : (B, 1) array of the same dtype
        In [0, 1].
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
    raw = logits.data if isinstance(logits, Tensor) else logits
    arrays.namespace("bce_with_logits", raw, labels)
    errors.dtype("bce_with_logits", "logits", raw, np.float32, np.float64)
    errors.dtype("bce_with_logits", "labels", labels, raw.dtype)
    (batch,) = errors.axes("bce_with_logits", logits=(raw, "B 1"), labels=(labels, "B 1"))
    return _BCEWithLogits.apply(logits, labels, total=batch if total is None else total)
