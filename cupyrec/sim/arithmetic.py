"""Sums, products, quotients, extremes and functions of whole numbers and floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyrec.sim import rounding
from cupyrec.sim.ptx import HALVES, Instruction

__all__ = ["FLOAT", "WHOLE", "multiply", "rule"]

Rule = tuple[list[str], list[str], Callable]  # types of results and operands, function
MODES = {"rn", "rz", "rm", "rp"}
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def _split(flags: list[str]) -> tuple[str, str, bool, bool, set[str]]:
    """(type, rounding, ftz, sat, other flags) of an arithmetic instruction."""
    kind, rest = flags[-1], set(flags[:-1])
    mode = next(iter(rest & MODES), "rn")
    return kind, mode, "ftz" in rest, "sat" in rest, rest - MODES - {"ftz", "sat"}


# Whole numbers


def _wide(x: np.ndarray) -> np.ndarray:
    """Twice as many bits of the same signedness."""
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


def _multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    if bits < 64:
        return (_wide(a) * _wide(b) >> bits).astype(a.dtype)
    ua, ub = a.astype(np.uint64), b.astype(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a1, a0, b1, b0 = ua >> half, ua & low, ub >> half, ub & low
    middle = (a0 * b0 >> half) + a1 * b0
    high = a1 * b1 + (middle >> half) + ((middle & low) + a0 * b1 >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.astype(a.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Toward zero; all bits set where b is 0, as the hardware happens to."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q = q + ((a - q * safe != 0) & ((a < 0) ^ (safe < 0)))
    return np.where(b == 0, np.array(-1).astype(a.dtype), q)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divide(a, b) * b if a.dtype.kind == "i" else np.where(b == 0, a, a - a // np.where(
        b == 0, b.dtype.type(1), b) * b)  # fmt: skip


def _clipped_add(a: np.ndarray, b: np.ndarray, sign: int) -> np.ndarray:
    return np.clip(_wide(a) + sign * _wide(b), -(2**31), 2**31 - 1).astype(a.dtype)


WHOLE = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "div": _divide,
    "rem": _remainder, "neg": np.negative, "abs": np.abs,
}  # fmt: skip


def multiply(part: str) -> Callable:
    """Return the product's ``lo`` or ``hi`` half, or all of it, ``wide``."""
    if part == "hi":
        return _multiply_high
    if part == "wide":
        return lambda a, b: _wide(a) * _wide(b)
    return np.multiply


def _twice(kind: str, rest: set[str]) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}" if "wide" in rest else kind


# Floating point


def _zeros_apart(pick: Callable, join: Callable) -> Callable:
    """min or max that passes over NaN and holds -0 below +0."""

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = f"u{a.itemsize}"
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        both = join(a.view(bits), b.view(bits)).view(a.dtype)
        return np.where(a == b, both, pick(a, b))

    return function


FLOAT_MIN = _zeros_apart(np.fmin, np.bitwise_or)
FLOAT_MAX = _zeros_apart(np.fmax, np.bitwise_and)
FLOAT = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": FLOAT_MIN,
    "max": FLOAT_MAX, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt,
    "fma": rounding.multiply_add, "mad": rounding.multiply_add,
    "rcp": lambda x: x.dtype.type(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(x.dtype),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(x.dtype),
    "sin": lambda x: np.sin(x.astype(np.float64)).astype(x.dtype),
    "cos": lambda x: np.cos(x.astype(np.float64)).astype(x.dtype),
    "tanh": lambda x: np.tanh(x.astype(np.float64)).astype(x.dtype),
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
OPERANDS = {"fma": 3, "mad": 3, "dp4a": 3} | dict.fromkeys(
    ["neg", "abs", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "not", "cnot"], 1
)


def _directed(root: str, mode: str) -> Callable | None:
    """The float32 operation rounded by `mode`; only these are known in other modes than rn."""
    one = np.float32(1)
    return {
        "add": lambda a, b: rounding.fused(mode, False)(a, one, b),
        "sub": lambda a, b: rounding.fused(mode, False)(a, one, -b),
        "mul": lambda a, b: rounding.fused(mode, False)(a, b, np.float32(-0.0)),
        "fma": rounding.fused(mode, False),
        "mad": rounding.fused(mode, False),
    }.get(root)


def _float32(root: str, mode: str, ftz: bool, sat: bool) -> Callable | None:
    if root in {"fma", "mad"} and not sat:
        return rounding.fused(mode, ftz)
    plain = FLOAT[root] if mode == "rn" else _directed(root, mode)
    if plain is None:
        return None
    if not (ftz or sat):
        return plain
    inside = rounding.flush if ftz else np.asarray

    def function(*operands: np.ndarray) -> np.ndarray:
        result = inside(plain(*(inside(x) for x in operands)))
        return rounding.saturate(result) if sat else result

    return function


def _passing_nan(pick: Callable) -> Callable:
    """min or max that returns NaN where an operand is NaN."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), pick(a, b))


def _quiet(function: Callable) -> Callable:
    """The function with the one NaN that the hardware returns."""

    def quieted(*operands: np.ndarray) -> np.ndarray:
        result = np.asarray(function(*operands), np.float32)
        nan = np.isnan(result)
        if nan.any():
            result[nan] = NAN
        return result

    return quieted


def _half(root: str, kind: str) -> Callable:
    """Operations of 16-bit floats, one or two to a lane: exact or odd in float64, rounded once."""
    name, two = kind.removesuffix("x2"), kind.endswith("x2")

    def function(*operands: np.ndarray) -> np.ndarray:
        bits = [np.ascontiguousarray(x) for x in operands]
        if root in {"neg", "abs"}:
            sign = bits[0].dtype.type(0x80008000 if two else 0x8000)
            return bits[0] ^ sign if root == "neg" else bits[0] & ~sign
        values = [rounding.from_half(x.view(np.uint16), name) for x in bits]
        if root == "fma":
            result = rounding.odd_product_sum(*values)
        elif root in {"add", "sub"}:
            second = -values[1] if root == "sub" else values[1]
            result = rounding.odd_product_sum(values[0], np.float32(1), second)
        else:
            result = FLOAT[root](*(x.astype(np.float64) for x in values))
        return rounding.to_half(result, name).view(bits[0].dtype)

    return function


def rule(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """Return the rule of an instruction, None if its flags are not known."""
    kind, mode, ftz, sat, rest = _split(flags)
    operands = OPERANDS.get(root, 2)
    rest -= {"approx", "full", "rni", "noftz"}
    if kind[0] in "suo" and "f" not in kind:
        result = _twice(kind, rest)
        if root == "mul" and rest <= {"lo", "hi", "wide"}:
            return [result], [kind] * 2, multiply(*rest)
        if root == "mad" and rest <= {"lo", "hi", "wide"}:
            times = multiply(*rest)
            return [result], [kind, kind, result], lambda a, b, c: times(a, b) + c
        if sat and kind == "s32" and root in {"add", "sub"}:
            sign = 1 if root == "add" else -1
            return [kind], [kind] * 2, lambda a, b: _clipped_add(a, b, sign)
        if root in WHOLE and not rest and not sat:
            return [kind], [kind] * operands, WHOLE[root]
        return None
    if rest - {"NaN"} or root not in FLOAT or root == "rem":
        return None
    if kind in HALVES:
        known = {"add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh"}
        ok = root in known and not (sat or rest or mode != "rn")
        return ([kind], [kind] * operands, _half(root, kind)) if ok else None
    if kind == "f32":
        function = _float32(root, mode, ftz, sat)
    else:
        function = FLOAT[root] if kind == "f64" and mode == "rn" and not sat else None
    if function and "NaN" in rest:
        function = _passing_nan(function)
    if function and kind == "f32" and root not in {"neg", "abs", "copysign"}:
        function = _quiet(function)
    return ([kind], [kind] * operands, function) if function else None
