"""cp.async: copies from global to shared memory that land when they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyrec.sim import memory

if TYPE_CHECKING:
    from cupyrec.sim.access import Place
    from cupyrec.sim.machine import Group, Machine

__all__ = ["Copies"]


class _Copy(NamedTuple):
    """What one instruction copies; an array has an element or row for each lane."""

    origin: Place
    to: Place
    size: int
    time: int
    lanes: np.ndarray
    batch: np.ndarray  # which of its thread's groups each copy belongs to
    source: np.ndarray
    read: np.ndarray  # what `Place.touch` found at the source
    address: np.ndarray
    found: np.ndarray
    data: np.ndarray

    def of(self, chosen: np.ndarray) -> _Copy:
        """The copies of some of the lanes."""
        return _Copy(*self[:4], *(column[chosen] for column in self[4:]))


class Copies:
    """Copies under way; a thread's copies between two commits are one of its groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.lanes, np.int64)
        self.pending: list[_Copy] = []

    def issue(
        self, group: Group, to: Place, origin: Place, size: int, real: np.ndarray | None
    ) -> None:
        """Begin copies of `size` bytes, the first `real` of them read, others zero."""
        heap = self.machine.heap
        words = heap.words[4]
        t = group.t
        source, target = origin.address(t), to.address(t)
        count = np.full(source.size, size) if real is None else real[t].astype(np.int64)
        data = np.zeros((source.size, size // 4), words.dtype)
        read = np.full(source.size, memory.OUTSIDE)
        for n in np.unique(count[count > 0]).tolist():
            chosen = count == n
            reading = group.where(chosen)
            read[chosen] = origin.touch(reading, source[chosen], n, True, False, True, size)
        memory.load(source, read, heap.base, words, data)
        data.view(np.uint8)[np.arange(size) >= count[:, None]] = 0
        found = to.touch(group, target, size, False, True, True)
        inside = target[found >= 0] - heap.base
        heap.written[(inside[:, None] + np.arange(size)).ravel()] = 0
        batch, now = self.committed[group.lanes].copy(), self.machine.now
        self.pending.append(
            _Copy(origin, to, size, now, group.lanes, batch, source, read, target, found, data)
        )

    def commit(self, group: Group) -> None:
        """End the group of copies of these threads."""
        self.committed[group.lanes] += 1

    def wait(self, group: Group, left: int) -> None:
        """Land the copies of these threads but for their last `left` groups; -1: all copies."""
        still = []
        waiting = np.zeros(self.machine.lanes, bool)
        waiting[group.lanes] = True
        for copy in self.pending:
            due = waiting[copy.lanes]
            if left >= 0:
                due &= copy.batch < self.committed[copy.lanes] - left
            if due.any():
                self._land(type(group)(copy.lanes[due]), copy.of(due))
            if not due.all():
                still.append(copy.of(~due))
        self.pending = still

    def _land(self, group: Group, copy: _Copy) -> None:
        """End copies: it is now that they read and write, as far as others are concerned."""
        heap, size = self.machine.heap, copy.size
        copy.origin.land(group, copy.source, copy.read, size, copy.time, False)
        copy.to.land(group, copy.address, copy.found, size, copy.time, True)
        memory.store(copy.address, copy.found, heap.base, heap.words[4], copy.data, heap.written)
