"""Instructions that work lane by lane: opcode -> (types of results, types of operands, function).

The function takes one array per operand and returns one array per result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyrec.sim import arithmetic, bits, convert, rounding
from cupyrec.sim.arithmetic import Rule
from cupyrec.sim.ptx import Instruction, dtype_of

__all__ = ["decode"]


_rules: dict[tuple, Rule | None] = {}


def decode(instruction: Instruction) -> Rule | None:
    """Return the rule of an instruction, None if it is none of these."""
    opcode, operands = instruction.opcode, instruction.operands
    key = opcode, isinstance((*operands, "")[0], tuple), opcode[:4] == "lop3" and operands[4:5]
    if key not in _rules:
        _rules[key] = _rule(instruction)
    return _rules[key]


def _rule(instruction: Instruction) -> Rule | None:
    root, *flags = instruction.parts
    if root == "cvt":
        return convert.decode(instruction)
    if root in arithmetic.FLOAT or root in arithmetic.WHOLE:
        return arithmetic.rule(root, flags, instruction)
    if root in {"setp", "set"}:
        return _set(root, flags, instruction)
    if root in {"selp", "slct"}:
        return _choose(root, flags, instruction)
    return bits.rule(root, flags, instruction)


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str, kind: str, ftz: bool) -> Callable | None:
    half = kind if kind in {"f16", "bf16"} else ""
    floating = "f" in kind
    unordered = floating and name not in COMPARE and name[:-1] in COMPARE and name.endswith("u")
    compare = COMPARE.get(name[:-1] if unordered else name)
    if name not in {"num", "nan"} and compare is None:
        return None

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if half:
            a, b = (rounding.from_half(np.ascontiguousarray(x), half) for x in (a, b))
        if ftz and not half:
            a, b = rounding.flush(a), rounding.flush(b)
        if not floating:
            return compare(a, b)
        nan = np.isnan(a) | np.isnan(b)
        if name in {"num", "nan"}:
            return nan if name == "nan" else ~nan
        return compare(a, b) | nan if unordered else compare(a, b) & ~nan

    return function


def _set(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """setp and set; q of ``p|q`` is for not p, and a third operand is joined by and, or, xor."""
    join = next((f for f in flags if f in {"and", "or", "xor"}), "")
    kind = flags[-1]
    compare = _comparison(flags[0], kind, "ftz" in flags)
    if compare is None:
        return None
    joint = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(join)

    def function(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> object:
        one = compare(a, b)
        p = joint(one, c[0]) if joint else one
        if root == "set":
            kind = flags[-2]
            return np.where(p, *((1, 0) if kind[0] == "f" else (-1, 0))).astype(dtype_of(kind))
        q = joint(~one, c[0]) if joint else ~one
        return (p, q) if isinstance(instruction.operands[0], tuple) else p

    results = ["pred"] * (2 if isinstance(instruction.operands[0], tuple) else 1)
    if root == "set":
        results = [flags[-2]]
    return results, [kind, kind] + ["pred"] * bool(joint), function


def _choose(root: str, flags: list[str], instruction: Instruction) -> Rule:
    kind = flags[-1] if root == "selp" else flags[-2]
    if root == "selp":
        return [kind], [kind, kind, "pred"], lambda a, b, p: np.where(p, a, b)
    return [kind], [kind, kind, flags[-1]], lambda a, b, c: np.where(c >= 0, a, b)
