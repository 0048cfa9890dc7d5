"""mma and ldmatrix: small matrices spread over the lanes of a warp.

Products of 16-bit floats and tf32 are exact in float64; their sum is rounded once to the
accumulator, where the hardware's order of summation is its own secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import access, memory, rounding
from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine
    from cupyrec.sim.warp import Body

__all__ = ["WHOLE_WARP", "decode"]

WHOLE_WARP = {"mma", "ldmatrix"}  # all 32 lanes take part, no mask is named


def decode(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """Return what all lanes of a warp do together, None for others."""
    maker = {"mma": _multiply, "ldmatrix": _load_matrix}.get(instruction.parts[0])
    return maker(machine, function, instruction) if maker else None


def _places(rows: int, columns: int, per_register: int, transposed: bool) -> tuple:
    """(row, column) of each lane's elements in the order of its registers, each (32, elements).

    A lane's group is lane // 4. Along the long side of A (and C) rows, and of B columns, registers
    step by 8; along k they step by 4 registers' worth.
    """
    lane = np.arange(32)[:, None]
    group, inside = lane // 4, lane % 4
    e = np.arange(rows * columns // 32)[None, :]
    register, element = e // per_register, e % per_register
    if transposed:  # B: k by n, n = 8
        return inside * per_register + element + register * 4 * per_register, group + 0 * e
    halves = rows // 8
    row = group + 8 * (register % halves)
    return row, inside * per_register + element + register // halves * 4 * per_register


def _multiply(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    parts = instruction.parts
    shape, (to, kind, kind_b, kind_c) = parts[3], parts[-4:]
    per_register = {"f16": 2, "bf16": 2, "tf32": 1}.get(kind)
    known = {2: {"m16n8k8", "m16n8k16"}, 1: {"m16n8k4", "m16n8k8"}}.get(per_register, set())
    layout = parts[4:6] == ["row", "col"] and kind == kind_b and to == kind_c
    if shape not in known or not layout or to not in {"f32", "f16"}:
        return None
    k = int(shape.split("k")[1])
    d, a, b, c = instruction.operands
    c_step = 1 if to == "f32" else 2
    a_rows = _places(16, k, per_register, False)
    b_rows = _places(k, 8, per_register, True)
    lane = np.arange(32)[:, None]
    e = np.arange(4)[None, :]
    c_rows = lane // 4 + 8 * (e // 2), lane % 4 * 2 + e % 2
    puts = [machine.sink(function, x, "b32") for x in d]
    inputs = [[machine.source(function, x, "b32") for x in xs] for xs in (a, b, c)]
    lane_id = machine.lane_id

    def fragment(registers: list, lanes: np.ndarray, name: str) -> np.ndarray:
        """(warps, 32, elements) float64, lanes in the order of their ids."""
        raw = np.stack([r[lanes] for r in registers], axis=-1)
        if name in {"f16", "bf16"}:
            values = rounding.from_half(np.ascontiguousarray(raw).view(np.uint16), name)
        else:
            values = raw.view(np.float32)
        if name == "tf32":
            values = (raw & np.uint32(0xFFFFE000)).view(np.float32)
        return values.astype(np.float64)

    def body(group: Group, mask: np.ndarray) -> None:
        order = np.argsort((group.lanes >> 5) * 32 + lane_id[group.lanes], kind="stable")
        lanes = group.lanes[order].reshape(-1, 32)
        warps = np.arange(len(lanes))[:, None, None]
        left = np.zeros((len(lanes), 16, k))
        right = np.zeros((len(lanes), k, 8))
        total = np.zeros((len(lanes), 16, 8))
        left[(warps, *a_rows)] = fragment(inputs[0], lanes, kind)
        right[(warps, *b_rows)] = fragment(inputs[1], lanes, kind)
        total[(warps, *c_rows)] = fragment(inputs[2], lanes, to)
        result = (total + left @ right)[(warps, *c_rows)]
        if to == "f32":
            raw = result.astype(np.float32).view(np.uint32)
        else:
            raw = np.ascontiguousarray(rounding.to_half(result, "f16")).view(np.uint32)
        for j, put in enumerate(puts):
            put(lanes.ravel(), raw[:, :, j].ravel())

    return body if len(c) == 4 // c_step else None


def _load_matrix(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """Lane i of the first 8, 16 or 32 lanes names row i % 8 of matrix i // 8, 8 halves each."""
    flags = instruction.parts
    number = next((int(f[1:]) for f in flags if f in {"x1", "x2", "x4"}), 0)
    if not number or "m8n8" not in flags or flags[-1] != "b16":
        return None
    puts = [machine.sink(function, x, "b32") for x in instruction.operands[0]]
    place = access.Place(machine, function, instruction.operands[1], ["shared"])
    heap, transposed = machine.heap, "trans" in flags

    def body(group: Group, mask: np.ndarray) -> None:
        order = np.argsort((group.lanes >> 5) * 32 + machine.lane_id[group.lanes], kind="stable")
        lanes = group.lanes[order].reshape(-1, 32)
        naming = np.sort(lanes[:, : 8 * number].ravel())
        rows = np.zeros((machine.lanes, 8), np.uint16)
        readers = type(group)(naming)
        address = place.address(readers.t)
        found = place.touch(readers, address, 16, True, False, True)
        part = np.empty((naming.size, 8), np.uint16)
        memory.load(address, found, heap.base, heap.words[2], part)
        rows[naming] = part
        matrices = rows[lanes[:, : 8 * number]].reshape(-1, number, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(lanes), number, 32)
        for j, put in enumerate(puts):
            put(lanes.ravel(), pairs[:, j].ravel())

    return body
