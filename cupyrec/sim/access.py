"""Loads and stores: each is checked, counted, and kept for the search for races."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import memory
from cupyrec.sim.heap import Allocation
from cupyrec.sim.ptx import Address, Function, Instruction, dtype_of, width

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["MEMORY", "SPACES", "Place", "decode", "listed", "nbytes", "semantics"]

MEMORY = {"ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wmma", "mbarrier"}
SPACES = {"global", "shared", "local", "const", "param"}
STRONG = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
SEVERITY = {
    memory.OUTSIDE: (
        "out of bounds",
        "a {what} of {n} bytes at {place} is not within an allocation",
    ),
    memory.MISALIGNED: (
        "misaligned",
        "a {what} of {n} bytes at {place} must start at a multiple of {align}",
    ),
    memory.UNWRITTEN: ("uninitialized", "nothing wrote all of the {n} bytes at {place}"),
}


def nbytes(instruction: Instruction) -> int:
    """Return the bytes that one lane touches."""
    parts = instruction.parts
    if parts[0] == "cp":
        return instruction.operands[2] if {"ca", "cg"} & set(parts) else 16
    if parts[0] in {"ldmatrix", "stmatrix"}:
        return 16
    if parts[0] == "wmma":
        return 8  # or 16
    vector = next((int(p[1:]) for p in parts if p in {"v2", "v4", "v8"}), 1)
    return width(parts[-1]) * vector


class Place:
    """Where an access goes: its space, and the absolute address of each thread."""

    def __init__(
        self, machine: Machine, function: Function, operand: Address, flags: list[str]
    ) -> None:
        spaces = [f.split("::")[0] for f in flags if f.split("::")[0] in SPACES]
        self.space = spaces[0] if spaces else "generic"
        self.machine, self.offset = machine, operand.offset
        if operand.base in function.registers:
            wide = machine.register(function, operand.base).itemsize == 8
            self.base = machine.source(function, operand.base, "s64" if wide else "u32")
        else:
            base = operand.base or 0
            self.base = machine.source(function, base, "s64")
            variable = machine.variable(function, operand.base)
            if self.space == "generic" and variable:
                self.space = variable.space

    def address(self, t: slice | np.ndarray) -> np.ndarray:
        """Absolute addresses, int64."""
        address = self.base[t].astype(np.int64) + self.offset
        window = self.machine.windows.get(self.space)
        return address if window is None else address + window[t]

    def touch(
        self, group: Group, address: np.ndarray, size: int, reads: bool, writes: bool,
        plain: bool, align: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """Check and count an access; return of each thread a number below 0 if it must not be."""
        machine, heap, table = self.machine, self.machine.heap, self.machine.table
        found = np.empty(address.size, np.int64)
        allowed = machine.allowed.get(self.space, machine.any_allowed)
        bad = memory.locate(
            address, size, align or size, allowed[group.t], table.starts, table.sizes,
            table.reached, found,
        )  # fmt: skip
        if reads:
            bad += memory.unwritten(address, size, heap.base, heap.written, found)
        if bad:
            what = {(1, 0): "read", (0, 1): "write"}.get((reads, writes), "read and write")
            self._report(group, address, size, align or size, what, found)
        if self.space in {"local", "const", "param"}:
            return found
        self.watch(group, address, found, size, reads, writes, plain)
        counts = machine.costs[machine.trace[-1]]
        if self.space == "shared":
            wavefronts, conflicts = memory.bank_conflicts(address, found, size, group.lanes)
            counts["shared_wavefronts"] += wavefronts
            counts["bank_conflicts"] += conflicts
        else:
            requests, sectors = memory.sectors(address, found, size, group.lanes)
            counts["requests"] += requests
            counts["sectors"] += sectors
        return found

    def watch(
        self, group: Group, address: np.ndarray, found: np.ndarray, size: int, reads: bool,
        writes: bool, plain: bool,
    ) -> None:  # fmt: skip
        """Keep who touches what, and fault races."""
        machine, table, order = self.machine, self.machine.table, self.machine.order
        count = memory.watch(
            address, found, size, group.lanes, machine.now, reads, writes, plain, table.starts,
            table.first_cell, table.grain, table.cells, machine.block, order.warp_time,
            order.block_time, machine.suspects,
        )  # fmt: skip
        if count:
            self._judge(group, min(count, len(machine.suspects)))

    def land(
        self, group: Group, address: np.ndarray, found: np.ndarray, size: int, since: int,
        writes: bool,
    ) -> None:  # fmt: skip
        """An access under way since some time ends: meanwhile nobody may have written there."""
        table, suspects = self.machine.table, self.machine.suspects
        count = memory.overwritten(
            address, found, size, since, table.first_cell, table.starts, table.grain, table.cells,
            suspects,
        )  # fmt: skip
        for i, other, time, _ in suspects[:count].tolist():
            self._race(int(group.lanes[i]), other, time, True, "while this copy was under way")
        self.watch(group, address, found, size, not writes, writes, True)

    def _report(
        self, group: Group, address: np.ndarray, size: int, align: int, what: str,
        found: np.ndarray,
    ) -> None:  # fmt: skip
        machine = self.machine
        for code, (kind, text) in SEVERITY.items():
            wrong = np.flatnonzero(found == code)
            if wrong.size:
                place = self._near(int(address[wrong[0]]))
                detail = text.format(n=size, align=align, what=what, place=place)
                machine.fault(kind, machine.trace[-1], int(group.lanes[wrong[0]]), detail)

    def _near(self, address: int) -> str:
        """An address by the allocation that holds it, or else is the nearest."""

        def distance(a: Allocation) -> int:
            return max(a.address - address, address - a.address - a.size, 0)

        what = min(self.machine.table.allocations, key=distance)
        if distance(what) > 1 << 20:
            return f"{address:#x}"
        return f"byte {address - what.address} of '{what.name}' ({what.size} bytes)"

    def _judge(self, group: Group, count: int) -> None:
        """Fault the suspects that nothing orders."""
        machine, now = self.machine, self.machine.now
        here = machine.trace[now]
        for i, other, time, wrote in machine.suspects[:count].tolist():
            me = int(group.lanes[i])
            if machine.faulted("race", here, machine.trace[time]):
                continue
            if not machine.order.ordered(other, time, me, now):
                self._race(me, other, time, bool(wrote), "and nothing orders the two")

    def _race(self, me: int, other: int, time: int, wrote: bool, why: str) -> None:
        machine = self.machine
        here, there = machine.trace[machine.now], machine.trace[time]
        block, thread = machine.coordinates(other)
        file, line = machine.code[there][1].source
        machine.fault(
            "race", here, me, f"thread {thread} of block {block} {'wrote' if wrote else 'read'} "
            f"the same bytes at {file}:{line}, {why}", there,
        )  # fmt: skip


def decode(machine: Machine, function: Function, instruction: Instruction) -> Step | None:
    """Return the step of a load or store, None for others."""
    root, *flags = instruction.parts
    maker = {"ld": _load, "ldu": _load, "st": _store}.get(root)
    return maker(machine, function, instruction, flags) if maker else None


def semantics(flags: list[str]) -> tuple[bool, bool, bool, bool]:
    """Return whether it is plain, acquires, releases, and is for its block alone."""
    return (
        not STRONG & set(flags),
        bool({"acquire", "acq_rel"} & set(flags)),
        bool({"release", "acq_rel"} & set(flags)),
        "cta" in flags,
    )


def listed(operand: object) -> tuple:
    """Return the parts of ``{a, b}``, or an operand alone."""
    return (
        operand if isinstance(operand, tuple) and not isinstance(operand, Address) else (operand,)
    )


def _call_store(
    machine: Machine, function: Function, operand: Address, size: int
) -> np.ndarray | None:
    """(lanes, size) bytes of a parameter that a call passes, None for other addresses."""
    named = {v.name: v for v in [*function.params, *function.returns]} if not function.entry else {}
    variable = named.get(operand.base) or function.variables.get(operand.base)
    if variable is None or variable.space != "param":
        return None
    return machine.store(function, operand.base, variable.size)[
        :, operand.offset : operand.offset + size
    ]


def _load(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    targets, operand = listed(instruction.operands[0]), instruction.operands[1]
    kind, size = flags[-1], nbytes(instruction)
    dtype = dtype_of(kind)
    puts = [machine.sink(function, target, kind) for target in targets]
    if "param" in flags and (held := _call_store(machine, function, operand, size)) is not None:

        def from_call(group: Group) -> None:
            values = np.ascontiguousarray(held[group.t]).view(dtype)
            for j, put in enumerate(puts):
                put(group.t, values[:, j])

        return from_call
    place = Place(machine, function, operand, flags)
    plain, acquires, _, narrow = semantics(flags)
    words = machine.heap.words[dtype.itemsize]

    def step(group: Group) -> None:
        t = group.t
        address = place.address(t)
        found = place.touch(group, address, size, True, False, plain)
        raw = np.empty((address.size, len(puts)), words.dtype)
        memory.load(address, found, machine.heap.base, words, raw)
        if not plain:
            machine.order.read(machine.now, group.lanes, address, acquires, narrow)
        values = raw.view(dtype)
        for j, put in enumerate(puts):
            put(t, values[:, j])

    if place.space == "param" and operand.base not in function.registers:
        return _uniform_load(machine, place, puts, dtype, size)
    return step


def _uniform_load(
    machine: Machine, place: Place, puts: list[Callable], dtype: np.dtype, size: int
) -> Step:
    """Kernel arguments: the same for all threads, read once."""
    start = int(place.base[0]) + place.offset - machine.params.address
    values = machine.arguments[start : start + size].view(dtype)

    def step(group: Group) -> None:
        for put, value in zip(puts, values, strict=True):
            put(group.t, value)

    return step


def _store(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    operand, values = instruction.operands[0], listed(instruction.operands[1])
    kind, size = flags[-1], nbytes(instruction)
    dtype = dtype_of(kind)
    sources = [machine.source(function, value, kind) for value in values]
    if "param" in flags:
        held = _call_store(machine, function, operand, size)

        def to_call(group: Group) -> None:
            row = np.stack([s[group.t] for s in sources], axis=1)
            held[group.t] = np.ascontiguousarray(row).view(np.uint8)

        return to_call
    place = Place(machine, function, operand, flags)
    plain, _, releases, narrow = semantics(flags)
    heap = machine.heap
    words = heap.words[dtype.itemsize]

    def step(group: Group) -> None:
        address = place.address(group.t)
        row = np.stack([s[group.t] for s in sources], axis=1).view(words.dtype)
        found = place.touch(group, address, size, False, True, plain)
        memory.store(address, found, heap.base, words, row, heap.written)
        if not plain:
            machine.order.write(machine.now, group.lanes, address, releases, narrow)

    return step
