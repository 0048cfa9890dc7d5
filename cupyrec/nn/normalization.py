"""Layers that bring activations to mean 0 and variance 1, then to a learnt mean and scale."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.nn.module import Buffer, Module, Parameter
from cupyrec.ops.batch_norm import batch_norm
from cupyrec.ops.layer_norm import layer_norm
from cupyrec.parallel import Communicator, world

__all__ = ["BatchNorm1d", "LayerNorm"]


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


class BatchNorm1d(Module):
    """Normalization of each column over the batch. x (B, features) -> (B, features).

    Training takes the mean and variance of the batch, which must have 2 rows or more, and moves the
    running ones; evaluation takes these. An empty batch changes nothing, nor does a column whose
    mean or variance isn't finite change its own: such a step is left out, and training goes on.

    Of several ranks the batch is that of all: in training all ranks make forward and backward
    passes together, with whatever rows each has, and there is no CUDA graph of them.

    Parameters
    ----------
    features : int
    eps : float
        Added to the variance.
    momentum : float
        How far the running statistics move to those of a batch, from 0 to 1.
    ranks : Communicator, optional
        Whose rows are the batch; by default all that the launcher started.

    Raises
    ------
    ValueError, TypeError
        `features` is not a positive integer, `eps` below 0, or `momentum` not in [0, 1].

    Notes
    -----
    Ioffe and Szegedy 2015, "Batch Normalization". `weight` and `running_var` start as 1, `bias` and
    `running_mean` as 0; the running variance is the unbiased one.

    Examples
    --------
    >>> layer, x = BatchNorm1d(1, eps=0), np.array([[10.0], [30.0]], np.float32)
    >>> layer(x).numpy()
    array([[-1.],
           [ 1.]], dtype=float32)
    >>> layer.running_mean, layer.running_var
    (Buffer([2.], dtype=float32), Buffer([20.9], dtype=float32))
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        ranks: Communicator | None = None,
    ) -> None:
        features = errors.positive("BatchNorm1d", "features", features)
        self.eps = errors.at_least_0("BatchNorm1d", "eps", eps)
        self.momentum = errors.at_least_0("BatchNorm1d", "momentum", momentum)
        if self.momentum > 1:
            raise ValueError(f"BatchNorm1d: 'momentum' must lie in [0, 1], got {momentum}.")
        self.weight = Parameter(np.ones(features, np.float32))
        self.bias = Parameter(np.zeros(features, np.float32))
        self.running_mean = Buffer(np.zeros(features, np.float32))
        self.running_var = Buffer(np.ones(features, np.float32))

        self._ranks = ranks

    @property
    def ranks(self) -> Communicator:
        """The ranks whose rows are the batch."""
        return world() if self._ranks is None else self._ranks

    def forward(self, x: Any) -> Any:
        gather = None
        if self.training and self.ranks.size > 1:
            if arrays.is_capturing(arrays.namespace("BatchNorm1d", self.weight.data)):
                raise RuntimeError("BatchNorm1d asks other ranks for their statistics.")
            gather = functools.partial(self.ranks.all_gather, "batch statistics")
        return batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var,
            training=self.training, momentum=self.momentum, eps=self.eps, gather=gather,
        )  # fmt: skip
