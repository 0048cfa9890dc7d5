"""Ranks tell each other that they get on; when none does, one of them ends the job and says why.

Every few seconds each rank tells rank 0 where it stands, and rank 0 tells each how often it saw the
job get on: small messages, sent by the thread that makes all MPI calls while it waits or has
nothing to do. Another thread judges, since that one may be stuck. Rank 0 knows most and judges
first; if it is the one that hangs, others do. Whoever is compiling, reading or saving gets on.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyrec.parallel.failure import Position, abort, deadline, failed

if TYPE_CHECKING:
    from cupyrec.parallel.communicator import Communicator

__all__ = ["Watchdog", "watch"]

_LONGEST = 4096  # bytes of a message
_LATER = 4.0  # seconds that rank 1 leaves rank 0 to judge, and the others rank 1


def _interval(timeout: float) -> float:
    """Seconds between messages."""
    return min(max(timeout / 10, 0.2), 3.0)


class Watchdog:
    """What a rank knows of the others, and what it makes of that.

    Examples
    --------
    >>> stand = Position(step=3, calls=8, name="rows", inside=True, doing="", ended=False)
    >>> dog = Watchdog(rank=0, size=2)
    >>> dog.hear(0, stand)
    >>> dog.hear(1, stand._replace(calls=7, name="keys", inside=False))
    >>> for _ in range(12):
    ...     verdict = dog.judge(1.0, timeout=10.0)
    >>> print(verdict)
    no rank has got on for 11 s:
      rank 0: in 'rows' (call 8) at step 3
      rank 1: after 'keys' (call 7) at step 3, silent for 12 s
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.pulse = 0  # how often this rank saw the job get on
        self._stands: dict[int, Position] = {}
        self._pulse_of_0 = 0
        self._clock = 0.0
        self._heard: dict[int, float] = defaultdict(float)
        self._moved: dict[int, float] = defaultdict(float)
        self._got_on, self._news = 0.0, False

    def hear(self, rank: int, stand: Position, pulse: int | None = None) -> None:
        """Take note of where a rank stands and, from rank 0, how often the job got on.

        Examples
        --------
        See the class.
        """
        self._heard[rank] = self._clock
        if self._stands.get(rank) != stand:
            self._stands[rank], self._moved[rank] = stand, self._clock
            self._news = True
        if stand.gets_on:
            self._news = True
        if pulse not in (None, self._pulse_of_0):
            self._pulse_of_0, self._news = pulse, True

    def judge(self, seconds: float, timeout: float) -> str | None:
        """Let time pass, and return why the job must end, if it must.

        Examples
        --------
        See the class.
        """
        self._clock += seconds
        self._heard[self.rank] = self._clock
        if self._news:
            self._news = False
            self._got_on, self.pulse = self._clock, self.pulse + 1
        idle = self._clock - self._got_on
        if idle > timeout + _LATER * min(self.rank, 2):
            return f"no rank has got on for {idle:.0f} s:{self._known(timeout)}"
        if self.rank == 0 and (left := self._left(timeout)):
            return f"{_listed(left)} ended while others wait:{self._known(timeout)}"
        return None

    def _left(self, timeout: float) -> list[int]:
        """Ranks that ended though others wait for them, and not just because news are late."""
        late = max(1.0, 2 * _interval(timeout))
        stands = list(self._stands.items())  # another thread may hear of a rank meanwhile
        waiting = [
            stand.calls
            for rank, stand in stands
            if stand.inside and self._clock - self._moved[rank] > late
        ]
        return [
            rank for rank, stand in stands if stand.ended and stand.calls < max(waiting, default=0)
        ]

    def _known(self, timeout: float) -> str:
        told = defaultdict(list)
        for rank in range(self.size):
            stand = self._stands.get(rank)
            if stand is None and self.rank:
                continue  # only rank 0 hears of all
            silent = self._clock - self._heard[rank]
            late = silent > 2 * max(_interval(timeout), 0.5) + 0.5
            text = str(stand or "not heard of yet")
            text += f", silent for {silent:.0f} s" if late else ""
            told[text].append(rank)
        return "".join(f"\n  {_listed(ranks)}: {text}" for text, ranks in told.items())


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class _Messages:
    """What the thread that makes all MPI calls does for the watchdog."""

    def __init__(self, ranks: Communicator, dog: Watchdog, mpi: Any, communicator: Any) -> None:
        self._ranks, self._dog, self._mpi, self._communicator = ranks, dog, mpi, communicator
        self._place, self._status = np.empty(_LONGEST, np.uint8), mpi.Status()
        self._next, self._under_way = 0.0, {}
        self.left = ""  # the last call of a program that ended

    def stand(self) -> Position:
        stand = Position.of(self._ranks)
        if self.left:
            calls = stand.calls - 1  # the end is none
            stand = Position(stand.step, calls, self.left, inside=False, doing="", ended=True)
        return stand

    def exchange(self) -> None:
        """Hear and tell what there is, if it is time to."""
        now = time.monotonic()
        if now < self._next or self._mpi.Is_finalized():  # by the program
            return
        self._next = now + _interval(self._ranks.stall_timeout)
        messages, status = self._communicator, self._status
        while messages.Iprobe(self._mpi.ANY_SOURCE, 0, status):
            messages.Recv([self._place, self._mpi.BYTE], status.source, 0, status)
            text = self._place[: status.Get_count(self._mpi.BYTE)].tobytes()
            *stand, pulse = json.loads(text)
            pulse = pulse if status.source == 0 else None
            self._dog.hear(status.source, Position(*stand), pulse)
        text = json.dumps([*self.stand(), self._dog.pulse]).encode()
        for rank in range(1, self._ranks.size) if self._ranks.rank == 0 else [0]:
            request, _ = self._under_way.get(rank, (None, b""))
            if request is None or request.Test():  # else that rank doesn't listen
                self._under_way[rank] = messages.Isend([text, self._mpi.BYTE], rank, 0), text

    def leave(self, before: str, finalize: bool) -> None:
        """Wait until all programs have ended, unless one of them has ended MPI, which waits too."""
        if self._mpi.Is_finalized():
            return
        self.left, self._next = before, 0.0
        everyone = self._communicator.Ibarrier()
        while not everyone.Test():
            self.exchange()
            time.sleep(0.001)
        self._ranks.look_around = lambda: None
        if finalize:
            with deadline(self._ranks.stall_timeout):
                self._mpi.Finalize()


def watch(ranks: Communicator, mpi: Any, communicator: Any, *, finalize: bool) -> None:
    """Watch over several ranks from now on, until all programs have ended.

    Parameters
    ----------
    ranks : Communicator
    mpi, communicator
        mpi4py's `MPI`, and the communicator of these ranks.
    finalize : bool
        Whether MPI is ours to end.

    Examples
    --------
    See `cupyrec.parallel.world`, which does it.
    """
    dog = Watchdog(ranks.rank, ranks.size)
    own = ranks.submit("watchdog", communicator.Dup).result()
    messages, over = _Messages(ranks, dog, mpi, own), threading.Event()

    def judge() -> None:
        last = time.monotonic()
        while not over.wait(pause := min(_interval(ranks.stall_timeout) / 2, 0.5)):
            if mpi.Is_finalized():  # by the program: no rank waits for another any more
                return
            now = time.monotonic()
            dog.hear(ranks.rank, messages.stand())
            # Not all of the time, if this job was stopped and goes on.
            if verdict := dog.judge(min(now - last, 2 * pause), ranks.stall_timeout):
                abort(ranks, f"rank {ranks.rank} of {ranks.size} ends the job: {verdict}")
            last = now

    def end() -> None:
        before = ranks.last
        try:
            ranks.submit("the end", lambda: messages.leave(before, finalize)).result()
        except BaseException as error:
            failed(error)
            raise
        over.set()

    ranks.look_around = messages.exchange
    threading.Thread(target=judge, name="cupyrec-watchdog", daemon=True).start()
    atexit.register(end)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(end))
