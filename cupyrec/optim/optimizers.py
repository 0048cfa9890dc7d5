"""The optimizers: which op updates dense parameters and rows, and with what constants."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cupyrec import errors
from cupyrec.embedding import StatePart
from cupyrec.ops.adagrad import adagrad_dense, adagrad_rows
from cupyrec.ops.adam import adam_dense, adam_rows
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.catch_up_adam import catch_up_adam_rows
from cupyrec.ops.embedding_rows import Rounding, RowMemory
from cupyrec.ops.ftrl import ftrl_dense, ftrl_rows
from cupyrec.ops.momentum import momentum_dense, momentum_rows
from cupyrec.ops.rowwise_adagrad import rowwise_adagrad_rows
from cupyrec.ops.sgd import sgd_dense, sgd_rows
from cupyrec.optim.optimizer import Optimizer

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "AdamW", "CatchUpAdam", "RowWiseAdagrad"]


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for. Other parameters: see `Optimizer`.

    Parameters
    ----------
    momentum : float
        In [0, 1); with it, rows and parameters keep a mean of gradients.
    nesterov : bool
        Nesterov's form of it, as in Sutskever et al. 2013.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> SGD([Tensor([1.0], requires_grad=True)], lr=0.1, momentum=0.9).state
    ('momentum',)
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        self.momentum = errors.rate("SGD", "momentum", momentum)
        if nesterov and not momentum:
            raise ValueError("SGD: 'nesterov' must come with 'momentum', got 0.")
        self.nesterov = nesterov
        self.state = ("momentum",) if momentum else ()
        super().__init__(parameters, lr, **options)

    def _update_dense(self, w, state, g, **rates):
        if self.momentum:
            own = dict(momentum=self.momentum, nesterov=self.nesterov)
            momentum_dense(w, state["momentum"], g, **own, **rates)
        else:
            sgd_dense(w, g, **rates)

    def _update_rows(self, memory, rows, g, **rates):
        if self.momentum:
            own = dict(momentum=self.momentum, nesterov=self.nesterov)
            momentum_rows(memory, rows, g, **own, **rates)
        else:
            sgd_rows(memory, rows, g, **rates)


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
    >>> from cupyrec import Tensor
    >>> Adagrad([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('sum',)
    """

    state = ("sum",)

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        self.eps = _checked_eps(where, eps)
        self.initial_accumulator = _checked_accumulator(where, initial_accumulator)
        super().__init__(parameters, lr, **options)

    def _initial(self, name):
        return self.initial_accumulator

    def _update_dense(self, w, state, g, **rates):
        adagrad_dense(w, state["sum"], g, eps=self.eps, **rates)

    def _update_rows(self, memory, rows, g, **rates):
        adagrad_rows(memory, rows, g, eps=self.eps, **rates)


class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum a row, of the mean of its squared gradients (FBGEMM's; Mudigere 2021).

    Dense parameters get Adagrad. Parameters: see `Adagrad`.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> RowWiseAdagrad([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('sum',)
    """

    def _row_state(self, width):
        return (StatePart("sum", 1, self.initial_accumulator),)

    def _update_rows(self, memory, rows, g, **rates):
        rowwise_adagrad_rows(memory, rows, g, eps=self.eps, **rates)


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
    >>> from cupyrec import Tensor
    >>> Adam([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('m', 'v')
    """

    state = ("m", "v")

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if not isinstance(betas, (tuple, list)):
            raise TypeError(f"{where}: 'betas' must be two numbers, got {betas!r}.")
        if len(betas) != 2 or not all(0 <= errors.number(where, "betas", b) < 1 for b in betas):
            raise ValueError(f"{where}: 'betas' must be two numbers in [0, 1), got {betas}.")
        self.betas, self.eps = tuple(map(float, betas)), _checked_eps(where, eps)
        super().__init__(parameters, lr, **options)

    def _constants(self) -> dict[str, Any]:
        corrections = self.scaler and self.scaler.corrections
        own = dict(beta1=self.betas[0], beta2=self.betas[1], eps=self.eps, t=self.t)
        return dict(own, corrections=corrections)

    def _update_dense(self, w, state, g, **rates):
        adam_dense(w, state["m"], state["v"], g, **self._constants(), **rates)

    def _update_rows(self, memory, rows, g, **rates):
        adam_rows(memory, rows, g, **self._constants(), **rates)


class AdamW(Adam):
    """Adam with decoupled weight decay, .01 by default (Loshchilov and Hutter 2019).

    Parameters: see `Adam`.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> AdamW([Tensor([1.0], requires_grad=True)]).parameter_groups[0].weight_decay
    0.01
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(parameters, lr, weight_decay=weight_decay, **options)


class CatchUpAdam(Adam):
    """Adam whose rows end up as in a dense table, though each step touches those of its batch only.

    When a row is read, it first makes up for the steps that it was not in: in training in place, in
    evaluation and export in the value read. Parameters: see `Adam`. `weight_decay` is decoupled;
    it, `betas` and `eps` must stay as they are, since rows replay former steps by them.

    Notes
    -----
    OneFlow's ``SmartDecayAdam``, exact instead of approximated. For rows, a step that was skipped
    because a gradient was not finite counts as one without gradients.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> CatchUpAdam([Tensor([1.0], requires_grad=True)], lr=0.1).state
    ('m', 'v')
    """

    def _row_state(self, width):
        return (*super()._row_state(width), StatePart("last", 1, 0, np.int32))

    def _prepare(self, group, share):
        group.set_state(self._row_state(group.width), AdamHistory(**self._replayed(share)))

    def _replayed(self, share) -> dict[str, float]:
        """What rows make up for steps by, besides their learning rates."""
        beta1, beta2 = self.betas
        return dict(beta1=beta1, beta2=beta2, eps=self.eps, weight_decay=share.weight_decay)

    def _rates(self, share):
        replayed = self._replayed(share)
        for group in share.tables:
            if group.history.constants != replayed:
                raise ValueError(
                    "CatchUpAdam.step: tables must keep the constants that former steps are "
                    f"replayed by, {group.history.constants}, got {replayed}."
                )
        return super()._rates(share)

    def _update_group(self, group, gradients, *, lr, scale, weight_decay):
        group.history.append(lr)

        def rule(memory: RowMemory, rows: Any, g: Any, rounding: Rounding | None) -> None:
            catch_up_adam_rows(memory, rows, g, group.history, scale=scale, rounding=rounding)

        group.update(gradients, self.t, rule)


class FTRL(Optimizer):
    """Follow the regularized leader (McMahan et al. 2013). Other parameters: see `Optimizer`.

    An initial weight is the first proximal centre: both penalties pull at it from its first update.

    Parameters
    ----------
    lambda1, lambda2 : float
        L1, which makes weights zero, and L2.
    beta : float
        Added to the root of the sum of squares.
    initial_accumulator : float
        What the sums of squares start from.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> FTRL([Tensor([1.0], requires_grad=True)], lr=0.1, lambda1=0.01).state
    ('n', 'z')
    """

    state = ("n", "z")

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
        initial_accumulator: float = 0.1,
        **options: Any,
    ) -> None:
        self.constants = dict(lambda1=lambda1, lambda2=lambda2, beta=beta)
        for name, value in self.constants.items():
            if not 0 <= errors.number("FTRL", name, value) < math.inf:
                raise ValueError(f"FTRL: '{name}' must be finite and not negative, got {value}.")
        self.initial_accumulator = _checked_accumulator("FTRL", initial_accumulator)
        self.constants = {name: float(value) for name, value in self.constants.items()}
        if not (beta or initial_accumulator):
            raise ValueError("FTRL: 'beta' or 'initial_accumulator' must be positive, got 0 and 0.")
        super().__init__(parameters, lr, **options)

    def _initial(self, name):
        return self.initial_accumulator if name == "n" else 0.0

    def _update_dense(self, w, state, g, **rates):
        ftrl_dense(w, state["n"], state["z"], g, **self.constants, **rates)

    def _update_rows(self, memory, rows, g, **rates):
        ftrl_rows(memory, rows, g, **self.constants, **rates)


def _checked_eps(where: str, eps: float) -> float:
    """Without it a gradient that was always zero would give 0/0."""
    if not 0 < errors.number(where, "eps", eps) < math.inf:
        raise ValueError(f"{where}: 'eps' must be finite and positive, got {eps}.")
    return float(eps)


def _checked_accumulator(where: str, value: float) -> float:
    if not 0 <= errors.number(where, "initial_accumulator", value) < math.inf:
        raise ValueError(
            f"{where}: 'initial_accumulator' must be finite and not negative, got {value}."
        )
    return float(value)
