"""Checks for those who write an op, a layer or a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec.autograd import Tensor

__all__ = ["gradcheck"]


def gradcheck(
    f: Callable[..., Tensor],
    inputs: Sequence[Any],
    *,
    step: float = 1e-5,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> bool:
    """Compare the gradient of `f` with central differences, along a random direction of each input.

    With random cotangents c and a random direction v of input x, ``sum(grad * v)``, where grad is
    what ``f(x).backward(c)`` leaves in x, must agree with
    ``sum(c * (f(x + step * v) - f(x - step * v))) / (2 * step)``.

    Parameters
    ----------
    f : callable
        Takes Tensors for the float inputs, the rest as it is; returns a Tensor of any shape. Two
        calls with equal inputs must give equal outputs.
    inputs : sequence
        Arrays or Tensors of float64 are checked; all else, ids for example, is passed on. Keep away
        from kinks: where a ReLU has 0 there is no derivative.
    step : float
        Of the differences.
    tolerance : float
        Largest difference of the two sums, relative to the sum of their terms' magnitudes.
    seed : int
        Of cotangents and directions.

    Returns
    -------
    bool
        True.

    Raises
    ------
    TypeError
        A float input or the output is not float64, whose digits the differences need.
    AssertionError
        A gradient is wrong.

    Examples
    --------
    >>> from cupyrec import exp
    >>> gradcheck(lambda x, y: exp(x) * y, [np.zeros((2, 3)), np.ones(3)])
    True
    """
    arrays = [x.data if isinstance(x, Tensor) else x for x in inputs]
    checked = [i for i, x in enumerate(arrays) if getattr(x, "dtype", np.dtype(int)).kind == "f"]
    for i in checked:
        if arrays[i].dtype != np.float64:
            raise TypeError(f"gradcheck: 'inputs[{i}]' must be float64, got {arrays[i].dtype}.")

    def value(i: int, change: np.ndarray) -> np.ndarray:
        """f where input i is changed."""
        moved = [Tensor(x) if j in checked else x for j, x in enumerate(arrays)]
        moved[i] = Tensor(arrays[i] + change)
        return f(*moved).data

    generator = np.random.default_rng(seed)
    tensors = [Tensor(x, True) if i in checked else x for i, x in enumerate(arrays)]
    output = f(*tensors)
    if output.dtype != np.float64:
        raise TypeError(f"gradcheck: the output of 'f' must be float64, got {output.dtype}.")
    cotangent = generator.standard_normal(output.shape)
    output.backward(cotangent)
    for i in checked:
        x, grad = arrays[i], tensors[i].grad
        grad = np.zeros(x.shape) if grad is None else grad
        v = generator.standard_normal(x.shape)
        slope = (value(i, step * v) - value(i, -step * v)) / (2 * step)
        terms, differences = grad * v, cotangent * slope
        noise = np.abs(cotangent * output.data).sum() * np.finfo(np.float64).eps / step
        scale = np.abs(terms).sum() + np.abs(differences).sum()
        expected, got = differences.sum(), terms.sum()
        if not abs(got - expected) <= tolerance * scale + noise:
            raise AssertionError(
                f"gradcheck: the derivative along a direction of 'inputs[{i}]' must be "
                f"{expected:.9g}, got {got:.9g}."
            )
    return True
