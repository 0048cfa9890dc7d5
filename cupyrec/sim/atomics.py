"""Atomic reads and writes, one lane after the other; 16-bit floats, pairs and vectors too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cupyrec import cpu
from cupyrec.sim import access, memory
from cupyrec.sim.ptx import HALVES, Function, Instruction, dtype_of

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["decode"]

ADD, MIN, MAX, EXCH, CAS, AND, OR, XOR, INC, DEC = range(10)
NAMES = "add min max exch cas and or xor inc dec".split()
KINDS = {"b16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64", *HALVES}


@cpu.exact_loop
def _update(address, found, base, words, operation, b, c, old):
    """One lane after the other: old[i] = *address[i]; *address[i] = old[i] ∘ b[i]."""
    for i in range(address.size):
        if found[i] < 0 and found[i] != memory.UNWRITTEN:
            old[i] = 0
            continue
        j = (address[i] - base) // words.itemsize
        x = words[j]
        old[i] = x
        if operation == ADD:
            x += b[i]
        elif operation == MIN:
            x = min(x, b[i])
        elif operation == MAX:
            x = max(x, b[i])
        elif operation == EXCH:
            x = b[i]
        elif operation == CAS and x == b[i]:
            x = c[i]
        words[j] = x


@cpu.exact_loop
def _update_bits(address, found, base, words, operation, b, old):
    """The same of operations on bits and counters."""
    zero, one = words.dtype.type(0), words.dtype.type(1)
    for i in range(address.size):
        if found[i] < 0 and found[i] != memory.UNWRITTEN:
            old[i] = 0
            continue
        j = (address[i] - base) // words.itemsize
        x = words[j]
        old[i] = x
        if operation == AND:
            x &= b[i]
        elif operation == OR:
            x |= b[i]
        elif operation == XOR:
            x ^= b[i]
        elif operation == INC:
            x = zero if x >= b[i] else x + one
        elif operation == DEC:
            x = b[i] if x == zero or x > b[i] else x - one
        words[j] = x


@cpu.exact_loop
def _value(bits, fraction, bias):
    """What the bits of a 16-bit float stand for."""
    exponent = (bits & 0x7FFF) >> fraction
    size = bits & (1 << fraction) - 1
    if exponent == 2 * bias + 1:
        size = np.nan if size else np.inf
    elif exponent:
        size = math.ldexp(size + (1 << fraction), exponent - bias - fraction)
    else:
        size = math.ldexp(size, 1 - bias - fraction)
    return -size if bits >> 15 else size


@cpu.exact_loop
def _rounded(x, fraction, bias):
    """Bits of the 16-bit float nearest to x, ties to even."""
    if np.isnan(x):
        return 0x7FFF
    sign = 0x8000 if math.copysign(1.0, x) < 0 else 0
    top = (2 * bias + 1) << fraction
    if x == 0 or np.isinf(x):
        return sign | (top if x else 0)
    exponent = max(math.frexp(x)[1] - 1, 1 - bias)
    n = int(np.rint(math.ldexp(abs(x), fraction - exponent)))
    return sign | min(n + ((exponent + bias - 1) << fraction), top)


@cpu.exact_loop
def _update_halves(address, found, base, words, operation, b, fraction, bias, old):
    """The same of sums and extremes of 16-bit floats; a sum in float64 may be rounded again."""
    for i in range(address.size):
        if found[i] < 0 and found[i] != memory.UNWRITTEN:
            old[i] = 0
            continue
        j = (address[i] - base) // words.itemsize
        one, other = np.int64(words[j]), np.int64(b[i])
        old[i] = one
        x, y = _value(one, fraction, bias), _value(other, fraction, bias)
        if operation == ADD:
            words[j] = _rounded(x + y, fraction, bias)
        elif np.isnan(x) or np.isnan(y):
            words[j] = 0x7FFF if np.isnan(x) and np.isnan(y) else other if np.isnan(x) else one
        elif x == y:  # -0 is below +0
            words[j] = one | other if operation == MIN else one & other
        else:
            words[j] = one if (x < y) == (operation == MIN) else other


def decode(machine: Machine, function: Function, instruction: Instruction) -> Step | None:
    """Return the step of ``atom`` or ``red``, None for others."""
    root, *flags = instruction.parts
    name = next((f for f in flags if f in NAMES), None)
    if root not in {"atom", "red"} or name is None or flags[-1] not in KINDS:
        return None
    kind, size = flags[-1], access.nbytes(instruction)
    operation, half = NAMES.index(name), kind.removesuffix("x2")
    halves = half in HALVES
    if halves and operation > MAX:
        return None
    operands = list(instruction.operands)
    puts = []
    if root == "atom":
        puts = [machine.sink(function, o, kind) for o in access.listed(operands.pop(0))]
    place = access.Place(machine, function, operands.pop(0), flags)
    sources = [[machine.source(function, o, kind) for o in access.listed(x)] for x in operands]
    b, *c = sources[: 2 if operation == CAS else 1]  # else a policy of the cache may follow
    dtype, element = dtype_of(kind), np.dtype(np.uint16) if halves else dtype_of(kind)
    heap, steps = machine.heap, np.arange(0, size, element.itemsize)
    words = heap.bytes.view(element)
    _, acquires, releases, narrow = access.semantics(flags)
    layout = {"f16": (10, 15), "bf16": (7, 127)}.get(half)

    def row(columns: list, t: slice | np.ndarray) -> np.ndarray:
        """The elements of each thread, one thread after the other."""
        if len(columns) == 1:
            return np.ascontiguousarray(columns[0][t]).view(element)
        return np.stack([column[t] for column in columns], axis=1).view(element).ravel()

    def step(group: Group) -> None:
        t, now, lanes = group.t, machine.now, group.lanes
        address = place.address(t)
        found = place.touch(group, address, size, True, True, False)
        old = np.empty(address.size * steps.size, element)
        where, real = address, found
        if steps.size > 1:
            where, real = (address[:, None] + steps).ravel(), np.repeat(found, steps.size)
        value = row(b, t)
        if halves:
            _update_halves(where, real, heap.base, words, operation, value, *layout, old)
        elif operation <= CAS:
            other = row(c[0], t) if c else value
            _update(where, real, heap.base, words, operation, value, other, old)
        else:
            _update_bits(where, real, heap.base, words, operation, value, old)
        wrote = old == value if operation == CAS else np.ones(lanes.size, bool)
        machine.order.update(now, lanes, address, acquires, releases, narrow, wrote)
        for put, column in zip(puts, old.view(dtype).reshape(lanes.size, -1).T, strict=False):
            put(t, column)

    return step
