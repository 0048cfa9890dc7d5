"""The scale of the loss that keeps gradients of float16 from vanishing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.ops.loss_scaling import LARGEST, LossScaling

__all__ = ["GradientScaler"]


class GradientScaler:
    """Dynamic loss scaling, for models of ``amp = "float16"`` (Micikevicius et al. 2018).

    The loss's gradient is the scale instead of 1, so that gradients are larger by it on their way
    back; the optimizer divides them by it again, before it clips them. A step whose gradients
    overflow is skipped and lowers the scale; steps that don't raise it.

    Parameters
    ----------
    initial : float
        First scale, in [1, 2^24], where the scale stays.
    growth, backoff : float
        Factors that raise and lower it. Powers of two change no bit of a gradient.
    interval : int
        Steps in a row without an overflow after which it grows.

    Raises
    ------
    ValueError, TypeError
        A number out of bounds, or none; or a second optimizer is given the scaler.

    Notes
    -----
    The state lies on the optimizer's device, where the host doesn't wait for it.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> from cupyrec.optim import SGD
    >>> w = Tensor([1.0], requires_grad=True)
    >>> optimizer = SGD([w], lr=0.5, scaler=GradientScaler(initial=1024))
    >>> loss = (w * 0.5).sum()
    >>> loss.backward(optimizer.loss_gradient(loss))
    >>> w.grad
    array([512.], dtype=float32)
    >>> optimizer.step(loss)
    >>> w.data
    array([0.75], dtype=float32)
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        for name, value in [("initial", initial), ("growth", growth), ("backoff", backoff)]:
            errors.number("GradientScaler", name, value)
        if not 1 <= initial <= LARGEST:
            raise ValueError(f"GradientScaler: 'initial' must lie in [1, 2^24], got {initial}.")
        if not 1 < growth <= LARGEST:
            raise ValueError(f"GradientScaler: 'growth' must lie in (1, 2^24], got {growth}.")
        if not 0 < backoff < 1:
            raise ValueError(f"GradientScaler: 'backoff' must lie in (0, 1), got {backoff}.")
        errors.positive("GradientScaler", "interval", interval)
        self.initial, self.growth, self.backoff = float(initial), float(growth), float(backoff)
        self.interval, self.scaling = int(interval), None

    def attach(self, xp: ModuleType, betas: tuple[float, float]) -> None:
        """Begin on an optimizer's device; `betas` are what it corrects for the steps taken by.

        Examples
        --------
        >>> scaler = GradientScaler(initial=8)
        >>> scaler.attach(np, betas=(0.9, 0.999))
        >>> scaler.loss_scale
        8.0
        """
        if self.scaling is not None:
            raise ValueError("GradientScaler: must belong to one optimizer, got a second one.")
        self.scaling = LossScaling(
            xp.zeros(6, np.float64), xp.zeros(3, np.float32),
            self.growth, self.backoff, self.interval, *betas,
        )  # fmt: skip
        self.restart(0)

    def restart(self, steps: int) -> None:
        """Set the scale to its first value, after so many steps, none of them skipped.

        Examples
        --------
        >>> scaler = GradientScaler(initial=8)
        >>> scaler.attach(np, betas=(0.5, 0.25))
        >>> scaler.restart(2)
        >>> scaler.state_dict()["powers"]
        [0.25, 0.0625]
        """
        betas = self.scaling.beta1, self.scaling.beta2
        self._set(self.initial, 0, 0, [beta**steps for beta in betas])

    @property
    def factor(self) -> Any:
        """The scale, a (1,) array of float32 of the optimizer's device."""
        return self.scaling.factors[:1]

    @property
    def corrections(self) -> Any:
        """Adam's, for the steps that were not skipped: a (2,) array of float32."""
        return self.scaling.factors[1:]

    @property
    def loss_scale(self) -> float:
        """The scale; a device is waited for."""
        return self._numbers()[0]

    @property
    def skipped(self) -> int:
        """How many steps were skipped; a device is waited for."""
        return int(self._numbers()[2])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in JSON values, from which `load_state_dict` restores the same bits.

        Examples
        --------
        >>> scaler = GradientScaler()
        >>> scaler.attach(np, betas=(0.9, 0.999))
        >>> scaler.state_dict()
        {'scale': 65536.0, 'good_steps': 0, 'skipped': 0, 'powers': [1.0, 1.0]}
        """
        scale, good, skipped, _, *powers = self._numbers()
        return dict(scale=scale, good_steps=int(good), skipped=int(skipped), powers=powers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `state_dict` returned.

        Examples
        --------
        >>> scaler = GradientScaler()
        >>> scaler.attach(np, betas=(0.9, 0.999))
        >>> scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
        >>> scaler.loss_scale
        4.0
        """
        self._set(state["scale"], state["good_steps"], state["skipped"], state["powers"])

    def _set(self, scale: float, good: int, skipped: int, powers: list[float]) -> None:
        xp = arrays.namespace("GradientScaler", self.scaling.state)
        factors = [scale, 0.0, 0.0]  # corrections come with the next step that is not skipped
        self.scaling.factors[...] = xp.asarray(np.array(factors, np.float32))
        rounded = float(np.float32(scale))
        self.scaling.state[...] = xp.asarray(np.array([rounded, good, skipped, 0, *powers]))

    def _numbers(self) -> list[float]:
        return arrays.to_host(self.scaling.state).tolist()
