"""Layers that bring activations to mean 0 and variance 1, then to a learnt mean and scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import errors
from cupyrec.nn.module import Module, Parameter
from cupyrec.ops.layer_norm import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(Module):
    """Normalization of each row by its own mean and variance. x (..., features), as the output.

    Parameters
    ----------
    features : int
    eps : float
        Added to the variance.

    Raises
    ------
    ValueError, TypeError
        `features` is not a positive integer, or `eps` below 0.

    Notes
    -----
    Ba, Kiros and Hinton 2016, "Layer Normalization". `weight` starts as 1, `bias` as 0.

    Examples
    --------
    >>> LayerNorm(2, eps=0)(np.array([[1.0, 5.0], [20.0, 10.0]], np.float32)).numpy()
    array([[-1.,  1.],
           [ 1., -1.]], dtype=float32)
    """

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        features = errors.positive("LayerNorm", "features", features)
        self.eps = errors.at_least_0("LayerNorm", "eps", eps)
        self.weight = Parameter(np.ones(features, np.float32))
        self.bias = Parameter(np.zeros(features, np.float32))

    def forward(self, x: Any) -> Any:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)
