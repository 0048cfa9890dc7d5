"""What Adam did in all its steps, as `cupyrec.ops.catch_up_adam` needs it to replay them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["AdamHistory"]


class AdamHistory:
    """Adam's constants and the learning rates of all steps so far: what replays take.

    It lies on the host; a copy follows the rows to their device.

    Parameters
    ----------
    beta1, beta2, eps, weight_decay : float
    rates : iterable of float
        Learning rates of steps 1, 2, …, which give the same bits as when each was appended.

    Attributes
    ----------
    constants : dict of str to float
        As they were given.
    rates : (t,) array of float64

    Raises
    ------
    ValueError
        A learning rate that `append` refuses.

    Examples
    --------
    >>> history = AdamHistory(beta1=0.9, beta2=0.999, eps=1e-8, rates=[0.5])
    >>> history.append(0.25)
    >>> len(history), history.rates
    (2, array([0.5 , 0.25]))
    """

    def __init__(
        self,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float = 0.0,
        rates: Iterable[float] = (),
    ) -> None:
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self._length, self._largest = 0, 0.0
        # By number of the step, from 1; and there is room for more.
        self._rates = np.zeros(1024)
        self._steps = np.zeros((1024, 4), np.float32)  # lr, its and the root's corrections, decay
        self._kept = np.zeros(1024)  # log of what decay has left of a weight since step 0
        self._copy: tuple[str, Any, Any, int] = ("", None, None, 0)  # device, arrays, steps
        self.extend(rates)

    def __len__(self) -> int:
        return self._length

    @property
    def constants(self) -> dict[str, float]:
        names = "beta1", "beta2", "eps", "weight_decay"
        return {name: getattr(self, name) for name in names}

    @property
    def rates(self) -> np.ndarray:
        return self._rates[1 : len(self) + 1].copy()

    def append(self, lr: float) -> None:
        """Add the learning rate of the next step; see `extend`.

        Examples
        --------
        See the class.
        """
        self.extend([lr])

    def extend(self, rates: Iterable[float]) -> None:
        """Add the learning rates of the next steps.

        Raises
        ------
        ValueError
            One is negative or not finite, or would decay weights to 0 or beyond.

        Examples
        --------
        >>> history = AdamHistory(beta1=0.9, beta2=0.999, eps=1e-8)
        >>> history.extend([0.5, 0.25])
        >>> len(history)
        2
        """
        rates = [float(lr) for lr in rates]
        for lr in rates:
            if not (math.isfinite(lr) and lr >= 0):
                raise ValueError(f"AdamHistory: 'lr' must be finite and not negative, got {lr}.")
            if lr * self.weight_decay >= 1:
                raise ValueError(
                    "AdamHistory: lr * weight_decay must be less than 1, got "
                    f"{lr} * {self.weight_decay}."
                )
        first, stop = len(self) + 1, len(self) + 1 + len(rates)
        while stop > len(self._rates):
            for name in ("_rates", "_steps", "_kept"):
                held = getattr(self, name)
                setattr(self, name, np.concatenate([held, np.zeros_like(held)]))
        steps, kept = [], [float(self._kept[first - 1])]
        for t, lr in enumerate(rates, first):
            decay = lr * self.weight_decay
            steps.append((lr, 1 / (1 - self.beta1**t), (1 - self.beta2**t) ** -0.5, decay))
            kept.append(kept[-1] + math.log1p(-decay))
        self._rates[first:stop], self._kept[first - 1 : stop] = rates, kept
        self._steps[first:stop] = np.reshape(steps, (-1, 4))
        self._length, self._largest = stop - 1, max([self._largest, *rates])

    def for_loops(self) -> tuple:
        """Return what CPU loops take."""
        constants = self.beta1, self.beta2, np.float32(self.eps), *self._bound()
        return self._steps, self._kept, len(self), *constants

    def for_kernels(self, xp: ModuleType) -> tuple:
        """Return what kernels take; without decay None in place of what it has left."""
        steps, kept = self._on(xp)
        betas = *_in_two(self.beta1), *_in_two(math.sqrt(self.beta2))
        constants = *betas, self.eps, *self._bound()
        return steps, kept if self.weight_decay else None, len(self), *constants

    def _on(self, xp: ModuleType) -> tuple[Any, Any]:
        """Steps and decay as arrays of a device; the copy there gets what it lacks."""
        device, steps, kept, known = self._copy
        if device != arrays.name(xp) or len(steps) < len(self._steps):
            steps, kept = xp.asarray(self._steps), xp.asarray(self._kept)
        elif known < len(self):
            new = slice(known + 1, len(self) + 1)
            steps[new], kept[new] = xp.asarray(self._steps[new]), xp.asarray(self._kept[new])
        self._copy = arrays.name(xp), steps, kept, len(self)
        return steps, kept

    def _bound(self) -> tuple[float, float]:
        """What bounds the movement to come, in half ulps; and 1 where sqrt(v) takes part in it."""
        rho = self.beta1 / math.sqrt(self.beta2) if self.beta2 else math.inf
        ratio = rho if rho < 1 else self.beta1
        return self._largest * ratio / (1 - ratio) * 2.0**25, float(rho < 1)


def _in_two(x: float) -> tuple[float, float]:
    """Two float32 whose sum is x: powers of one alone would drift away."""
    first = np.float32(x)
    return first, np.float32(x - float(first))
