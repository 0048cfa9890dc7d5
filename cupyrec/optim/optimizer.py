"""Optimizers of dense parameters and embedding rows: clip by the norm of both, update both."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors, random
from cupyrec.autograd import Tensor
from cupyrec.embedding import Group, StatePart
from cupyrec.ops.adagrad import adagrad_dense, adagrad_rows
from cupyrec.ops.adam import adam_dense, adam_rows
from cupyrec.ops.clip_scale import clip_scale
from cupyrec.ops.embedding_rows import RowMemory
from cupyrec.ops.sgd import sgd_dense, sgd_rows
from cupyrec.ops.sum_squares import sum_squares

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]


_ALIGNED = 64  # floats, 256 bytes: what cublasLt's fastest algorithms ask for


class Optimizer(ABC):
    """Base of the optimizers.

    Dense parameters move into one flat buffer, and their gradients into another, so that one loop
    updates them all; a parameter without a gradient in a step counts as having gradient zero. All
    parameters and groups are on one device, and stay there.

    Parameters
    ----------
    parameters : iterable of Tensor and Group
        As `Module.parameters` yields them; one given twice counts once.
    lr : float
        Learning rate, at least 0.
    schedule : callable, optional
        Step number, from 1, to factor of the learning rate.
    clip_norm : float, optional
        Largest global norm: gradients of dense parameters and rows together are scaled down to it.

    Attributes
    ----------
    t : int
        Number of steps taken.
    """

    #: Names of the state beside each value, and what it starts from.
    state: tuple[str, ...] = ()
    initial: float = 0.0

    def __init__(
        self,
        parameters: Iterable[Tensor | Group],
        lr: float,
        *,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        where = type(self).__name__
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"{where}: 'lr' must be finite and not negative, got {lr}.")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"{where}: 'clip_norm' must be positive, got {clip_norm}.")
        self.lr, self.schedule, self.clip_norm, self.t = float(lr), schedule, clip_norm, 0
        parameters = list({id(p): p for p in parameters}.values())  # each once
        self.groups = [p for p in parameters if isinstance(p, Group)]
        self.parameters = [p for p in parameters if not isinstance(p, Group)]
        if not parameters:
            raise ValueError(f"{where}: 'parameters' must not be empty, got none.")
        for p in self.parameters:
            errors.dtype(where, "parameters", p.data, np.float32)
        xp = self._module()
        for group in self.groups:
            group.set_state(self._row_state(group))
        self._flatten(xp)

    def _module(self) -> ModuleType:
        """The array module of all parameters and groups."""
        where = type(self).__name__
        modules = [arrays.namespace(where, p.data) for p in self.parameters]
        modules += [group.xp for group in self.groups]
        devices = sorted({arrays.name(xp) for xp in modules})
        if len(devices) > 1:
            raise ValueError(
                f"{where}: 'parameters' must be on one device, got {' and '.join(devices)}."
            )
        return modules[0]

    def _row_state(self, group: Group) -> tuple[StatePart, ...]:
        return tuple(StatePart(name, group.store.width, self.initial) for name in self.state)

    @property
    def _xp(self) -> ModuleType:
        return arrays.namespace(type(self).__name__, self._data)

    def _flatten(self, xp: ModuleType) -> None:
        room = [-(-p.size // _ALIGNED) * _ALIGNED for p in self.parameters]
        *self._starts, size = np.cumsum([0, *room]).tolist()
        self._data, self._grad = xp.zeros(size, np.float32), xp.zeros(size, np.float32)
        self._state = {name: xp.full(size, self.initial, np.float32) for name in self.state}
        for p, data, grad in zip(
            self.parameters, self._views(self._data), self._views(self._grad), strict=True
        ):
            data[...] = p.data
            p.data, p.grad_buffer, p.grad = data, grad, None

    def _views(self, flat: Any) -> list[Any]:
        parameters = zip(self._starts, self.parameters, strict=True)
        return [flat[i : i + p.size].reshape(p.shape) for i, p in parameters]

    def _taken(self) -> list[Any]:
        """What a later optimizer, or a move to another device, has taken away."""
        starts = zip(self._starts, self.parameters, strict=True)
        first = _address(self._data)
        # Addresses, since neither identity nor `base` says what a copy of a model shares.
        taken = [p.shape for i, p in starts if p.size and _address(p.data) != first + 4 * i]
        return taken + [
            group for group in self.groups
            if group.xp is not self._xp or group.store.state != self._row_state(group)
        ]  # rows have another layout by now  # fmt: skip

    def state_arrays(self) -> dict[str, list[Any]]:
        """Return state name -> one array a dense parameter, in order; views that may be written.

        They are arrays of the parameters' device.

        Examples
        --------
        >>> Adagrad([Tensor([1.0, 2.0], requires_grad=True)], lr=0.1).state_arrays()
        {'sum': [array([0., 0.], dtype=float32)]}
        """
        return {name: self._views(flat) for name, flat in self._state.items()}

    def current_lr(self) -> float:
        """Return the learning rate of the next step.

        Examples
        --------
        >>> SGD([Tensor([1.0], requires_grad=True)], 0.5, schedule=lambda t: 1 / t).current_lr()
        0.5
        """
        return self.lr * (self.schedule(self.t + 1) if self.schedule else 1.0)

    def zero_grad(self) -> None:
        """Forget all gradients.

        Examples
        --------
        >>> SGD([Tensor([1.0], requires_grad=True)], lr=0.1).zero_grad()
        """
        for p in self.parameters:
            p.grad = None
        for group in self.groups:
            group.zero_grad()

    def step(self, loss: Any = None) -> None:
        """Clip, update everything, clear the gradients.

        Parameters
        ----------
        loss : Tensor or array of one number, optional
            Of the parameters' device. If it is not finite, nothing is updated.

        Raises
        ------
        FloatingPointError
            On the CPU: the loss, or with `clip_norm` the norm, is not finite; nothing was changed.
            On other devices the host doesn't wait to see it: nothing is updated there, but the step
            counts and the gradients are cleared.
        ValueError
            A later optimizer has taken parameters over; nothing was changed.

        Examples
        --------
        >>> w = Tensor([1.0], requires_grad=True)
        >>> optimizer = SGD([w], lr=0.25)
        >>> (w * w).sum().backward()
        >>> optimizer.step()
        >>> w.data
        array([0.5], dtype=float32)
        """
        if taken := self._taken():
            raise ValueError(
                f"{type(self).__name__}.step: its parameters must not belong to a later optimizer "
                f"or have moved to another device, got {taken[0]}."
            )
        for p in self.parameters:
            if p.grad is None:
                p.grad_buffer[...] = 0
            elif p.grad is not p.grad_buffer:  # set by hand
                p.grad_buffer[...] = p.grad
        scale = self._scale(loss.data if isinstance(loss, Tensor) else loss)
        lr = self.current_lr()
        self.t += 1
        random.set_step(self.t)
        self._update_dense(lr, scale)
        for group in self.groups:
            group.update(lambda memory, rows, g: self._update_rows(memory, rows, g, lr, scale))
        self.zero_grad()

    def _scale(self, loss: Any) -> Any:
        """The factor of all gradients; on a device an array, NaN where nothing may be updated."""
        if self.clip_norm is None and loss is None:
            return 1.0
        squares = []
        if self.clip_norm is not None:
            squares = [sum_squares(g.gradients()[1]) for g in self.groups]
            squares.append(sum_squares(self._grad))
        scale = clip_scale(squares, self.clip_norm, loss)
        if self._xp is np and math.isnan(scale):
            norm = math.sqrt(sum(squares))
            what, value = ("gradient norm", norm) if not math.isfinite(norm) else ("loss", loss)
            raise FloatingPointError(
                f"{type(self).__name__}.step: the {what} must be finite, got {value} "
                f"in step {self.t + 1}."
            )
        return scale

    @abstractmethod
    def _update_dense(self, lr: float, scale: Any) -> None: ...

    @abstractmethod
    def _update_rows(self, memory: RowMemory, rows: Any, g: Any, lr: float, scale: Any) -> None: ...


class SGD(Optimizer):
    """Stochastic gradient descent. Parameters: see `Optimizer`.

    Examples
    --------
    >>> SGD([Tensor([1.0], requires_grad=True)], lr=0.1).t
    0
    """

    def _update_dense(self, lr, scale):
        sgd_dense(self._data, self._grad, lr=lr, scale=scale)

    def _update_rows(self, memory, rows, g, lr, scale):
        sgd_rows(memory, rows, g, lr=lr, scale=scale)


class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011). Further parameters: see `Optimizer`.

    Parameters
    ----------
    eps : float
        Added to the root of the sum of squares.
    initial_accumulator : float
        What the sums of squares start from.

    Examples
    --------
    >>> Adagrad([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('sum',)
    """

    state = ("sum",)

    def __init__(
        self,
        parameters: Iterable[Tensor | Group],
        lr: float,
        *,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        if not (math.isfinite(initial_accumulator) and initial_accumulator >= 0):
            raise ValueError(
                "Adagrad: 'initial_accumulator' must be finite and not negative, "
                f"got {initial_accumulator}."
            )
        self.eps, self.initial = _checked_eps("Adagrad", eps), initial_accumulator
        super().__init__(parameters, lr, schedule=schedule, clip_norm=clip_norm)

    def _update_dense(self, lr, scale):
        adagrad_dense(self._data, self._state["sum"], self._grad, lr=lr, eps=self.eps, scale=scale)

    def _update_rows(self, memory, rows, g, lr, scale):
        adagrad_rows(memory, rows, g, lr=lr, eps=self.eps, scale=scale)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); lazy on rows: only those of the batch move.

    Parameters
    ----------
    betas : (float, float)
        Decay of the first and second moment, each in [0, 1).
    eps : float
        Added to the root of the second moment.

    Other parameters: see `Optimizer`.

    Examples
    --------
    >>> Adam([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('m', 'v')
    """

    state = ("m", "v")

    def __init__(
        self,
        parameters: Iterable[Tensor | Group],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Adam: 'betas' must lie in [0, 1), got {betas}.")
        self.betas, self.eps = betas, _checked_eps("Adam", eps)
        super().__init__(parameters, lr, schedule=schedule, clip_norm=clip_norm)

    def _constants(self, lr: float, scale: Any) -> dict[str, Any]:
        beta1, beta2 = self.betas
        return dict(lr=lr, beta1=beta1, beta2=beta2, eps=self.eps, t=self.t, scale=scale)

    def _update_dense(self, lr, scale):
        m, v = self._state["m"], self._state["v"]
        adam_dense(self._data, m, v, self._grad, **self._constants(lr, scale))

    def _update_rows(self, memory, rows, g, lr, scale):
        adam_rows(memory, rows, g, **self._constants(lr, scale))


def _checked_eps(where: str, eps: float) -> float:
    """Without it a gradient that was always zero would give 0/0."""
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"{where}: 'eps' must be finite and positive, got {eps}.")
    return eps


def _address(array: Any) -> int:
    """Of the first element."""
    told = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return told["data"][0]
