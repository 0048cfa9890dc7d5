"""cvt: between whole numbers, float formats and their packed pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyrec.sim import directed, rounding
from cupyrec.sim.arithmetic import Rule
from cupyrec.sim.ptx import Instruction, dtype_of

__all__ = ["decode", "values_of_codes"]

WHOLE_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
DIRECTED = {"rz", "rm", "rp"}
HALVES = {"f16", "bf16"}


def decode(instruction: Instruction) -> Rule | None:
    """Return the rule of a cvt, None where its formats or rounding are not known."""
    *flags, to, source = instruction.parts[1:]
    if (rule := _eight_bits(flags, to, source)) is not None:
        return rule
    relu = "relu" in flags
    rest = set(flags) - {"ftz", "sat", "relu"}
    mode = next(iter(rest), "rn")
    known = {"rn", "rz", "rm", "rp", "rna", *WHOLE_ROUNDING}
    if len(rest) > 1 or mode not in known:
        return None
    if to in {"f16x2", "bf16x2"} and source == "f32" and mode in {"rn", "rz"}:
        name = to.removesuffix("x2")
        positive = _positive if relu else np.asarray
        return [to], ["f32", "f32"], lambda a, b: _pair(positive(a), positive(b), name, mode)
    if relu and not (to in HALVES and source == "f32"):
        return None
    if to == "tf32" and source == "f32":
        return ["b32"], ["f32"], lambda a: _tf32(a, mode)
    kinds = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"}
    if to not in kinds or source not in kinds or mode == "rna":
        return None
    ftz, saturated = "ftz" in flags, "sat" in flags
    widen = _widen(source, ftz)
    if "f" not in to:
        function = _to_whole(to, source, mode, saturated)
    else:
        function = _to_float(to, source, mode, ftz, saturated)
    if relu:
        return [to], [source], lambda a: function(_positive(widen(a)))
    return [to], [source], lambda a: function(widen(a))


def _positive(a: np.ndarray) -> np.ndarray:
    return np.where(a <= 0, a.dtype.type(0), a)


# 8-bit floats: bits of the fraction, bias of the exponent, largest finite code
EIGHT = {"e4m3x2": (3, 7, 0x7E), "e5m2x2": (2, 15, 0x7B)}


def values_of_codes(name: str) -> np.ndarray:
    """Return what the 256 codes of ``e4m3x2`` or ``e5m2x2`` stand for."""
    fraction, bias, largest = EIGHT[name]
    code = np.arange(128)
    exponent, size = code >> fraction, code & (1 << fraction) - 1
    size = np.where(exponent > 0, size + (1 << fraction), size).astype(np.float64)
    values = np.ldexp(size, np.maximum(exponent, 1) - bias - fraction)
    values[largest + 1 :] = np.nan
    if name == "e5m2x2":
        values[largest + 1] = np.inf
    return np.concatenate([values, -values])


def _code(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of the nearest values, ties to even; the largest one for all that is larger."""
    fraction, bias, largest = EIGHT[name]
    x = x.astype(np.float64)
    size = np.minimum(np.abs(x), values_of_codes(name)[largest])
    exponent = np.maximum(np.frexp(size)[1] - 1, 1 - bias)
    exponent = np.where(np.isnan(x) | (size == 0), 1 - bias, exponent)
    steps = np.rint(np.ldexp(np.where(np.isnan(x), 0, size), fraction - exponent))
    bits = steps.astype(np.int64) + ((exponent + bias - 1) << fraction)
    bits |= np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, bits).astype(np.uint16)


def _eight_bits(flags: list[str], to: str, source: str) -> Rule | None:
    """Pairs of 8-bit floats from float32 or pairs of float16, and back to those."""
    rest, function = set(flags) - {"relu"}, _positive if "relu" in flags else np.asarray
    if to in EIGHT and source in {"f32", "f16x2"} and rest == {"rn", "satfinite"}:

        def narrow(*x: np.ndarray) -> np.ndarray:
            if source == "f16x2":
                halves = np.ascontiguousarray(x[0])[:, None].view(np.float16)
                x = halves[:, 1], halves[:, 0]
            high, low = (_code(function(v), to) for v in x)
            return high << np.uint16(8) | low

        return ["b16"], ["f32", "f32"] if source == "f32" else ["b32"], narrow
    if to == "f16x2" and source in EIGHT and rest == {"rn"}:
        table = rounding.to_half(function(values_of_codes(source)), "f16")

        def widened(a: np.ndarray) -> np.ndarray:
            both = np.ascontiguousarray(a)[:, None].view(np.uint8)
            return np.ascontiguousarray(table[both]).view(np.uint32)[:, 0]

        return ["b32"], ["b16"], widened
    return None


def _widen(source: str, ftz: bool) -> Callable:
    if source in HALVES:
        return lambda a: rounding.from_half(np.ascontiguousarray(a), source)
    return rounding.flush if source == "f32" and ftz else np.asarray


def _to_whole(to: str, source: str, mode: str, saturated: bool) -> Callable:
    kind = dtype_of(to)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    if "f" not in source:
        if not saturated:
            return lambda a: a.astype(kind)
        floor, ceiling = np.iinfo(dtype_of(source)).min, np.iinfo(dtype_of(source)).max
        return lambda a: np.clip(a, max(low, floor), min(high, ceiling)).astype(kind)
    nan = 1 << 8 * kind.itemsize - 1 if source == "f64" or kind.itemsize == 8 else 0

    def function(a: np.ndarray) -> np.ndarray:
        x = WHOLE_ROUNDING[mode](a.astype(np.float64))
        inside = np.where((x >= low) & (x < float(high) + 1), x, 0).astype(kind)
        result = np.where(x >= float(high) + 1, kind.type(high), inside)
        result = np.where(x < low, kind.type(low), result)
        return np.where(np.isnan(x), np.array(nan, np.uint64).astype(kind), result)

    return function if mode in WHOLE_ROUNDING else None


def _to_float(to: str, source: str, mode: str, ftz: bool, saturated: bool) -> Callable:
    def function(a: np.ndarray) -> np.ndarray:
        if mode in WHOLE_ROUNDING:
            a = WHOLE_ROUNDING[mode](a)
        if to == "f64" and a.dtype in (np.int64, np.uint64) and mode in DIRECTED:
            result = directed.whole_to_float64(a, mode)
        elif to == "f32" and mode in DIRECTED:
            result = rounding.round_float32(_odd_float64(a), mode)
        elif to in HALVES:
            result = rounding.saturate(a) if saturated else a
            return rounding.to_half(_odd_float64(result), to, mode if mode in DIRECTED else "rn")
        else:
            result = a.astype(dtype_of(to))
        if ftz and to == "f32":
            result = rounding.flush(result)
        return rounding.saturate(result) if saturated else result

    return function


def _odd_float64(a: np.ndarray) -> np.ndarray:
    """float64 of any number, rounded to odd where 64-bit whole numbers do not fit."""
    x = a.astype(np.float64)
    if a.dtype.kind == "f" or a.dtype.itemsize < 8:
        return x
    size = np.abs(a).astype(np.uint64)
    down = np.where(size >= 2**53, size & ~np.uint64(0x7FF), size)  # what float64 holds exactly
    bits = down.astype(np.float64).view(np.int64) | (down != size)
    return np.copysign(bits.view(np.float64), x)


def _pair(a: np.ndarray, b: np.ndarray, name: str, mode: str) -> np.ndarray:
    high, low = (rounding.to_half(x, name, mode).astype(np.uint32) for x in (a, b))
    return high << 16 | low


def _tf32(a: np.ndarray, mode: str) -> np.ndarray:
    """To 10 bits of fraction: to nearest, ties away from zero (rna) or to even (rn)."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    bias = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + (bits >> 13 & 1)
    return np.where(np.isfinite(a), (bits + bias) & np.uint32(0xFFFFE000), bits)
