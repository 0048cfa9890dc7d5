"""Where a training run stands, and how fast it goes."""

from __future__ import annotations

import dataclasses
import time

__all__ = ["Clock", "Progress"]


@dataclasses.dataclass
class Progress:
    """Where training stands; a checkpoint keeps it, so that a resumed run goes on from there.

    Examples
    --------
    >>> Progress().step
    0
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch, to come next
    best_auc: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    loss_sum: float = 0.0  # since the last line of metrics
    loss_count: int = 0
    ranks: int = 0  # that shared out the epoch's rows; 0 where it isn't known

    def count(self, last: bool) -> None:
        """Count a step; `last` says that it was the epoch's.

        Examples
        --------
        >>> progress = Progress()
        >>> progress.count(last=True)
        >>> progress.step, progress.epoch, progress.batch
        (1, 1, 0)
        """
        self.step += 1
        self.epoch, self.batch = (self.epoch + 1, 0) if last else (self.epoch, self.batch + 1)


class Clock:
    """Samples a second, the first step (which compiles) and what lies between steps apart.

    Examples
    --------
    >>> clock = Clock()
    >>> clock.start()
    >>> clock.stop(64)
    >>> clock.samples, clock.rate()
    (64, None)
    """

    def __init__(self) -> None:
        self.samples = self._timed = self._steps = 0
        self._seconds = self._since = 0.0

    def start(self) -> None:
        """Begin a step.

        Examples
        --------
        See the class.
        """
        self._since = time.perf_counter()

    def stop(self, samples: int) -> None:
        """End a step of so many samples.

        Examples
        --------
        See the class.
        """
        self._steps += 1
        self.samples += samples
        if self._steps > 1:
            self._timed += samples
            self._seconds += time.perf_counter() - self._since

    def rate(self) -> float | None:
        """Return samples per second, None before the second step.

        Examples
        --------
        See the class.
        """
        return self._timed / self._seconds if self._timed else None
