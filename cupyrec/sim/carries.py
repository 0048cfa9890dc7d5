"""Sums, differences and products of many words: a bit of each thread carries from one to the next.

``add.cc`` sets it and ``addc`` adds it; compilers make 128-bit whole numbers out of these. A
difference is a + ~b + 1 and sets the bit where it does not borrow: NVIDIA's division of 128-bit
numbers reads it by ``addc`` after ``subc.cc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupyrec.sim import arithmetic
from cupyrec.sim.ptx import Function, Instruction

if TYPE_CHECKING:
    from cupyrec.sim.machine import Group, Machine, Step

__all__ = ["decode"]

ROOTS = {"add", "addc", "sub", "subc", "mad", "madc"}


def decode(machine: Machine, function: Function, instruction: Instruction) -> Step | None:
    """Return the step of one of these, None for others."""
    root, *flags, kind = instruction.parts
    parts = set(flags) - {"cc"}
    takes, sets, multiplies = root.endswith("c"), "cc" in flags, root.startswith("mad")
    if root not in ROOTS or not (takes or sets) or kind not in {"u32", "s32", "u64", "s64"}:
        return None
    if parts != (parts & {"lo", "hi"}) or len(parts) != multiplies:
        return None
    put = machine.sink(function, instruction.operands[0], kind)
    product = [machine.source(function, o, kind) for o in instruction.operands[1:3]]
    bits = f"u{kind[1:]}"
    terms = [machine.source(function, o, bits) for o in instruction.operands[1:]]
    carry = machine.carry()
    times = arithmetic.multiply("hi" if "hi" in parts else "lo")
    flip = np.invert if root.startswith("sub") else np.asarray
    start = root == "sub"

    def step(group: Group) -> None:
        t = group.t
        if multiplies:
            a, b = times(product[0][t], product[1][t]), terms[2][t]
        else:
            a, b = terms[0][t], terms[1][t]
        result, out = _sum(a.astype(b.dtype), flip(b), carry[t] if takes else start)
        put(t, result.view(product[0].dtype))
        if sets:
            carry[t] = out

    return step


def _sum(a: np.ndarray, b: np.ndarray, carry: np.ndarray | bool) -> tuple:
    """The sum, and what it carries."""
    total = a + b
    out = total < a
    if carry is False:
        return total, out
    total = total + np.asarray(carry, total.dtype)
    return total, out | (carry & (total == 0))
