"""cvt: between whole numbers, float formats and their packed pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyrec.sim import rounding
from cupyrec.sim.arithmetic import Rule
from cupyrec.sim.ptx import Instruction, dtype_of

__all__ = ["decode"]

WHOLE_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
HALVES = {"f16", "bf16"}


def decode(instruction: Instruction) -> Rule | None:
    """Return the rule of a cvt, None where its formats or rounding are not known."""
    *flags, to, source = instruction.parts[1:]
    rest = set(flags) - {"ftz", "sat"}
    mode = next(iter(rest), "rn")
    known = {"rn", "rz", "rm", "rp", "rna", *WHOLE_ROUNDING}
    if len(rest) > 1 or mode not in known:
        return None
    if to in {"f16x2", "bf16x2"} and source == "f32" and mode in {"rn", "rz"}:
        name = to.removesuffix("x2")
        return [to], ["f32", "f32"], lambda a, b: _pair(a, b, name, mode)
    if to == "tf32" and source == "f32":
        return ["b32"], ["f32"], lambda a: _tf32(a, mode)
    kinds = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64"}
    if to not in kinds or source not in kinds:
        return None
    if (to in HALVES and mode not in {"rn", "rz"}) or (to == "f64" and mode in {"rz", "rm", "rp"}):
        return None
    ftz, saturated = "ftz" in flags, "sat" in flags
    widen = _widen(source, ftz)
    if "f" not in to:
        function = _to_whole(to, source, mode, saturated)
    else:
        function = _to_float(to, source, mode, ftz, saturated)
    return [to], [source], lambda a: function(widen(a))


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
        if to == "f32" and mode in {"rz", "rm", "rp"}:
            result = rounding.round_float32(_odd_float64(a), mode)
        elif to in HALVES:
            result = rounding.saturate(a) if saturated else a
            return rounding.to_half(_odd_float64(result), to, mode)
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
