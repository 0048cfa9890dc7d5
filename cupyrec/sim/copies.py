"""cp.async: copies from global to shared memory that land when they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyrec.sim import memory

if TYPE_CHECKING:
    from cupyrec.sim.access import Place
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["Copies"]


class _Copy(NamedTuple):
    lanes: np.ndarray
    batch: np.ndarray  # which of its thread's groups each copy belongs to
    address: np.ndarray
    data: np.ndarray
    found: np.ndarray


class Copies:
    """Copies under way; a thread's copies between two commits are one of its groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.lanes, np.int64)
        self.pending: list[_Copy] = []

    def issue(self, to: Place, origin: Place, size: int, real: np.ndarray | None) -> Step:
        """Return the step of a copy of `size` bytes, the first `real` of them read, others zero."""
        heap = self.machine.heap
        words = heap.words[4]

        def step(group: Group) -> None:
            t = group.t
            source, target = origin.address(t), to.address(t)
            count = np.full(source.size, size) if real is None else real[t].astype(np.int64)
            data = np.zeros((source.size, size // 4), words.dtype)
            reading = group.where(count > 0)
            if reading is not None:
                chosen = count > 0
                found = origin.touch(reading, source[chosen], size, True, False, True)
                part = np.empty((int(chosen.sum()), size // 4), words.dtype)
                memory.load(source[chosen], found, heap.base, words, part)
                data[chosen] = part
                data[np.arange(size // 4) * 4 >= count[:, None]] = 0
            found = to.touch(group, target, size, False, True, True)
            inside = target[found >= 0] - heap.base
            heap.written[(inside[:, None] + np.arange(size)).ravel()] = 0
            batch = self.committed[group.lanes].copy()
            self.pending.append(_Copy(group.lanes, batch, target, data, found))

        return step

    def commit(self, group: Group) -> None:
        """End the group of copies of these threads."""
        self.committed[group.lanes] += 1

    def wait(self, group: Group, left: int) -> None:
        """Land the copies of these threads but for their last `left` groups; -1: all copies."""
        heap, still = self.machine.heap, []
        waiting = np.zeros(self.machine.lanes, bool)
        waiting[group.lanes] = True
        for copy in self.pending:
            due = waiting[copy.lanes]
            if left >= 0:
                due &= copy.batch < self.committed[copy.lanes] - left
            if due.any():
                chosen = [column[due] for column in copy]
                _, _, address, data, found = chosen
                memory.store(address, found, heap.base, heap.words[4], data, heap.written)
            if not due.all():
                still.append(_Copy(*(column[~due] for column in copy)))
        self.pending = still
