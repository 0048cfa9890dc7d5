"""Branches, calls, exits, and the places where threads wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import barriers, matrix, warp, wmma
from cupyrec.sim.ptx import Function, Instruction
from cupyrec.sim.threads import WARP, warps_of

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["decode", "release_stuck"]

FULL = 0xFFFFFFFF  # the mask of a warp


def decode(machine: Machine, function: Function, instruction: Instruction, pc: int) -> Step | None:
    """Return the step of an instruction that moves threads, None for others."""
    root, *flags = instruction.parts
    if root == "bra":
        return _branch(machine, function, instruction, pc)
    step = None
    if root == "brx":
        step = _indexed_branch(machine, function, instruction)
    elif root == "call":
        step = _call(machine, function, instruction, pc)
    elif root in {"ret", "exit"}:
        step = _return(machine, function, pc) if root == "ret" else _exit(machine)
    elif root == "activemask":
        step = warp.active(machine, function, instruction)
    elif root == "trap":
        step = _trap(machine, pc)
    elif root in {"bar", "barrier"} and "warp" not in flags:
        step = barriers.decode(machine, function, instruction, pc)
    elif "sync" in flags:
        step = _meet(machine, function, instruction, pc)
    if step and instruction.guard:
        return _split(machine, machine.source(function, instruction.guard, "pred"), step, pc)
    return step


def _split(machine: Machine, guard: np.ndarray, step: Step, pc: int) -> Step:
    """Those whose guard fails go on; the others take the step."""

    def guarded(group: Group) -> tuple | None:
        chosen = guard[group.t]
        if chosen.all():
            return step(group)
        machine.put(pc + 1, group.lanes[~chosen])
        taking = group.where(chosen)
        if taking is None:
            return pc + 1, None
        return step(taking) or (pc + 1, taking)

    return guarded


def _branch(machine: Machine, function: Function, instruction: Instruction, pc: int) -> Step:
    target = machine.program.start[function.name] + function.labels[instruction.operands[-1]]
    if not instruction.guard:
        return lambda group: (target, group)
    guard = machine.source(function, instruction.guard, "pred")

    def step(group: Group) -> tuple | None:
        chosen = guard[group.t]
        number = np.count_nonzero(chosen)
        if number == chosen.size:
            return target, group
        if not number:
            return None
        taken, rest = group.lanes[chosen], group.lanes[~chosen]
        parts = warps_of(taken).size + warps_of(rest).size
        machine.costs[pc]["divergent_branches"] += parts - group.warps.size
        if target > pc:
            machine.put(target, taken)
            return pc + 1, type(group)(rest)
        machine.put(pc + 1, rest)
        return target, type(group)(taken)

    return step


def _indexed_branch(machine: Machine, function: Function, instruction: Instruction) -> Step:
    index = machine.source(function, instruction.operands[0], "u32")
    start = machine.program.start[function.name]
    targets = [start + function.labels[label] for label in function.tables[instruction.operands[1]]]

    def step(group: Group) -> tuple:
        chosen = index[group.t]
        for i in np.unique(chosen):
            machine.put(targets[i], group.lanes[chosen == i])
        return 0, None

    return step


def _call(machine: Machine, function: Function, instruction: Instruction, pc: int) -> Step:
    operands = list(instruction.operands)
    returned = operands.pop(0) if isinstance(operands[0], tuple) else ()
    name, arguments = operands[0], operands[1] if len(operands) > 1 else ()
    if name == "vprintf":
        return lambda group: (pc + 1, group)  # nothing is printed
    if name == "__assertfail":
        return _trap(machine, pc, "assert")
    callee = machine.module.functions[name]

    def copies(mine: tuple, theirs: list) -> list:
        return [
            (machine.store(function, m, v.size), machine.store(callee, v.name, v.size))
            for m, v in zip(mine, theirs, strict=True)
        ]

    give = copies(arguments, callee.params)
    take = copies(returned, callee.returns)
    back = machine.returns.setdefault(name, np.zeros(machine.capacity, np.int64))
    machine.call_results[pc] = take
    target = machine.program.start[name]

    def step(group: Group) -> tuple:
        for mine, theirs in give:
            theirs[group.t] = mine[group.t]
        back[group.t] = pc
        return target, group

    return step


def _return(machine: Machine, function: Function, pc: int) -> Step:
    if function.entry:
        return _exit(machine)
    back = machine.returns[function.name]

    def step(group: Group) -> tuple:
        calls = back[group.t]
        for call in np.unique(calls).tolist():
            lanes = group.lanes[calls == call]
            for mine, theirs in machine.call_results[call]:
                mine[lanes] = theirs[lanes]
            machine.put(call + 1, lanes)
        return pc, None

    return step


def _exit(machine: Machine) -> Step:
    def step(group: Group) -> tuple:
        machine.exited[group.lanes] = True
        machine.alive -= np.bincount(machine.block[group.lanes], minlength=machine.alive.size)
        for barrier in machine.barriers.values():
            barrier.open()
        return 0, None

    return step


def _trap(machine: Machine, pc: int, kind: str = "trap") -> Step:
    leave = _exit(machine)

    def step(group: Group) -> tuple:
        machine.fault(kind, pc, int(group.lanes[0]), "the kernel stops itself")
        return leave(group)

    return step


# .sync instructions of a warp


def _meet(machine: Machine, function: Function, instruction: Instruction, pc: int) -> Step | None:
    """The lanes of a mask wait for each other, then do what the instruction says."""
    bodies = (m.decode(machine, function, instruction) for m in (warp, matrix, wmma))
    body = next((b for b in bodies if b is not None), None)
    if body is None:
        return None
    aligned = instruction.parts[0] in matrix.WHOLE_WARP
    operand = FULL if aligned else instruction.operands[-1]
    mask = machine.source(function, operand, "u32")
    place = np.int64(1) << (np.arange(machine.capacity) & 31)

    def step(group: Group) -> tuple | None:
        if aligned:
            short = machine.existing[group.t] != FULL
            if short.any():
                return _pass_by(machine, pc, group, short)
        lanes = group.lanes
        named = mask[group.t] & machine.existing[group.t]
        whole_warps = lanes.size == WARP * group.warps.size
        if pc in machine.parked:
            whole_warps = False
            lanes = np.sort(np.concatenate([*machine.parked.pop(pc), lanes]))
            named = mask[lanes] & machine.existing[lanes]
        warps = lanes >> 5
        if not whole_warps:
            bits, size = machine.bit[lanes], machine.warp_steps.size
            present = np.bincount(warps, weights=bits, minlength=size).astype(np.uint32)[warps]
            here = (named & ~present) == 0
            if not here.all():
                machine.parked[pc] = [lanes[~here]]
                lanes, named, warps = lanes[here], named[here], warps[here]
                if not lanes.size:
                    return pc, None
        if lanes is not group.lanes:  # as many may be others
            group = type(group)(lanes)
        body(group, named)
        met = group.warps
        if (named == machine.existing[lanes]).all():
            masks, whole = machine.existing_places[met], np.ones(met.size, bool)
        else:  # several masks in one warp, perhaps
            keys, which = np.unique((warps << 32) | named.astype(np.int64), return_inverse=True)
            masks = np.bincount(which, weights=place[lanes]).astype(np.int64)
            met = keys >> 32
            whole = masks == machine.existing_places[met]
        machine.order.sync(machine.now, met, masks, whole)
        return pc + 1, group

    return step


def _pass_by(machine: Machine, pc: int, group: Group, short: np.ndarray) -> tuple:
    """Fault those whose warp has less than 32 lanes and let them go on; others come again."""
    lanes = group.lanes[short]
    number = int(machine.existing[lanes[0]]).bit_count()
    machine.fault(
        "barrier", pc, int(lanes[0]),
        f"'{machine.code[pc][1].parts[0]}' needs 32 lanes, and this warp has {number}",
    )  # fmt: skip
    machine.put(pc + 1, lanes)
    return pc, group.where(~short)


def release_stuck(machine: Machine) -> bool:
    """When nobody can move: fault the waits that never end and let those threads go on."""
    for pc, parts in machine.parked.items():
        lanes = np.concatenate(parts)
        machine.fault("barrier", pc, int(lanes[0]), "lanes of its mask never reach it")
        machine.put(pc + 1, lanes)
    machine.parked.clear()
    barriers.release_stuck(machine)
    return bool(machine.queue)
