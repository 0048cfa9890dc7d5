"""Sums, products, quotients, extremes and functions of whole numbers and floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyrec.sim import directed, rounding
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


def _packed(function: Callable) -> Callable:
    """The function on both halves of 32 bits."""

    def two(*operands: np.ndarray) -> np.ndarray:
        kind = f"{operands[0].dtype.kind}2"
        parts = [np.ascontiguousarray(x).view(kind) for x in operands]
        return function(*parts).view(operands[0].dtype)

    return two


def _multiply_24(root: str, kind: str, part: str) -> Callable:
    """Of the 48 bits of a product of 24-bit numbers the lower 32, or those from 16 on."""

    def low(x: np.ndarray) -> np.ndarray:
        eight = x.dtype.type(8)
        return _wide((x << eight) >> eight)

    def function(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        product = (low(a) * low(b) >> (16 if part == "hi" else 0)).astype(a.dtype)
        return product + c[0] if c else product

    return function


WHOLE = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "div": _divide,
    "rem": _remainder, "neg": np.negative, "abs": np.abs, "mul24": None, "mad24": None,
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
SATURATED = {"add", "sub", "mul", "fma"}
OPERANDS = {"fma": 3, "mad": 3, "mad24": 3} | dict.fromkeys(
    ["neg", "abs", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "not", "cnot"], 1
)


def _float32(root: str, mode: str, ftz: bool, sat: bool) -> Callable | None:
    if root in {"fma", "mad"} and mode == "rn" and not sat:
        return rounding.fused(ftz)
    plain = FLOAT[root] if mode == "rn" else directed.float32(root, mode)
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
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), pick(a, b))


def _xor_sign(pick: Callable) -> Callable:
    """min or max of sizes, with the sign of the product."""
    return lambda a, b: np.copysign(pick(np.abs(a), np.abs(b)), np.where(
        np.signbit(a) ^ np.signbit(b), a.dtype.type(-1), a.dtype.type(1)))  # fmt: skip


def _quiet(function: Callable) -> Callable:
    """The function with the one NaN that the hardware returns."""

    def quieted(*operands: np.ndarray) -> np.ndarray:
        result = np.asarray(function(*operands), np.float32)
        nan = np.isnan(result)
        if nan.any():
            result[nan] = NAN
        return result

    return quieted


def _half(root: str, kind: str, sat: bool, rest: set[str]) -> Callable:
    """Operations of 16-bit floats, one or two to a lane: exact or odd in float64, rounded once."""
    name, two = kind.removesuffix("x2"), kind.endswith("x2")
    operation = _passing_nan(FLOAT[root]) if "NaN" in rest else FLOAT[root]
    operation = _xor_sign(operation) if "xorsign" in rest else operation

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
            result = operation(*(x.astype(np.float64) for x in values))
        if sat:
            result = rounding.saturate(result)
        if "relu" in rest:
            result = np.where(result <= 0, 0, result)
        return rounding.to_half(result, name).view(bits[0].dtype)

    return function


def _whole(root: str, kind: str, sat: bool, rest: set[str]) -> Rule | None:
    """The rule of an operation of whole numbers."""
    result, operands = _twice(kind, rest), OPERANDS.get(root, 2)
    if root in {"mul", "mad"}:
        if not rest <= {"lo", "hi", "wide"} or sat:
            return None
        times = multiply(*rest)
        if root == "mul":
            return [result], [kind] * 2, times
        return [result], [kind, kind, result], lambda a, b, c: times(a, b) + c
    if root in {"mul24", "mad24"}:
        known = rest <= {"lo", "hi"} and kind in {"s32", "u32"} and not sat
        return ([kind], [kind] * operands, _multiply_24(root, kind, *rest)) if known else None
    if sat and kind == "s32" and root in {"add", "sub"}:
        sign = 1 if root == "add" else -1
        return [kind], [kind] * 2, lambda a, b: _clipped_add(a, b, sign)
    function = WHOLE.get(root)
    if function is None or sat:
        return None
    if rest == {"relu"} and root in {"min", "max"} and kind in {"s32", "s16x2"}:
        return _whole_relu(kind, function)
    if rest:
        return None
    if kind.endswith("x2"):
        return ([kind], [kind] * 2, _packed(function)) if root in {"add", "min", "max"} else None
    return [kind], [kind] * operands, function


def _whole_relu(kind: str, pick: Callable) -> Rule:
    def positive(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(pick(a, b), a.dtype.type(0))

    return [kind], [kind] * 2, _packed(positive) if kind.endswith("x2") else positive


def _two_floats(function: Callable) -> Callable:
    """The function on both float32 of 64 bits."""

    def two(*operands: np.ndarray) -> np.ndarray:
        parts = [np.ascontiguousarray(x).view(np.float32) for x in operands]
        return np.asarray(function(*parts), np.float32).view(operands[0].dtype)

    return two


def rule(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """Return the rule of an instruction, None if its flags are not known."""
    if flags[-1] == "relu":  # after the type, of whole numbers
        flags = [flags[-1], *flags[:-1]]
    kind, mode, ftz, sat, rest = _split(flags)
    operands = OPERANDS.get(root, 2)
    rest -= {"approx", "full", "rni", "noftz"}
    if kind[0] in "suo" and "f" not in kind:
        return _whole(root, kind, sat, rest)
    signs = rest & {"xorsign", "abs"}
    known = {"NaN", "xorsign", "abs"} if root in {"min", "max"} else set()
    if kind in HALVES:
        known |= {"relu"} if root in {"fma", "min", "max"} else set()
    if rest - known or len(signs) == 1 or root not in FLOAT or root == "rem":
        return None
    if kind in HALVES:
        names = {"add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh"}
        ok = root in names and mode == "rn" and not (sat and (rest or root not in SATURATED))
        return ([kind], [kind] * operands, _half(root, kind, sat, rest)) if ok else None
    if kind in {"f32", "f32x2"}:
        function = _float32(root, mode, ftz, sat)
    elif kind == "f64" and not sat:
        function = FLOAT[root] if mode == "rn" else directed.float64(root, mode)
    else:
        function = None
    if function and "NaN" in rest:
        function = _passing_nan(function)
    if function and signs:
        function = _xor_sign(function)
    if function and kind != "f64" and root not in {"neg", "abs", "copysign"}:
        function = _quiet(function)
    if function and kind == "f32x2":
        function = _two_floats(function) if root in {"add", "sub", "mul", "fma"} else None
    return ([kind], [kind] * operands, function) if function else None
