"""What the lanes of a warp do together: shuffles, votes, matches, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["active", "decode"]

Body = Callable[["Group", np.ndarray], None]  # threads, and the mask that each of them names


def decode(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """Return what a ``.sync`` instruction does once its lanes have met."""
    root, *flags = instruction.parts
    if root == "bar" and flags == ["warp", "sync"]:
        return lambda group, mask: None
    maker = {"shfl": _shuffle, "vote": _vote, "match": _match, "redux": _reduce, "elect": _elect}
    return maker[root](machine, function, instruction) if root in maker else None


def _sinks(machine: Machine, function: Function, instruction: Instruction, kind: str) -> tuple:
    """put for ``d`` or for both of ``d|p``."""
    target = instruction.operands[0]
    value, predicate = target if isinstance(target, tuple) else (target, "_")
    return machine.sink(function, value, kind), machine.sink(function, predicate, "pred")


def _shuffle(machine: Machine, function: Function, instruction: Instruction) -> Body:
    mode = instruction.parts[2]
    put, put_predicate = _sinks(machine, function, instruction, "b32")
    a, b, c = (machine.source(function, o, "u32") for o in instruction.operands[1:4])

    def body(group: Group, mask: np.ndarray) -> None:
        t = group.t
        lane, step, control = (x.astype(np.int64) for x in (machine.lane_id[t], b[t] & 31, c[t]))
        clamp, segment = control & 31, control >> 8 & 31
        first = lane & segment
        last = first | clamp & ~segment
        if mode == "up":
            source, inside = lane - step, lane - step >= last
        elif mode == "down":
            source, inside = lane + step, lane + step <= last
        elif mode == "bfly":
            source, inside = lane ^ step, (lane ^ step) <= last
        else:
            source, inside = first | step & ~segment, (first | step & ~segment) <= last
        source = np.where(inside, source, lane)
        absent = (mask >> source.astype(np.uint32) & 1) == 0
        if absent.any():
            lanes = group.lanes[absent]
            machine.fault("shuffle", machine.trace[-1], int(lanes[0]),
                          "it reads a lane that does not take part")  # fmt: skip
        place = (group.lanes & ~31) | machine.place_of_lane[source]
        put(t, a[place])
        put_predicate(t, inside)

    return body


def _ballot(machine: Machine, group: Group, true: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Of each thread: the bits of those in its mask for which `true` holds."""
    lanes = group.lanes
    weights = np.where(true, machine.bit[lanes], 0)
    bits = np.bincount(lanes >> 5, weights=weights, minlength=machine.warp_steps.size)
    return bits.astype(np.int64).astype(np.uint32)[lanes >> 5] & mask


def active(machine: Machine, function: Function, instruction: Instruction) -> Step:
    """``activemask``: those that stand here now."""
    put = machine.sink(function, instruction.operands[0], "b32")
    every = np.uint32(0xFFFFFFFF)
    return lambda group: put(group.t, _ballot(machine, group, True, every))


def _vote(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    mode = instruction.parts[2]
    if mode not in {"ballot", "any", "all", "uni"}:
        return None
    kind = "b32" if mode == "ballot" else "pred"
    put = machine.sink(function, instruction.operands[0], kind)
    predicate = machine.source(function, instruction.operands[1], "pred")

    def body(group: Group, mask: np.ndarray) -> None:
        bits = _ballot(machine, group, predicate[group.t], mask)
        none, every = bits == 0, bits == mask
        put(group.t, {"ballot": bits, "any": ~none, "all": every, "uni": none | every}[mode])

    return body


def _match(machine: Machine, function: Function, instruction: Instruction) -> Body:
    mode, kind = instruction.parts[1], instruction.parts[-1]
    put, put_predicate = _sinks(machine, function, instruction, "b32")
    value = machine.source(function, instruction.operands[1], kind)

    def body(group: Group, mask: np.ndarray) -> None:
        warps, t = group.warps, group.t
        every = value[: machine.lanes].reshape(-1, 32)[warps]
        bit = machine.bit.reshape(-1, 32)[warps].astype(np.uint64)
        same = every[:, :, None] == every[:, None, :]
        bits = (same * bit[:, None, :]).sum(axis=2).astype(np.uint32)
        full = np.zeros((machine.warp_steps.size, 32), np.uint32)
        full[warps] = bits
        equal = full.ravel()[t] & mask
        if mode == "any":
            put(t, equal)
        else:
            put(t, np.where(equal == mask, mask, np.uint32(0)))
            put_predicate(t, equal == mask)

    return body


def _reduce(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    name, kind = instruction.parts[2], instruction.parts[-1]
    join = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
            "or": np.bitwise_or, "xor": np.bitwise_xor}.get(name)  # fmt: skip
    if join is None or kind not in {"u32", "s32", "b32"}:
        return None
    put = machine.sink(function, instruction.operands[0], kind)
    value = machine.source(function, instruction.operands[1], kind)

    def body(group: Group, mask: np.ndarray) -> None:
        key = (group.lanes >> 5 << 32) | mask.astype(np.int64)
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        parts = join.reduceat(value[group.t][order], starts)
        result = np.empty(key.size, parts.dtype)
        result[order] = np.repeat(parts, np.diff(starts, append=key.size))
        put(group.t, result)

    return body


def _elect(machine: Machine, function: Function, instruction: Instruction) -> Body:
    put, put_predicate = _sinks(machine, function, instruction, "b32")

    def body(group: Group, mask: np.ndarray) -> None:
        leader = np.bitwise_count((mask & (~mask + np.uint32(1))) - np.uint32(1))
        put(group.t, leader.astype(np.uint32))
        put_predicate(group.t, leader == machine.lane_id[group.t])

    return body
