"""A multi-layer perceptron whose bias, ReLU, dropout and gradients are fused with its matmuls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, errors, random
from cupyrec.autograd import Tensor
from cupyrec.nn.module import Module, Parameter
from cupyrec.nn.normalization import BatchNorm1d
from cupyrec.ops.cast import cast_matrices
from cupyrec.ops.fused_mlp import fused_mlp
from cupyrec.ops.relu_dropout import Dropout, relu_dropout

__all__ = ["FusedMLP", "cast_together"]


class FusedMLP(Module):
    """Linear layers, each followed by ReLU and dropout. x (B, in_features) -> (B, out_features).

    With `batch_norm` layers are normalized over the batch before their ReLU, a linear last one not.

    Parameters
    ----------
    in_features : int
    hidden_features : sequence of int
        May be empty.
    out_features : int
    hidden_dropout_rate : float or sequence of float, optional
        One for all hidden layers or one each.
    out_dropout_rate : float
    skip_final_activation : bool
        Whether the last layer is linear; it then has no dropout.
    tf32 : bool
        Whether a GPU may round what it multiplies to TF32, 10 bits of the fraction.
    batch_norm : bool
        Whether there is a `BatchNorm1d` before each ReLU. Training batches must then have 2 rows or
        more, and of several ranks there is no CUDA graph of the model.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, a rate not in [0, 1), or their number is wrong.

    Notes
    -----
    OneFlow's ``nn.FusedMLP``; weights and biases start uniform in +-1/sqrt(fan-in). The dropout
    mask is a function of the training step: two passes before an `Optimizer.step` get the same.

    Examples
    --------
    >>> mlp = FusedMLP(13, [512, 256], 128)
    >>> mlp(np.zeros((2, 13), np.float32)).shape
    (2, 128)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        out_features: int,
        hidden_dropout_rate: float | Sequence[float] | None = None,
        out_dropout_rate: float = 0.0,
        skip_final_activation: bool = False,
        tf32: bool = False,
        batch_norm: bool = False,
    ) -> None:
        sizes = [
            errors.positive("FusedMLP", "in_features", in_features),
            *(errors.positive("FusedMLP", "hidden_features", n) for n in hidden_features),
            errors.positive("FusedMLP", "out_features", out_features),
        ]
        hidden = len(sizes) - 2
        rates = hidden_dropout_rate if hidden_dropout_rate is not None else 0.0
        rates = list(rates) if isinstance(rates, Sequence) else [rates] * hidden
        if len(rates) != hidden:
            raise ValueError(
                f"FusedMLP: 'hidden_dropout_rate' must be one a hidden layer ({hidden}), "
                f"got {len(rates)}."
            )
        self.dropout_rates = [errors.rate("FusedMLP", "hidden_dropout_rate", r) for r in rates]
        self.dropout_rates.append(errors.rate("FusedMLP", "out_dropout_rate", out_dropout_rate))
        self.skip_final_activation, self.tf32 = skip_final_activation, tf32
        generator = random.generator()
        self.dropout_seed = int(generator.integers(2**63))
        self.weights, self.biases = [], []
        for n, m in zip(sizes[:-1], sizes[1:], strict=True):
            bound = 1 / math.sqrt(n)
            for array, shape in ((self.weights, (m, n)), (self.biases, (m,))):
                values = generator.uniform(-bound, bound, shape)
                array.append(Parameter(values.astype(np.float32)))
        normalized = sizes[1 : len(sizes) - skip_final_activation] if batch_norm else []
        self.norms = [BatchNorm1d(m) for m in normalized]

    def dropouts(self) -> list[Dropout]:
        """Return the dropout of each layer in this step; none outside training.

        Examples
        --------
        >>> [dropout.rate for dropout in FusedMLP(3, [4], 1, hidden_dropout_rate=0.5).dropouts()]
        [0.5, 0.0]
        """
        rates = self.dropout_rates if self.training else [0.0] * len(self.weights)
        step = random.step() if any(rates) else 0
        counter = self.dropout_seed, step
        return [
            Dropout(rate, *counter, layer, random.first_sample())
            for layer, rate in enumerate(rates)
        ]

    def forward(self, x: Any, halves: Sequence[Any] | None = None) -> Any:
        return self._from(0, x, halves)

    def after_first(self, y: Any) -> Any:
        """Return the output, given that of the first layer, (B, N).

        Examples
        --------
        >>> mlp = FusedMLP(3, [4], 1, skip_final_activation=True)
        >>> mlp.after_first(np.zeros((1, 4), np.float32)).data == mlp.biases[1].data
        array([[ True]])
        """
        return y if len(self.weights) == 1 else self._from(1, y)

    def _from(self, first: int, x: Any, halves: Sequence[Any] | None = None) -> Any:
        """The output, given the input of a layer."""
        weights, biases, dropouts = self.weights[first:], self.biases[first:], self.dropouts()
        if not self.norms:
            return fused_mlp(
                x, weights, biases,
                dropouts=dropouts[first:], linear_output=self.skip_final_activation,
                tf32=self.tf32, amp=self.amp, halves=halves,
            )  # fmt: skip
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = fused_mlp(  # of float32, as what is normalized
                x, [weight], [bias], linear_output=True, tf32=self.tf32, amp=self.amp,
                halves=halves and halves[2 * i : 2 * i + 2],
            )  # fmt: skip
            if first + i < len(self.norms):
                x = self.norms[first + i](x)
                none = arrays.namespace("FusedMLP", x.data).zeros(x.shape[1], x.dtype)
                x, _ = relu_dropout(x, none, dropouts[first + i])
        return x


def cast_together(x: Any, mlps: Sequence[FusedMLP]) -> tuple[Any, list[Any]]:
    """Cast what perceptrons of one `amp` multiply, on a device in one launch.

    Parameters
    ----------
    x : (B, N) array or Tensor, or None
        Input of the first of them.
    mlps : sequence of FusedMLP

    Returns
    -------
    x : (B, 8 * ceil(N / 8)) array of 16 bits
        Itself where it is a Tensor or of another N than the first takes, or where there is nothing
        to cast.
    halves : list
        What each of `mlps` takes after its input.

    Examples
    --------
    >>> mlp = FusedMLP(3, [4], 1)
    >>> x, (halves,) = cast_together(np.ones((2, 3), np.float32), [mlp])
    >>> mlp(x, halves).shape
    (2, 1)
    """
    held = [[p.data for pair in zip(m.weights, m.biases, strict=True) for p in pair] for m in mlps]
    xp, (amp, *others) = arrays.namespace("cast_together", *held[0]), {m.amp for m in mlps}
    if amp is None or others or xp is np:
        return x, [None] * len(mlps)
    flat = [xp.ascontiguousarray(array) for own in held for array in own]
    plain = x is not None and not isinstance(x, Tensor) and x.dtype == np.float32
    plain = plain and x.shape[1:] == held[0][0].shape[1:]
    made = iter(cast_matrices(flat, amp, xp.ascontiguousarray(x) if plain else None))
    halves = [[next(made) for _ in own] for own in held]
    return next(made, x), halves
