"""mma, ldmatrix and their like: small matrices spread over the lanes of a warp.

Products of short floats and tf32 are exact in float64; their sum is rounded once to the
accumulator, where the hardware's order of summation is its own secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import access, convert, memory, rounding
from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine
    from cupyrec.sim.warp import Body

__all__ = ["WHOLE_WARP", "by_warp", "decode", "narrowed", "widened"]

WHOLE_WARP = {
    "mma",
    "wmma",
    "ldmatrix",
    "stmatrix",
    "movmatrix",
}  # all 32 lanes take part, no mask is named


def decode(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """Return what all lanes of a warp do together, None for others."""
    maker = {"mma": _multiply, "ldmatrix": _load_matrix, "stmatrix": _store_matrix,
             "movmatrix": _transpose}.get(instruction.parts[0])  # fmt: skip
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


# type -> elements in a register, shapes
SHAPES = {
    "f16": (2, {"m16n8k8", "m16n8k16"}),
    "tf32": (1, {"m16n8k4", "m16n8k8"}),
    "s8": (4, {"m8n8k16", "m16n8k16", "m16n8k32"}),
    "s4": (8, {"m8n8k32", "m16n8k32", "m16n8k64"}),
    "e4m3": (4, {"m16n8k16", "m16n8k32"}),
    "f64": (1, {"m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"}),
}
FAMILY = {"bf16": "f16", "u8": "s8", "u4": "s4", "e5m2": "e4m3"}
RESULTS = {"f16": {"f32", "f16"}, "tf32": {"f32"}, "e4m3": {"f32", "f16"}, "f64": {"f64"},
           "s8": {"s32"}, "s4": {"s32"}}  # fmt: skip


def widened(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers that registers hold, those of a lane along the last axis."""
    raw = np.ascontiguousarray(raw)
    if kind in {"f16", "bf16"}:
        return rounding.from_half(raw.view(np.uint16), kind).astype(np.float64)
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in {"e4m3", "e5m2"}:
        return convert.values_of_codes(f"{kind}x2")[raw.view(np.uint8)]
    if kind in {"s4", "u4"}:
        both = raw.view(np.uint8)[..., None] >> np.array([0, 4], np.uint8) & 15
        both = both.reshape(*raw.shape[:-1], -1).astype(np.int64)
        return both - 16 * (both >> 3) if kind == "s4" else both
    dtype = {"s8": np.int8, "u8": np.uint8, "s32": np.int32, "f32": np.float32}.get(kind)
    return raw.view(dtype or np.float64).astype(np.int64 if dtype and kind[0] in "su" else float)


def narrowed(values: np.ndarray, kind: str, saturated: bool) -> np.ndarray:
    """Return the registers that hold a result: wrapped or clamped, or rounded once."""
    if kind == "f16":
        return np.ascontiguousarray(rounding.to_half(values, kind)).view(np.uint32)
    if kind == "s32":
        low, high = -(2**31), 2**31 - 1
        values = np.clip(values, low, high) if saturated else values
        return values.astype(np.int32).view(np.uint32)
    return values.view(np.uint64) if kind == "f64" else values.astype(np.float32).view(np.uint32)


def by_warp(machine: Machine, group: Group) -> np.ndarray:
    """Return (warps, 32) lanes in the order of their ids."""
    order = np.argsort((group.lanes >> 5) * 32 + machine.lane_id[group.lanes], kind="stable")
    return group.lanes[order].reshape(-1, 32)


def _multiply(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    parts = instruction.parts
    shape, (to, kind, kind_b, kind_c) = parts[3], parts[-4:]
    family = FAMILY.get(kind, kind)
    per_register, known = SHAPES.get(family, (0, set()))
    layout = parts[4:6] == ("row", "col") and family == FAMILY.get(kind_b, kind_b) and to == kind_c
    mixed = kind != kind_b and family == "f16"
    flags = set(parts[6:-4])
    if shape not in known or not layout or mixed or to not in RESULTS[family]:
        return None
    if not flags <= ({"satfinite"} if to == "s32" else {"rn"} if to == "f64" else set()):
        return None
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    d, a, b, c = (access.listed(x) for x in instruction.operands)
    a_rows = _places(m, k, per_register, False)
    b_rows = _places(k, 8, per_register, True)
    lane = np.arange(32)[:, None]
    e = np.arange(m // 4)[None, :]
    c_rows = lane // 4 + 8 * (e // 2), lane % 4 * 2 + e % 2
    register = "b64" if family == "f64" else "b32"
    puts = [machine.sink(function, x, register) for x in d]
    inputs = [[machine.source(function, x, register) for x in xs] for xs in (a, b, c)]

    def fragment(registers: list, lanes: np.ndarray, name: str) -> np.ndarray:
        """(warps, 32, elements), lanes in the order of their ids."""
        return widened(np.stack([r[lanes] for r in registers], axis=-1), name)

    def body(group: Group, mask: np.ndarray) -> None:
        lanes = by_warp(machine, group)
        warps = np.arange(len(lanes))[:, None, None]
        number = np.int64 if to == "s32" else np.float64
        left = np.zeros((len(lanes), m, k), number)
        right = np.zeros((len(lanes), k, 8), number)
        total = np.zeros((len(lanes), m, 8), number)
        left[(warps, *a_rows)] = fragment(inputs[0], lanes, kind)
        right[(warps, *b_rows)] = fragment(inputs[1], lanes, kind_b)
        total[(warps, *c_rows)] = fragment(inputs[2], lanes, to)
        result = (total + left @ right)[(warps, *c_rows)]
        raw = narrowed(result, to, "satfinite" in flags)
        for j, put in enumerate(puts):
            put(lanes.ravel(), raw[:, :, j].ravel())

    sizes = [len(x) * per_register for x in (a, b)] == [m * k // 32, k // 4]
    return body if sizes and len(c) == m // 4 // (2 if to == "f16" else 1) else None


def _transpose(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """movmatrix: 8 by 8 halves, two of a row to a lane."""
    if instruction.parts[3:] != ("m8n8", "trans", "b16"):
        return None
    put = machine.sink(function, instruction.operands[0], "b32")
    source = machine.source(function, instruction.operands[1], "b32")

    def body(group: Group, mask: np.ndarray) -> None:
        lanes = by_warp(machine, group)
        halves = np.ascontiguousarray(source[lanes]).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32)
        put(lanes.ravel(), turned.ravel())

    return body


def _store_matrix(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """stmatrix: the way back of ldmatrix."""
    flags = instruction.parts
    number = next((int(f[1:]) for f in flags if f in {"x1", "x2", "x4"}), 0)
    if not number or "m8n8" not in flags or flags[-1] != "b16":
        return None
    place = access.Place(machine, function, instruction.operands[0], ["shared"])
    values = access.listed(instruction.operands[1])
    sources = [machine.source(function, x, "b32") for x in values]
    heap, transposed = machine.heap, "trans" in flags

    def body(group: Group, mask: np.ndarray) -> None:
        lanes = by_warp(machine, group)
        raw = np.stack([np.ascontiguousarray(s[lanes]) for s in sources], axis=1)
        matrices = raw.view(np.uint16).reshape(-1, number, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.zeros((machine.lanes, 8), np.uint16)
        rows[lanes[:, : 8 * number].ravel()] = matrices.reshape(-1, 8)
        naming = np.sort(lanes[:, : 8 * number].ravel())
        writers = type(group)(naming)
        address = place.address(writers.t)
        found = place.touch(writers, address, 16, False, True, True)
        memory.store(address, found, heap.base, heap.words[2], rows[naming], heap.written)

    return body if len(sources) == number else None


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
        lanes = by_warp(machine, group)
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
