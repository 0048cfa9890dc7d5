"""mov, conversions of addresses, fences, asynchronous copies, and what has no effect here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim.access import SPACES, Place
from cupyrec.sim.ptx import Function, Instruction, dtype_of, width

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["decode"]

WITHOUT_EFFECT = {
    "nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "pmevent", "brkpt",
    "griddepcontrol", "setmaxnreg",
}  # fmt: skip


def decode(machine: Machine, function: Function, instruction: Instruction) -> Step | None:
    """Return the step of one of these, None for others."""
    root, *flags = instruction.parts
    if root == "mov":
        return _move(machine, function, instruction, flags[0])
    if root in {"cvta", "isspacep"}:
        return _generic(machine, function, instruction, flags)
    if root in {"membar", "fence"}:
        narrow = "cta" in flags
        return lambda group: machine.order.fence(machine.now, group.lanes, narrow)
    if root in WITHOUT_EFFECT:
        return lambda group: None
    if root == "createpolicy":
        put = machine.sink(function, instruction.operands[0], "b64")
        return lambda group: put(group.t, np.uint64(0))
    return _copy(machine, function, instruction, flags) if root == "cp" else None


def _move(machine: Machine, function: Function, instruction: Instruction, kind: str) -> Step:
    target, value = instruction.operands
    if isinstance(value, tuple) and len(value) > 1:  # pack
        part = f"b{8 * width(kind) // len(value)}"
        put = machine.sink(function, target, kind)
        sources = [machine.source(function, v, part) for v in value]

        def pack(group: Group) -> None:
            row = np.stack([s[group.t] for s in sources], axis=1)
            put(group.t, row.view(dtype_of(kind))[:, 0])

        return pack
    if isinstance(target, tuple):  # unpack
        part = f"b{8 * width(kind) // len(target)}"
        puts = [machine.sink(function, t, part) for t in target]
        source = machine.source(function, value, kind)

        def unpack(group: Group) -> None:
            row = np.ascontiguousarray(source[group.t])[:, None].view(dtype_of(part))
            for j, put in enumerate(puts):
                put(group.t, row[:, j])

        return unpack
    put = machine.sink(function, target, kind)
    source = machine.source(function, value, kind)
    return lambda group: put(group.t, source[group.t])


def _generic(machine: Machine, function: Function, instruction: Instruction, flags: list) -> Step:
    """Between addresses of a space and generic ones, which are absolute."""
    space = next(f.split("::")[0] for f in flags if f.split("::")[0] in SPACES)
    windowed = space in {"shared", "local"}
    if instruction.parts[0] == "isspacep":
        put = machine.sink(function, instruction.operands[0], "pred")
        source = machine.source(function, instruction.operands[1], "s64")

        def test(group: Group) -> None:
            if windowed:
                away = source[group.t] - machine.windows[space][group.t]
                size = machine.shared_bytes if space == "shared" else machine.frame
                put(group.t, (away >= 0) & (away < size))
            else:
                heap = machine.heap
                found = np.searchsorted(machine.table.starts, source[group.t], side="right") - 1
                spaces = np.array([a.space == space for a in machine.table.allocations])
                put(group.t, spaces[found] & (source[group.t] >= heap.base))

        return test
    kind = flags[-1]
    put = machine.sink(function, instruction.operands[0], kind)
    source = machine.source(function, instruction.operands[1], kind)
    if not windowed:
        return lambda group: put(group.t, source[group.t])
    dtype, sign = dtype_of(kind), -1 if "to" in flags else 1

    def move(group: Group) -> None:
        base = sign * machine.windows[space][group.t]
        put(group.t, source[group.t] + base.astype(dtype))

    return move


def _copy(
    machine: Machine, function: Function, instruction: Instruction, flags: list
) -> Step | None:
    """cp.async: the copy lands when it is waited for; until then its bytes are unwritten."""
    if flags[:1] != ["async"]:
        return None
    if "bulk" in flags:
        return None
    if "commit_group" in flags:
        return lambda group: machine.copies.commit(group)
    if "wait_group" in flags or "wait_all" in flags:
        left = instruction.operands[0] if "wait_group" in flags else -1
        return lambda group: machine.copies.wait(group, left)
    if not {"ca", "cg"} & set(flags):
        return None
    operands = list(instruction.operands)
    if "L2::cache_hint" in flags:
        operands.pop()
    target, origin, size, *short = operands
    to = Place(machine, function, target, ["shared"])
    come = Place(machine, function, origin, ["global"])
    real = machine.source(function, short[0], "u32") if short else None
    return lambda group: machine.copies.issue(group, to, come, size, real)
