"""Learning-rate schedules: step number (from 1) -> factor of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WarmupPolynomial"]


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
