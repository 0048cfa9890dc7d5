"""Learning-rate schedules: step number (from 1) -> factor of the learning rate."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from cupyrec import errors

__all__ = ["Cosine", "Plateau", "StepDecay", "WarmupPolynomial"]


@dataclass(frozen=True)
class WarmupPolynomial:
    """Linear warm-up, then constant, then polynomial decay to `end`.

    Parameters
    ----------
    warmup_steps : int
        The factor rises from 1/warmup_steps to 1 over these.
    decay_start : int
        Last step at which the factor is 1, if `decay_steps` > 0.
    decay_steps : int
        The factor falls to `end` over these; 0 for no decay.
    power : float
    end : float
        Factor after the decay.

    Raises
    ------
    ValueError
        A negative number of steps, or a decay that starts within the warm-up.

    Notes
    -----
    The schedule of MLPerf's and OneFlow's DLRM: warm-up 2,750, start 49,315, decay 27,772, power 2.

    Examples
    --------
    >>> schedule = WarmupPolynomial(warmup_steps=2, decay_start=2, decay_steps=4, power=2)
    >>> [schedule(step) for step in (1, 2, 4, 6, 7)]
    [0.5, 1.0, 0.25, 0.0, 0.0]
    """

    warmup_steps: int = 0
    decay_start: int = 0
    decay_steps: int = 0
    power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        if min(self.warmup_steps, self.decay_start, self.decay_steps) < 0:
            raise ValueError(f"WarmupPolynomial: steps must not be negative, got {self}.")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                "WarmupPolynomial: 'decay_start' must not lie within the warm-up, "
                f"got {self.decay_start} < {self.warmup_steps}."
            )

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if not self.decay_steps or step <= self.decay_start:
            return 1.0
        left = max(0.0, 1.0 - (step - self.decay_start) / self.decay_steps)
        return self.end + (1.0 - self.end) * left**self.power


@dataclass(frozen=True)
class StepDecay:
    """Linear warm-up, then a factor that is multiplied by `gamma` every so often.

    Parameters
    ----------
    step_size : int
        `gamma` comes in after every so many steps; 0 where `milestones` say when.
    milestones : sequence of int
        `gamma` comes in after each of these numbers of steps.
    gamma : float
    warmup_steps : int
        The factor rises from 1/warmup_steps to 1 over these; others are counted from their end.

    Raises
    ------
    ValueError, TypeError
        Neither or both of `step_size` and `milestones`, a step that is no positive integer,
        milestones that don't increase, `gamma` outside (0, 1].

    Notes
    -----
    PyTorch's ``StepLR`` and ``MultiStepLR``, stepped once after each step of the optimizer.

    Examples
    --------
    >>> [StepDecay(2, gamma=0.5)(step) for step in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    >>> [StepDecay(milestones=(1, 4), gamma=0.5)(step) for step in (1, 2, 3, 4, 5)]
    [1.0, 0.5, 0.5, 0.5, 0.25]
    """

    step_size: int = 0
    _: KW_ONLY
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if bool(self.step_size) == bool(self.milestones):
            raise ValueError(
                "StepDecay: there must be one of 'step_size' and 'milestones', "
                f"got {self.step_size} and {self.milestones}."
            )
        for milestone in self.milestones:
            errors.positive("StepDecay", "milestones", milestone)
        if not self.milestones:
            errors.positive("StepDecay", "step_size", self.step_size)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"StepDecay: 'milestones' must increase, got {self.milestones}.")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"StepDecay: 'gamma' must lie in (0, 1], got {self.gamma}.")
        _check_warmup("StepDecay", self.warmup_steps)

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        taken = step - 1 - self.warmup_steps
        if self.step_size:
            return self.gamma ** (taken // self.step_size)
        return self.gamma ** bisect.bisect_right(self.milestones, taken)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine wave from 1 down to `end`, which stays.

    Parameters
    ----------
    steps : int
        The wave takes so many steps, counted from the end of the warm-up.
    end : float
        Factor after it.
    warmup_steps : int
        The factor rises from 1/warmup_steps to 1 over these.

    Raises
    ------
    ValueError, TypeError
        Steps that are no positive integer, `end` outside [0, 1].

    Notes
    -----
    Loshchilov and Hutter 2017, without restarts; PyTorch's ``CosineAnnealingLR``, stepped once
    after each step of the optimizer, but that one rises again after `steps`.

    Examples
    --------
    >>> [round(Cosine(4)(step), 2) for step in (1, 2, 3, 4, 5, 6)]
    [1.0, 0.85, 0.5, 0.15, 0.0, 0.0]
    """

    steps: int
    end: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        errors.positive("Cosine", "steps", self.steps)
        if not 0 <= self.end <= 1:
            raise ValueError(f"Cosine: 'end' must lie in [0, 1], got {self.end}.")
        _check_warmup("Cosine", self.warmup_steps)

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        done = min(1.0, (step - 1 - self.warmup_steps) / self.steps)
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass
class Plateau:
    """A factor that falls when the validation AUC no longer rises.

    Parameters
    ----------
    factor : float
        What the factor of the learning rate is multiplied by.
    patience : int
        So many evaluations in a row may be no better than the best one before it falls.
    threshold : float
        By more than this an AUC must lie above the best one to be better.
    min_factor : float
        Where the fall ends.

    Attributes
    ----------
    current : float
        The factor of the learning rate.
    best : float or None
    waited : int
        Evaluations since the best one, or since the last fall.

    Raises
    ------
    ValueError
        `factor` outside (0, 1), `patience` or `threshold` negative, `min_factor` outside [0, 1].

    Notes
    -----
    PyTorch's ``ReduceLROnPlateau(mode="max", threshold_mode="abs")``.

    Examples
    --------
    >>> schedule = Plateau(factor=0.5, patience=1)
    >>> for auc in (0.70, 0.72, 0.71, 0.70):
    ...     schedule.observe(auc)
    >>> schedule(5), schedule.state_dict()
    (0.5, {'current': 0.5, 'best': 0.72, 'waited': 0})
    """

    factor: float = 0.1
    patience: int = 0
    threshold: float = 1e-4
    min_factor: float = 0.0
    current: float = dataclasses.field(default=1.0, init=False)
    best: float | None = dataclasses.field(default=None, init=False)
    waited: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"Plateau: 'factor' must lie in (0, 1), got {self.factor}.")
        if not self.patience >= 0:
            raise ValueError(f"Plateau: 'patience' must not be negative, got {self.patience}.")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(
                f"Plateau: 'threshold' must be finite and not negative, got {self.threshold}."
            )
        if not 0 <= self.min_factor <= 1:
            raise ValueError(f"Plateau: 'min_factor' must lie in [0, 1], got {self.min_factor}.")
        for name in ("factor", "threshold", "min_factor"):  # JSON takes no NumPy scalars
            setattr(self, name, float(getattr(self, name)))

    def __call__(self, step: int) -> float:
        return self.current

    def observe(self, metric: float) -> None:
        """Take the metric of an evaluation, of which higher is better; NaN tells nothing.

        Examples
        --------
        See the class.
        """
        metric = float(metric)
        if math.isnan(metric):
            return
        if self.best is None or metric > self.best + self.threshold:
            self.best, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.current, self.waited = max(self.current * self.factor, self.min_factor), 0

    def state_dict(self) -> dict[str, float | int | None]:
        """Return what `observe` has changed, in values of JSON.

        Examples
        --------
        >>> Plateau().state_dict()
        {'current': 1.0, 'best': None, 'waited': 0}
        """
        return {name: getattr(self, name) for name in ("current", "best", "waited")}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        """Go on from what `state_dict` has returned.

        Raises
        ------
        ValueError
            It is of something else.

        Examples
        --------
        >>> schedule = Plateau()
        >>> schedule.load_state_dict({"current": 0.1, "best": 0.75, "waited": 0})
        >>> schedule(1)
        0.1
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                "Plateau.load_state_dict: 'state' must have current, best and waited, "
                f"got {', '.join(state) or 'nothing'}."
            )
        self.current, self.best, self.waited = (state[name] for name in self.state_dict())


def _check_warmup(where: str, steps: int) -> None:
    if steps < 0:
        raise ValueError(f"{where}: 'warmup_steps' must not be negative, got {steps}.")
