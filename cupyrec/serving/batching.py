"""Requests to batches: while one is worked on in a thread, the next collects in the event loop."""

from __future__ import annotations

import asyncio
import collections
import itertools
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyrec.ragged import Bags

__all__ = ["Batcher", "Full", "Gone"]

_Arrays = tuple[np.ndarray, np.ndarray | Bags]
_Convert = Callable[[Sequence[Any]], _Arrays]
_Compute = Callable[[Any, Any], tuple[np.ndarray, str]]


class Full(Exception):
    """As many rows wait as may."""


class Gone(Exception):
    """Nobody waits for an answer any more."""


class _Waiting(NamedTuple):
    inputs: Any
    rows: int
    form: Hashable
    is_gone: Callable[[], bool]
    answer: asyncio.Future


class Batcher:
    """Puts requests together, in the order in which they come.

    A request is computed with others as one batch, or alone, but never in two. The thread that
    computes converts inputs first, all of one form together. When it is free, it takes what waits;
    but where it pays, that is as long as the rows fill no block, those are waited for that have
    just been answered, since a client that got its answer most often sends its next request. So
    clients that take turns don't fall into two halves, each of which waits for the other, and one
    alone waits for nobody.

    Parameters
    ----------
    convert : callable
        ``Inputs.arrays``: inputs of requests of one form to (dense, ids) of all their rows. Called
        in one thread, like `compute`.
    compute : callable
        ``Predictor.probabilities``: (dense, ids) to ((B, T) float32, version).
    max_batch : int
        Rows of a batch.
    max_delay : float
        Seconds that a free thread waits for more requests at most.
    max_queue : int
        Rows that may wait.
    block : int
        Rows that take as long as one.

    Attributes
    ----------
    rows : int
        Of those that wait.
    observe : callable
        Called with the number of rows of each batch.

    Examples
    --------
    >>> async def ask():
    ...     batcher = Batcher(
    ...         lambda inputs: (np.concatenate(inputs), np.zeros((sum(map(len, inputs)), 1), int)),
    ...         lambda dense, ids: (dense.sum(axis=1, keepdims=True), "v1"),
    ...     )
    ...     asked = [batcher.submit(np.full((n, 2), n, "f"), n) for n in (1, 2)]
    ...     answers = [(await answer)[0].tolist() for answer in asked]
    ...     batcher.close()
    ...     return answers
    >>> asyncio.run(ask())
    [[[2.0]], [[4.0], [4.0]]]
    """

    def __init__(
        self,
        convert: _Convert,
        compute: _Compute,
        *,
        max_batch: int = 4096,
        max_delay: float = 0.005,
        max_queue: int = 16384,
        block: int = 64,
    ) -> None:
        self._convert, self._compute, self._block = convert, compute, min(block, max_batch)
        self._max_batch, self._max_delay, self._max_queue = max_batch, max_delay, max_queue
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._busy = False
        self._expected = 1  # requests that are worth waiting for
        self._timer: asyncio.TimerHandle | None = None
        self.rows = 0
        self.observe: Callable[[int], None] = lambda rows: None
        self._batches: queue.SimpleQueue[list[_Waiting] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cupyrec-serving", daemon=True)
        self._thread.start()

    def submit(
        self,
        inputs: Any,
        rows: int,
        form: Hashable = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future:
        """Return what will be ((B, T) float32, version) of these inputs.

        Parameters
        ----------
        inputs
            What `convert` takes.
        rows : int
            B.
        form : hashable
            Inputs that differ in it are not converted together.
        is_gone : callable
            Whether nobody waits for the answer any more; asked before the inputs are converted.

        Raises
        ------
        Full
            Too many rows wait; a request that alone has more than `max_queue` is let in.
        Gone
            By what is returned, if `is_gone` said so.
        """
        if self.rows and self.rows + rows > self._max_queue:
            raise Full
        answer = self._loop.create_future()
        self._waiting.append(_Waiting(inputs, rows, form, is_gone, answer))
        self.rows += rows
        if not self._busy:
            self._advance()
        return answer

    def close(self) -> None:
        """End the thread, after the batch that it may compute; who waits is cancelled."""
        for waiting in self._waiting:
            waiting.answer.cancel()
        self._waiting.clear()
        self._batches.put(None)
        self._thread.join()

    def _advance(self) -> None:
        """Give the free thread a batch, or wait for one that is better filled."""
        enough = self.rows >= self._block or len(self._waiting) >= self._expected
        if enough or not self._max_delay:
            self._begin()
        elif self._timer is None and self._waiting:
            self._timer = self._loop.call_later(self._max_delay, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch: list[_Waiting] = []
        rows = 0
        while self._waiting:
            size = self._waiting[0].rows
            if batch and rows + size > self._max_batch:
                break
            first = self._waiting.popleft()
            self.rows -= size
            if first.answer.cancelled():
                continue
            if first.is_gone():
                first.answer.set_exception(Gone())
            else:
                batch.append(first)
                rows += size
        if batch:
            self._busy = True
            self.observe(rows)
            self._batches.put(batch)

    def _work(self) -> None:
        """What the thread does: work on batch after batch."""
        while (batch := self._batches.get()) is not None:
            try:
                outcomes = self._outcomes(batch)
            except Exception as error:  # no memory, say; this thread must live on
                outcomes = [(one, error) for one in batch]
            try:
                self._loop.call_soon_threadsafe(self._end, outcomes)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _outcomes(self, batch: list[_Waiting]) -> list[tuple[_Waiting, Any]]:
        """What comes of each request, in any order."""
        forms: dict[Hashable, list[_Waiting]] = {}
        for one in batch:
            forms.setdefault(one.form, []).append(one)
        outcomes, good, parts = [], [], []
        for same in forms.values():
            for some, converted in self._converted(same):
                if isinstance(converted, Exception):
                    outcomes.append((some[0], converted))
                else:
                    good += some
                    parts.append(converted)
        if good:
            outcomes += zip(good, self._computed(good, *_joined(parts)), strict=True)
        return outcomes

    def _converted(self, same: list[_Waiting]) -> list[tuple[list[_Waiting], Any]]:
        """Requests of one form and their rows, or of one what is wrong with it.

        Where they fail together each half is tried: the good ones most often stay together.
        """
        try:
            dense, ids = self._convert([one.inputs for one in same])
            if not len(dense) == len(ids) == sum(one.rows for one in same):  # else rows of others
                raise RuntimeError("Batcher: inputs must have as many rows as was said.")
            return [(same, (dense, ids))]
        except Exception as error:
            if len(same) == 1:
                return [(same, error)]
        half = len(same) // 2
        return self._converted(same[:half]) + self._converted(same[half:])

    def _computed(
        self, some: list[_Waiting], dense: np.ndarray, ids: np.ndarray | Bags
    ) -> list[Any]:
        """What comes of the rows of each request; where they fail together, of each alone."""
        ends = [*itertools.accumulate(one.rows for one in some)]
        parts = [slice(end - one.rows, end) for one, end in zip(some, ends, strict=True)]
        try:
            values, version = self._compute(dense, ids)
        except Exception as error:
            if len(some) > 1:
                return [
                    self._computed([one], dense[part], _part(ids, part))[0]
                    for one, part in zip(some, parts, strict=True)
                ]
            return [error]
        return [(values[part], version) for part in parts]

    def _end(self, outcomes: list[tuple[_Waiting, Any]]) -> None:
        """Hand out what came of a batch, and go on."""
        self._busy = False
        for one, outcome in outcomes:
            if one.answer.cancelled():
                continue
            if isinstance(outcome, Exception):
                one.answer.set_exception(outcome)
            else:
                one.answer.set_result(outcome)
        self._expected = len(outcomes) + len(self._waiting)
        if self._waiting:
            self._advance()


def _joined(parts: list[_Arrays]) -> _Arrays:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    dense, ids = zip(*parts, strict=True)
    together = Bags.joined(ids) if isinstance(ids[0], Bags) else np.concatenate(ids)
    return np.concatenate(dense), together


def _part(ids: np.ndarray | Bags, part: slice) -> np.ndarray | Bags:
    return ids.part(part.start, part.stop) if isinstance(ids, Bags) else ids[part]
