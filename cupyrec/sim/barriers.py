"""The barriers of a block: threads wait for all of it, or for as many as they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["Barrier", "decode", "release_stuck"]


class _Vote(NamedTuple):
    """``bar.red``: what is counted, and where its result goes."""

    name: str
    put: Callable
    predicate: np.ndarray


class _Wait(NamedTuple):
    """Threads that wait at an instruction, for all of their block if `whole`."""

    pc: int
    lanes: np.ndarray
    whole: bool
    vote: _Vote | None


class Barrier:
    """The barrier of one number in each block.

    One of all threads orders the block; what others order is kept like a release by those that
    arrive and an acquire by those that wait, at an address that no memory has.
    """

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        blocks = machine.alive.size
        self.arrived = np.zeros(blocks, np.int64)
        self.expected = np.zeros(blocks, np.int64)  # 0: all that live
        self.partial = np.zeros(blocks, bool)
        self.waiting: list[_Wait] = []

    def arrive(
        self, lanes: np.ndarray, expected: int, pc: int, vote: _Vote | None, waits: bool = True
    ) -> None:
        """Count threads, and park them if they wait."""
        machine, blocks = self.machine, self.machine.block[lanes]
        self.arrived += np.bincount(blocks, minlength=self.arrived.size)
        self.expected[blocks] = expected
        if expected:
            self.partial[blocks] |= (machine.alive[blocks] != expected) | (not waits)
            always = np.ones(lanes.size, bool)
            machine.order.update(
                machine.now, lanes, self._address(lanes), False, True, True, always
            )
        if waits:
            self.waiting.append(_Wait(pc, lanes, not expected, vote))
        self.open()

    def _address(self, lanes: np.ndarray) -> np.ndarray:
        return -1 - self.number - 16 * self.machine.block[lanes].astype(np.int64)

    def open(self) -> None:
        """Let the blocks go whose threads are all here."""
        if not self.arrived.any():
            return
        machine = self.machine
        full = self.arrived >= np.where(self.expected > 0, self.expected, machine.alive)
        full &= self.arrived > 0
        if not full.any():
            return
        waiting, self.waiting, leaving = self.waiting, [], []
        for wait in waiting:
            go = full[machine.block[wait.lanes]]
            if not go.all():
                self.waiting.append(wait._replace(lanes=wait.lanes[~go]))
            if go.any():
                leaving.append(wait._replace(lanes=wait.lanes[go]))
        whole = np.flatnonzero(full & ~self.partial)
        if whole.size:
            machine.order.barrier(machine.now, whole)
        _count_votes(machine, leaving, self.arrived)
        for wait in leaving:
            part = self.partial[machine.block[wait.lanes]]
            if part.any():
                lanes = wait.lanes[part]
                machine.order.read(machine.now, lanes, self._address(lanes), True, True)
            if wait.whole:
                _report_absent(machine, wait.pc, wait.lanes)
            machine.put(wait.pc + 1, wait.lanes)
        self.arrived[full] = 0
        self.partial[full] = False


def _count_votes(machine: Machine, leaving: list[_Wait], arrived: np.ndarray) -> None:
    """Give all that leave, from whatever instruction, what those before the barrier voted."""
    voters = [wait for wait in leaving if wait.vote]
    true = np.zeros(arrived.size, np.int64)
    for wait in voters:
        weights = wait.vote.predicate[wait.lanes]
        blocks = machine.block[wait.lanes]
        true += np.bincount(blocks, weights=weights, minlength=true.size).astype(np.int64)
    for wait in voters:
        name, put, _ = wait.vote
        result = {"popc": true, "and": true == arrived, "or": true > 0}[name]
        put(wait.lanes, result[machine.block[wait.lanes]])


def _report_absent(machine: Machine, pc: int, lanes: np.ndarray) -> None:
    """Fault threads that ended while others of their block wait for all of them."""
    if machine.any_exited():
        blocks = np.unique(machine.block[lanes])
        absent = np.flatnonzero(machine.exited & machine.exists & np.isin(machine.block, blocks))
        if absent.size:
            machine.fault("barrier", pc, int(absent[0]), "this thread ended and never reached it")


def decode(machine: Machine, function: Function, instruction: Instruction, pc: int) -> Step | None:
    """Return the step of ``bar`` or ``barrier``, None for forms that are not known."""
    flags = [f for f in instruction.parts[1:] if f not in {"cta", "aligned"}]
    operands = list(instruction.operands)
    vote = None
    if flags[0] == "red":
        put = machine.sink(function, operands.pop(0), flags[-1])
        vote = _Vote(flags[1], put, machine.source(function, operands.pop(), "pred"))
    elif flags not in (["sync"], ["arrive"]):
        return None
    waits = flags[0] != "arrive"
    number, count = (machine.source(function, o, "u32") for o in (*operands, 0)[:2])

    def step(group: Group) -> tuple:
        lanes = group.lanes
        pairs = number[group.t].astype(np.int64) << 32 | count[group.t]
        kinds = np.unique(pairs).tolist()
        for pair in kinds:
            chosen = lanes if len(kinds) == 1 else lanes[pairs == pair]
            which, expected = pair >> 32, pair & 0xFFFFFFFF
            if which not in machine.barriers:
                machine.barriers[which] = Barrier(machine, which)
            machine.barriers[which].arrive(chosen, expected, pc, vote, waits)
        return (pc, None) if waits else (pc + 1, group)

    return step


def release_stuck(machine: Machine) -> None:
    """Fault the waits that never end and let those threads go on."""
    for barrier in machine.barriers.values():
        for wait in barrier.waiting:
            machine.fault(
                "barrier", wait.pc, int(wait.lanes[0]), "threads of its block never reach it"
            )
            machine.put(wait.pc + 1, wait.lanes)
        barrier.waiting.clear()
        barrier.arrived[:] = 0
        barrier.partial[:] = False
