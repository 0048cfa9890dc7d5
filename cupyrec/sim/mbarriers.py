"""mbarrier: barriers in shared memory, at which threads and asynchronous copies arrive.

Its 64 bits, which programs must not look into, are here: arrivals pending in this phase (20 bits),
arrivals that a phase expects (20), bytes that copies still have to bring (21, from 2^20 on), and
the phase, even or odd. A token is such a word as it was before the arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec import cpu
from cupyrec.sim import access, memory
from cupyrec.sim.ptx import Address, Function, Instruction

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["decode"]

COUNT, BYTES = (1 << 20) - 1, 1 << 20
EXPECTED, BROUGHT, PHASE = 20, 40, 62
FLAGS = {"b64", "shared", "shared::cta", "release", "acquire", "relaxed", "cta", "cluster",
         "noComplete", "parity", "expect_tx"}  # fmt: skip


@cpu.exact_loop
def _arrive(address, found, base, words, arrivals, dropped, awaited, old):
    """One lane after the other; returns the number of the first that comes too often, or -1."""
    wrong = -1
    for i in range(address.size):
        if found[i] < 0:
            old[i] = 0
            continue
        j = (address[i] - base) // 8
        word = words[j]
        old[i] = word
        pending = (word & COUNT) - arrivals[i]
        expected = ((word >> EXPECTED) & COUNT) - dropped[i]
        missing = ((word >> BROUGHT) & (2 * BYTES - 1)) + awaited[i]
        phase = (word >> PHASE) & 1
        if pending < 0:
            wrong = i if wrong < 0 else wrong
            pending = 0
        if pending == 0 and missing == BYTES:
            phase, pending = 1 - phase, expected
        words[j] = pending | expected << EXPECTED | missing << BROUGHT | phase << PHASE
    return wrong


def decode(machine: Machine, function: Function, instruction: Instruction) -> Step | None:
    """Return the step of one of these, None for others."""
    root, *flags = instruction.parts
    if root == "cp" and flags[:3] == ["async", "mbarrier", "arrive"]:
        return _arrive_after_copies(machine, function, instruction, flags)
    if root != "mbarrier":
        return None
    name, *flags = flags
    maker = {"init": _init, "inval": _invalidate, "test_wait": _test, "try_wait": _test,
             "pending_count": _pending, "arrive": _arrival, "arrive_drop": _arrival,
             "expect_tx": _arrival, "complete_tx": _arrival}.get(name)  # fmt: skip
    known = set(flags) <= FLAGS
    return maker(machine, function, instruction, flags) if maker and known else None


def _init(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    place = access.Place(machine, function, instruction.operands[0], flags)
    count = machine.source(function, instruction.operands[1], "u32")
    heap, words = machine.heap, machine.heap.words[8]

    def step(group: Group) -> None:
        address = place.address(group.t)
        found = place.touch(group, address, 8, False, True, True)
        n = count[group.t].astype(np.int64)
        row = (n | n << EXPECTED | BYTES << BROUGHT).view(words.dtype)[:, None]
        memory.store(address, found, heap.base, words, row, heap.written)

    return step


def _invalidate(
    machine: Machine, function: Function, instruction: Instruction, flags: list
) -> Step:
    """Nobody may use it from now on: its bytes count as never written."""
    place = access.Place(machine, function, instruction.operands[0], flags)
    heap = machine.heap

    def step(group: Group) -> None:
        address = place.address(group.t)
        found = place.touch(group, address, 8, True, True, True)
        start = address[found >= 0] - heap.base
        heap.written[(start[:, None] + np.arange(8)).ravel()] = 0

    return step


def arrivals(machine: Machine, place: access.Place, narrow: bool) -> object:
    """Return arrive(group, arrivals, dropped, awaited), which gives the words before."""
    words = machine.heap.bytes.view(np.int64)

    def arrive(group: Group, *numbers: np.ndarray) -> np.ndarray:
        address = place.address(group.t)
        found = place.touch(group, address, 8, True, True, False)
        columns = [np.broadcast_to(np.asarray(n, np.int64), address.shape) for n in numbers]
        old = np.empty(address.size, np.int64)
        wrong = _arrive(address, found, machine.heap.base, words, *columns, old)
        if wrong >= 0:
            machine.fault("barrier", machine.trace[-1], int(group.lanes[wrong]),
                          "more threads arrive in one phase than it expects")  # fmt: skip
        always = np.ones(address.size, bool)
        machine.order.update(machine.now, group.lanes, address, False, True, narrow, always)
        return old

    return arrive


def _arrival(
    machine: Machine, function: Function, instruction: Instruction, flags: list
) -> Step | None:
    name, operands = instruction.parts[1], list(instruction.operands)
    put = None
    if not isinstance(operands[0], Address):
        put = machine.sink(function, operands.pop(0), "b64")
    place = access.Place(machine, function, operands.pop(0), flags)
    count = machine.source(function, operands[0] if operands else 1, "u32")
    arrive = arrivals(machine, place, "cluster" not in flags)
    drops, brings = name == "arrive_drop", name.endswith("tx") or "expect_tx" in flags

    def step(group: Group) -> None:
        n = count[group.t].astype(np.int64)
        come = n
        if brings:
            come = 0 if name.endswith("tx") else 1
        awaited = 0
        if brings:
            awaited = -n if name == "complete_tx" else n
        old = arrive(group, come, come if drops else 0, awaited)
        if put:
            put(group.t, old.view(np.uint64))

    return step


def _test(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    """Whether the phase of a token, or of a parity, is over; who learns so has acquired."""
    put = machine.sink(function, instruction.operands[0], "pred")
    place = access.Place(machine, function, instruction.operands[1], flags)
    parity = "parity" in flags
    asked = machine.source(function, instruction.operands[2], "u32" if parity else "u64")
    heap, words = machine.heap, machine.heap.words[8]
    acquires, narrow = "relaxed" not in flags, "cluster" not in flags

    def step(group: Group) -> None:
        address = place.address(group.t)
        found = place.touch(group, address, 8, True, False, False)
        raw = np.empty((address.size, 1), words.dtype)
        memory.load(address, found, heap.base, words, raw)
        phase = raw[:, 0].view(np.uint64) >> np.uint64(PHASE) & np.uint64(1)
        mine = asked[group.t].astype(np.uint64)
        over = phase != (mine & np.uint64(1) if parity else mine >> np.uint64(PHASE) & np.uint64(1))
        if over.any():
            machine.order.read(machine.now, group.lanes[over], address[over], acquires, narrow)
        put(group.t, over)

    return step


def _pending(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    put = machine.sink(function, instruction.operands[0], "u32")
    token = machine.source(function, instruction.operands[1], "u64")
    return lambda group: put(group.t, (token[group.t] & np.uint64(COUNT)).astype(np.uint32))


def _arrive_after_copies(
    machine: Machine, function: Function, instruction: Instruction, flags: list
) -> Step:
    """Land the thread's copies and arrive; without ``noinc`` the arrival was not expected."""
    place = access.Place(machine, function, instruction.operands[0], flags)
    arrive = arrivals(machine, place, True)
    come = 1 if "noinc" in flags else 0

    def step(group: Group) -> None:
        machine.copies.wait(group, -1)
        arrive(group, come, 0, 0)

    return step
