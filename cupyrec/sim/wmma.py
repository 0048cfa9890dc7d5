"""wmma: matrices of 8 to 32 rows that a warp loads, multiplies and stores as a whole.

Which lane holds which element is the hardware's secret. Here slot s, counted along the elements of
lane 0, then lane 1, …, holds element s of the matrix, row by row, starting over at its end where
there are more slots. Memory is read and written 16 bytes a lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import access, memory
from cupyrec.sim.matrix import by_warp, narrowed, widened
from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupyrec.sim.machine import Group, Machine
    from cupyrec.sim.warp import Body

__all__ = ["decode"]

BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "s8": 1, "u8": 1, "s32": 4, "f64": 8}
WIDE = {"m16n16k16", "m32n8k16", "m8n32k16"}
SHAPES = {"f16": WIDE, "bf16": WIDE, "s8": WIDE, "u8": WIDE, "tf32": {"m16n16k8"},
          "f64": {"m8n8k4"}}  # fmt: skip
SUMS = {"f16": {"f16", "f32"}, "s8": {"s32"}, "u8": {"s32"}, "f64": {"f64"}}


def decode(machine: Machine, function: Function, instruction: Instruction) -> Body | None:
    """Return what all lanes of a warp do together, None for others."""
    root, name, *flags = instruction.parts
    shape = next((f for f in flags if f in {"m16n16k8", "m8n8k4", *WIDE}), None)
    if root != "wmma" or shape is None:
        return None
    m, rest = shape[1:].split("n")
    m, n, k = int(m), *map(int, rest.split("k"))
    sizes = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}
    if name == "mma":
        return _multiply(machine, function, instruction, sizes)
    maker = {"load": _load, "store": _store}.get(name)
    known = flags[-1] in BYTES and flags[0] in sizes
    return maker(machine, function, instruction, sizes[flags[0]]) if maker and known else None


def _kind(kind: str) -> str:
    return "b64" if kind == "f64" else "b32"


def _spread(elements: np.ndarray, registers: int, kind: str) -> np.ndarray:
    """(warps, 32, elements of a lane) of (warps, rows, columns)."""
    width = 8 if kind == "f64" else 4
    slots = np.arange(32 * registers * width // BYTES[kind]) % elements[0].size
    return elements.reshape(len(elements), -1)[:, slots].reshape(len(elements), 32, -1)


def _gathered(slots: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(warps, rows, columns) of (warps, 32, elements of a lane)."""
    return slots.reshape(len(slots), -1)[:, : size[0] * size[1]].reshape(-1, *size)


class _Lines:
    """Where a matrix lies: its rows, or columns, each in one run, `stride` elements apart."""

    def __init__(
        self, machine: Machine, function: Function, flags: list[str], size: tuple[int, int],
        address: object, stride: list,
    ) -> None:  # fmt: skip
        self.machine, self.item = machine, BYTES[flags[-1]]
        self.turned = "col" in flags
        self.lines, self.length = size[::-1] if self.turned else size
        self.place = access.Place(machine, function, address, flags)
        self.stride = machine.source(function, (stride or [self.length])[0], "u32")
        self.part = min(16, self.length * self.item)  # bytes of a lane
        self.many = self.length * self.item // self.part  # lanes to a line

    def visit(self, group: Group, writes: bool, move: Callable) -> None:
        """Call move(lanes, which part of each warp's each of them takes, addresses, found)."""
        lanes = by_warp(self.machine, group)
        for first in range(0, self.lines * self.many, 32):
            here = np.sort(lanes[:, : min(32, self.lines * self.many - first)].ravel())
            some = type(group)(here)
            which = self.machine.lane_id[here] + first
            step = self.stride[here].astype(np.int64) * self.item
            address = self.place.address(some.t) + which // self.many * step
            address += which % self.many * self.part
            found = self.place.touch(some, address, self.part, not writes, writes, True)
            move(np.searchsorted(lanes[:, 0] >> 5, here >> 5), which, address, found)

    def raw(self, warps: int) -> np.ndarray:
        """Parts of all lines: (warps, parts, 32-bit words)."""
        return np.zeros((warps, self.lines * self.many, self.part // 4), np.uint32)


def _load(
    machine: Machine, function: Function, instruction: Instruction, size: tuple[int, int]
) -> Body:
    flags = instruction.parts[3:]
    targets, address, *stride = instruction.operands
    targets, kind = access.listed(targets), flags[-1]
    puts = [machine.sink(function, x, _kind(kind)) for x in targets]
    lines, heap = _Lines(machine, function, flags, size, address, stride), machine.heap

    def body(group: Group, mask: np.ndarray) -> None:
        raw = lines.raw(group.warps.size)

        def read(warp: np.ndarray, which: np.ndarray, at: np.ndarray, found: np.ndarray) -> None:
            part = np.empty((at.size, raw.shape[2]), np.uint32)
            memory.load(at, found, heap.base, heap.words[4], part)
            raw[warp, which] = part

        lines.visit(group, False, read)
        elements = raw.view(f"u{lines.item}").reshape(-1, lines.lines, lines.length)
        if lines.turned:
            elements = elements.swapaxes(1, 2)
        slots = np.ascontiguousarray(_spread(elements, len(puts), kind))
        registers = slots.view(np.uint64 if kind == "f64" else np.uint32)
        lanes = by_warp(machine, group).ravel()
        for j, put in enumerate(puts):
            put(lanes, registers[:, :, j].ravel())

    return body


def _registers(sources: list, lanes: np.ndarray) -> np.ndarray:
    """(warps, 32, registers), lanes in the order of their ids."""
    return np.stack([s[lanes] for s in sources], axis=-1)


def _store(
    machine: Machine, function: Function, instruction: Instruction, size: tuple[int, int]
) -> Body:
    flags = instruction.parts[3:]
    address, values, *stride = instruction.operands
    sources = [machine.source(function, x, _kind(flags[-1])) for x in access.listed(values)]
    lines, heap = _Lines(machine, function, flags, size, address, stride), machine.heap

    def body(group: Group, mask: np.ndarray) -> None:
        registers = _registers(sources, by_warp(machine, group))
        elements = _gathered(registers.view(f"u{lines.item}"), size)
        if lines.turned:
            elements = elements.swapaxes(1, 2)
        raw = lines.raw(len(elements))
        raw[:] = np.ascontiguousarray(elements).view(np.uint32).reshape(raw.shape)

        def write(warp: np.ndarray, which: np.ndarray, at: np.ndarray, found: np.ndarray) -> None:
            memory.store(at, found, heap.base, heap.words[4], raw[warp, which], heap.written)

        lines.visit(group, True, write)

    return body


def _multiply(
    machine: Machine, function: Function, instruction: Instruction, sizes: dict
) -> Body | None:
    flags = set(instruction.parts)
    kinds = [p for p in instruction.parts if p in BYTES]
    if len(kinds) == 2:  # of sum and addend; factors are float16
        kinds[1:1] = ["f16", "f16"]
    to, left, right, addend = kinds
    shape = next(p for p in instruction.parts if p[0] == "m" and p[1:2].isdigit())
    sums = SUMS.get(left, {"f32"})
    if left != right or shape not in SHAPES.get(left, ()) or not {to, addend} <= sums:
        return None
    d, *operands = (access.listed(x) for x in instruction.operands)
    puts = [machine.sink(function, x, _kind(to)) for x in d]
    inputs = [
        (kind, size, [machine.source(function, x, _kind(kind)) for x in xs])
        for kind, size, xs in zip((left, right, addend), sizes.values(), operands, strict=False)
    ]

    def body(group: Group, mask: np.ndarray) -> None:
        lanes = by_warp(machine, group)
        a, b, c = (_gathered(widened(_registers(s, lanes), k), n) for k, n, s in inputs)
        values = np.ascontiguousarray(_spread(c + a @ b, len(d), to))
        raw = narrowed(values, to, "satfinite" in flags)
        for j, put in enumerate(puts):
            put(lanes.ravel(), raw[:, :, j].ravel())

    return body
