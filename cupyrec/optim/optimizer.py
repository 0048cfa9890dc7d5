"""What all optimizers do: clip by the norm of dense parameters and rows, update both."""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors, random
from cupyrec.autograd import Tensor
from cupyrec.embedding import Group, RowGradients, StatePart
from cupyrec.ops.clip_scale import clip_scale, sum_squares
from cupyrec.ops.embedding_rows import Rounding, RowMemory
from cupyrec.ops.row_memory import check_learns
from cupyrec.optim.agreement import check_ranks
from cupyrec.optim.gradient_scaler import GradientScaler
from cupyrec.optim.parameter_group import ParameterGroup
from cupyrec.parallel import Communicator, all_reduce, world

__all__ = ["Optimizer"]

logger = logging.getLogger("cupyrec")

_LARGEST = float(np.finfo(np.float32).max)
_DECAY = 1 - 2.0**-25  # from here on float32 has 1


class Optimizer(ABC):
    """Base of the optimizers.

    Dense parameters move into one flat buffer a parameter group, and their gradients into another,
    so that one loop updates them all; a parameter without a gradient in a step counts as having
    gradient zero. All parameters and tables are on one device, and stay there.

    Parameters
    ----------
    parameters : iterable of Tensor and Group, or of dict
        As `Module.parameters` yields them; one given twice counts once. Dicts are parameter groups:
        ``{"params": ..., "lr": ..., "weight_decay": ..., "l2": ...}``, all but the first optional.
    lr : float
        Learning rate, at least 0.
    weight_decay : float
        Decoupled (Loshchilov and Hutter 2019): each step takes lr * weight_decay of a weight. Rows
        of lazy tables decay when they are in the batch.
    l2 : float
        Times the weight, added to its gradient before clipping. Tables need `dense_updates`.
    schedule : callable, optional
        Step number, from 1, to factor of the learning rate.
    clip_norm : float, optional
        Largest global norm: gradients of dense parameters and rows together are scaled down to it.
    scaler : GradientScaler, optional
        Gradients come from a loss that was scaled by it, see `loss_gradient`. A step whose
        gradients are not finite is skipped: Adam's bias corrections don't count it, schedules,
        dropout and stochastic rounding do.
    ranks : Communicator, optional
        Whose gradients are summed, of dense parameters here and of rows by their owners; by default
        those that the tables lie on, or all that the launcher started.

    Attributes
    ----------
    t : int
        Number of steps taken, skipped ones included.
    parameter_groups : list of ParameterGroup
    """

    #: Names of the state beside each value.
    state: tuple[str, ...] = ()
    #: Of whose powers bias corrections are made.
    betas: tuple[float, float] = (0.0, 0.0)

    def __init__(
        self,
        parameters: Iterable[Tensor | Group] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        l2: float = 0.0,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
        scaler: GradientScaler | None = None,
        ranks: Communicator | None = None,
    ) -> None:
        where = type(self).__name__
        if not 0 <= errors.number(where, "lr", lr) < math.inf:
            raise ValueError(f"{where}: 'lr' must be finite and not negative, got {lr}.")
        if clip_norm is not None and not errors.number(where, "clip_norm", clip_norm) > 0:
            raise ValueError(f"{where}: 'clip_norm' must be positive, got {clip_norm}.")
        if not (schedule is None or callable(schedule)):
            raise TypeError(f"{where}: 'schedule' must be callable or None, got {schedule!r}.")
        if not isinstance(scaler, (GradientScaler, type(None))):
            raise TypeError(f"{where}: 'scaler' must be a GradientScaler or None, got {scaler!r}.")
        self.lr, self.schedule, self.clip_norm, self.t = float(lr), schedule, clip_norm, 0
        self.scaler = scaler
        if not isinstance(parameters, Iterable):
            raise TypeError(
                f"{where}: 'parameters' must be a list such as model.parameters(), "
                f"got {type(parameters).__name__}."
            )
        parameters = list(parameters)
        options = parameters if _are_dicts(where, parameters) else [{"params": parameters}]
        self.parameter_groups = [
            ParameterGroup(where, option, weight_decay=weight_decay, l2=l2) for option in options
        ]
        self._check(where)
        tables = self.groups
        self.ranks = ranks or (tables[0].exchange.ranks if tables else world())
        check_ranks(self)
        xp = self._module()
        if scaler is not None:
            scaler.attach(xp, self.betas)
        shares, sizes = self.parameter_groups, [share.size for share in self.parameter_groups]
        self._gradients = xp.zeros(sum(sizes), np.float32)  # of all, which ranks add up at once
        for share, end in zip(shares, itertools.accumulate(sizes), strict=True):
            own = self._gradients[end - share.size : end]
            share.flatten({name: self._initial(name) for name in self.state}, own)
            for group in share.tables:
                self._prepare(group, share)

    @property
    def parameters(self) -> list[Tensor]:
        """Dense parameters of all parameter groups, in order."""
        return [p for share in self.parameter_groups for p in share.parameters]

    @property
    def groups(self) -> list[Group]:
        """Groups of tables of all parameter groups, in order."""
        return [table for share in self.parameter_groups for table in share.tables]

    def _check(self, where: str) -> None:
        held = [*self.parameters, *self.groups]
        if not held:
            raise ValueError(f"{where}: 'parameters' must not be empty, got none.")
        if len({id(p) for p in held}) < len(held):
            raise ValueError(f"{where}: a parameter must be in one parameter group, got it in two.")
        for group in self.groups:
            check_learns(where, group.store.value)
        for p in self.parameters:
            errors.dtype(where, "parameters", p.data, np.float32)

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

    def _initial(self, name: str) -> float:
        """What a state starts from."""
        return 0.0

    def _prepare(self, group: Group, share: ParameterGroup) -> None:
        """Give the rows of a group their state."""
        group.set_state(self._row_state(group.width))

    def _row_state(self, width: int) -> tuple[StatePart, ...]:
        """What is kept beside a vector of this width."""
        return tuple(StatePart(name, width, self._initial(name)) for name in self.state)

    @property
    def _xp(self) -> ModuleType:
        return arrays.namespace(type(self).__name__, self.parameter_groups[0].data)

    def _taken(self) -> list[str]:
        """What a later optimizer, or a move to another device, has taken away."""
        taken = [told for share in self.parameter_groups for told in share.taken()]
        return taken + [
            repr(group) for group in self.groups
            if group.xp is not self._xp or group.optimizer_state != self._row_state(group.width)
        ]  # rows have another layout by now  # fmt: skip

    def state_arrays(self) -> dict[str, list[Any]]:
        """Return state name -> one array a dense parameter, in order; views that may be written.

        They are arrays of the parameters' device.

        Examples
        --------
        >>> from cupyrec.optim import Adagrad
        >>> Adagrad([Tensor([1.0, 2.0], requires_grad=True)], lr=0.1).state_arrays()
        {'sum': [array([0., 0.], dtype=float32)]}
        """
        return {
            name: [
                view for share in self.parameter_groups for view in share.views(share.state[name])
            ]
            for name in self.state
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what state there is besides arrays, in JSON values.

        Examples
        --------
        >>> from cupyrec.optim import SGD
        >>> SGD([Tensor([1.0], requires_grad=True)], lr=0.1).state_dict()
        {'class': 'SGD', 't': 0, 'schedule': None, 'scaler': None}
        """
        held = self.schedule if hasattr(self.schedule, "state_dict") else None, self.scaler
        schedule, scaler = (x if x is None else x.state_dict() for x in held)
        return {
            "class": type(self).__name__, "t": self.t, "schedule": schedule, "scaler": scaler,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `state_dict` returned; a scaler that it lacks starts anew.

        Examples
        --------
        >>> from cupyrec.optim import SGD
        >>> optimizer = SGD([Tensor([1.0], requires_grad=True)], lr=0.1)
        >>> optimizer.load_state_dict(optimizer.state_dict() | {"t": 7})
        >>> optimizer.t
        7
        """
        self.t = state["t"]
        if state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])
        elif self.scaler is not None:
            self.scaler.restart(self.t)

    def current_lr(self, share: ParameterGroup | None = None) -> float:
        """Return the learning rate of the next step, of a parameter group if one is given.

        Examples
        --------
        >>> from cupyrec.optim import SGD
        >>> SGD([Tensor([1.0], requires_grad=True)], 0.5, schedule=lambda t: 1 / t).current_lr()
        0.5
        """
        lr = self.lr if share is None or share.lr is None else share.lr
        if self.schedule:
            lr *= errors.number(type(self).__name__, "schedule", self.schedule(self.t + 1))
        if not 0 <= lr <= _LARGEST:
            raise ValueError(
                f"{type(self).__name__}: the learning rate must be a finite float32 and not "
                f"negative, got {lr} in step {self.t + 1}."
            )
        return lr

    def zero_grad(self) -> None:
        """Forget all gradients.

        Examples
        --------
        >>> from cupyrec.optim import SGD
        >>> SGD([Tensor([1.0], requires_grad=True)], lr=0.1).zero_grad()
        """
        for p in self.parameters:
            p.grad = None
        for group in self.groups:
            group.zero_grad()

    def loss_gradient(self, loss: Tensor) -> Any:
        """Return what a loss's `backward` takes: its scale, None without a scaler.

        Raises
        ------
        ValueError
            The loss is more than one number.

        Examples
        --------
        See `GradientScaler`.
        """
        if self.scaler is None:
            return None
        if loss.size != 1:
            raise ValueError(
                f"{type(self).__name__}.loss_gradient: 'loss' must be one number, got shape "
                f"{loss.shape}."
            )
        return self.scaler.factor.reshape(loss.shape)

    def step(self, loss: Any = None) -> None:
        """Clip, update everything, clear the gradients.

        Parameters
        ----------
        loss : Tensor or array of one number, optional
            Of the parameters' device. If it is not finite, nothing is updated.

        Raises
        ------
        FloatingPointError
            On the CPU: the loss or a gradient is not finite, the latter at a loss scale of 1;
            nothing was changed. On other devices the host doesn't wait to see it: nothing is
            updated there, but the step counts and the gradients are cleared.
        ValueError
            A later optimizer has taken parameters over, or rates are out of bounds; nothing was
            changed.

        Examples
        --------
        >>> from cupyrec.optim import SGD
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
                f"or have moved to another device since, got {taken[0]}."
            )
        self.ranks.step = self.t + 1  # for messages, in loops that don't say
        loss_scale = None if self.scaler is None else self.scaler.factor
        rates = [self._rates(share) for share in self.parameter_groups]
        work = {
            share: [(table, table.gradients(share.scaled_l2(loss_scale))) for table in share.tables]
            for share in self.parameter_groups
        }
        for share in work:
            share.collect()
        coming = all_reduce(self.ranks, "dense gradients", self._gradients)
        rows = [gradients for tables in work.values() for _, gradients in tables]
        loss = loss.data if isinstance(loss, Tensor) else loss
        told = self._of_all_ranks(rows, loss) if self.ranks.size > 1 else None
        coming.result()
        dense = [share.gradient(loss_scale) for share in work]
        scale = self._scale(loss, rows, dense, told)
        self.t += 1
        random.set_step(self.t)
        for (share, tables), grad, own in zip(work.items(), dense, rates, strict=True):
            self._update_dense(share.data, share.state, grad, scale=scale, **own)
            for group, gradients in tables:
                self._update_group(group, gradients, scale=scale, **own)
        self.zero_grad()

    def _rates(self, share: ParameterGroup) -> dict[str, float]:
        """The rates of a parameter group in the next step, checked before anything changes."""
        lr, weight_decay = self.current_lr(share), share.weight_decay
        if not lr * weight_decay < _DECAY:  # it would wipe weights, or turn them around
            raise ValueError(
                f"{type(self).__name__}.step: lr * weight_decay must be less than 1 in float32, "
                f"got {lr} * {weight_decay}."
            )
        return dict(lr=lr, weight_decay=weight_decay)

    def _scale(
        self, loss: Any, rows: list[RowGradients], dense: list[Any], told: tuple | None
    ) -> Any:
        """The factor of all gradients; on a device an array, NaN where nothing may be updated."""
        scaler, on_cpu = self.scaler, self._xp is np
        before = scaler.skipped if scaler and on_cpu else 0
        values, elsewhere = _by_squares(rows)
        gradients = [*values, *dense]
        if told is not None:  # dense gradients are the same everywhere by now, rows are not
            gradients, (elsewhere, loss) = dense, told
        scale = clip_scale(
            gradients, self.clip_norm, loss, scaling=scaler and scaler.scaling,
            elsewhere=elsewhere,
        )  # fmt: skip
        if on_cpu and scaler and scaler.skipped > before:
            logger.debug(
                "step %d: skipped, gradients overflow; loss scale now %g",
                self.t + 1, scaler.loss_scale,
            )  # fmt: skip
        elif on_cpu and math.isnan(scale):
            found = self._not_finite(rows, dense)
            if not found and self.ranks.size > 1 and np.isfinite(loss).all():
                found = "those of another rank not"
            if found:
                own = " + l2 * weight" * any(share.l2 for share in self.parameter_groups)
                what = f"gradients{own} must be finite, got {found}"
            else:
                what = f"the loss must be finite, got {loss}"
            raise FloatingPointError(f"{type(self).__name__}.step: {what} in step {self.t + 1}.")
        return scale

    def _of_all_ranks(self, rows: list[RowGradients], loss: Any) -> tuple[np.ndarray, Any]:
        """Each rank's sum of squares of its rows' gradients, and the sum of the losses."""
        xp, (values, known) = self._xp, _by_squares(rows)
        asked = [sum_squares(values)] if values else []
        asked.append(xp.asarray(0.0 if loss is None else loss, np.float64).reshape(1))
        *squares, loss = arrays.to_host(xp.concatenate(asked))  # a device is waited for once
        told = self.ranks.all_gather("norm", np.array([known.sum() + np.sum(squares), loss]))
        return told[:, 0], arrays.copy_to(xp, told[:, 1].sum(keepdims=True).astype(np.float32))

    def _not_finite(self, rows: list[RowGradients], dense: list[Any]) -> str:
        """Say which gradients are NaN or infinite, and how many."""
        found = []
        for gradients in rows:
            bad = ~np.isfinite(gradients.values).all(axis=1)
            for table, n in zip(*np.unique(gradients.tables[bad], return_counts=True), strict=True):
                found.append(f"those of {n} id{'s' * int(n > 1)} of table {table} not")
        views = [share.views(g) for share, g in zip(self.parameter_groups, dense, strict=True)]
        for g in itertools.chain(*views):
            if count := int(g.size - np.isfinite(g).sum()):
                found.append(f"{count} of {g.size} values of a parameter {g.shape} not")
        return ", ".join(found[:3] + ["..."] * (len(found) > 3))

    def _update_group(self, group: Group, gradients: RowGradients, **rates: Any) -> None:
        """Update the rows of a group's gradients."""

        def rule(memory: RowMemory, rows: Any, g: Any, rounding: Rounding | None) -> None:
            self._update_rows(memory, rows, g, rounding=rounding, **rates)

        group.update(gradients, self.t, rule)

    @abstractmethod
    def _update_dense(self, w: Any, state: dict[str, Any], g: Any, **rates: Any) -> None:
        """Update flat parameters; rates are `lr`, `weight_decay` and `scale`."""

    @abstractmethod
    def _update_rows(self, memory: RowMemory, rows: Any, g: Any, **rates: Any) -> None:
        """Update rows; rates are `lr`, `weight_decay`, `scale` and `rounding`."""


def _by_squares(rows: list[RowGradients]) -> tuple[list[Any], np.ndarray]:
    """Gradients whose sum of squares is to be found, and the sums of the others."""
    known = [g.squares for g in rows if g.squares is not None]
    return [g.values for g in rows if g.squares is None], np.array(known, np.float64)


def _are_dicts(where: str, parameters: list[Any]) -> bool:
    kinds = {isinstance(p, dict) for p in parameters}
    if kinds == {True, False}:
        raise TypeError(f"{where}: 'parameters' must be all dicts or none, got a mixture.")
    return kinds == {True}
