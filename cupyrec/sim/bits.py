"""Shifts, logic, fields, bytes and counts of bits."""

from __future__ import annotations

import numpy as np

from cupyrec.sim.arithmetic import Rule
from cupyrec.sim.ptx import Instruction

__all__ = ["rule"]


def _shift_left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


def _shift(root: str, flags: list[str], instruction: Instruction) -> Rule:
    function = _shift_left if root == "shl" else _shift_right
    return [flags[0]], [flags[0], "u32"], function


def _funnel(root: str, flags: list[str], instruction: Instruction) -> Rule:
    left, clamp = flags[0] == "l", flags[1] == "clamp"

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        n = (np.minimum(c, 32) if clamp else c & 31).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return ["b32"], ["b32", "b32", "u32"], function


def _logic(root: str, flags: list[str], instruction: Instruction) -> Rule:
    kind = flags[0]
    if root == "not":
        return [kind], [kind], np.logical_not if kind == "pred" else np.invert
    if root == "cnot":
        return [kind], [kind], lambda a: (a == 0).astype(a.dtype)
    join = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[root]
    return [kind], [kind] * 2, join


def _lop3(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    table = instruction.operands[4]

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray, _: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return (["b32"], ["b32"] * 4, function) if flags == ["b32"] else None


def _bits_of(a: np.ndarray) -> np.ndarray:
    """(n, bits) of 0 and 1, lowest first."""
    raw = np.ascontiguousarray(a)[..., None].view(np.uint8)
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _leading(a: np.ndarray) -> np.ndarray:
    bits = _bits_of(a)[..., ::-1]
    return np.where(a == 0, bits.shape[-1], bits.argmax(axis=-1)).astype(np.uint32)


def _reverse(a: np.ndarray) -> np.ndarray:
    packed = np.packbits(_bits_of(a)[..., ::-1], axis=-1, bitorder="little")
    return packed.view(a.dtype)[..., 0]


def _find(a: np.ndarray, shift: bool) -> np.ndarray:
    b = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    n = _leading(b.astype(f"u{b.itemsize}"))
    place = n if shift else np.uint32(8 * b.itemsize - 1) - n
    return np.where(b == 0, np.uint32(0xFFFFFFFF), place)


def _count(root: str, flags: list[str], instruction: Instruction) -> Rule:
    kind = flags[-1]
    if root == "brev":
        return [kind], [kind], _reverse
    if root == "bfind":
        return ["u32"], [kind], lambda a: _find(a, "shiftamt" in flags)
    function = _leading if root == "clz" else lambda a: np.bitwise_count(a).astype(np.uint32)
    return ["u32"], [kind], function


def _extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    start, length = start & 255, length & 255
    shifted = _shift_right(a, start)
    spare = np.maximum(bits - length.astype(np.int64), 0).astype(np.uint32)
    if a.dtype.kind == "u":
        return _shift_right(_shift_left(shifted, spare), spare)
    sign = np.minimum(start + length, bits) - 1  # its place when the field passes the end
    top = (_shift_right(a, np.where(length == 0, 0, sign)) & 1).astype(bool)
    inside = spare > 0
    moved = _shift_left(shifted.view(f"u{a.itemsize}"), spare).view(a.dtype)
    field = np.where(inside, _shift_right(moved, spare), shifted)
    return np.where(length == 0, 0, np.where(start >= bits, -top.astype(a.dtype), field))


def _insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    start, length = start & 255, length & 255
    ones = np.invert(np.zeros_like(b))
    mask = _shift_left(np.invert(_shift_left(ones, length)), start)
    return b & ~mask | _shift_left(a, start) & mask


def _field(root: str, flags: list[str], instruction: Instruction) -> Rule:
    kind = flags[0]
    if root == "bfe":
        return [kind], [kind, "u32", "u32"], _extract
    return [kind], [kind, kind, "u32", "u32"], _insert


def _mask(root: str, flags: list[str], instruction: Instruction) -> Rule:
    """bmsk: `length` ones from bit `start` on."""

    def function(start: np.ndarray, length: np.ndarray) -> np.ndarray:
        if flags[0] == "wrap":
            start, length = start & 31, length & 31
        ones = np.invert(np.zeros_like(start))
        return _shift_left(~_shift_left(ones, length), start)

    return ["b32"], ["u32", "u32"], function


def _permute(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(np.shape(both), np.uint32)
    for i in range(4):
        nibble = choice >> np.uint32(4 * i)
        byte = both >> (8 * (nibble & 7)).astype(np.uint64) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & 8, sign, byte).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    return result


def _dot(root: str, flags: list[str], instruction: Instruction) -> Rule:
    """dp4a: four bytes by four; dp2a: the two 16-bit parts of a by the low or high bytes of b."""
    part = flags.pop(0) if root == "dp2a" else "all"
    kinds = ["i" if f == "s32" else "u" for f in flags]
    chosen = {"all": slice(0, 4), "lo": slice(0, 2), "hi": slice(2, 4)}[part]
    size = 1 if root == "dp4a" else 2

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(a)[:, None].view(f"{kinds[0]}{size}").astype(np.int64)
        y = np.ascontiguousarray(b)[:, None].view(f"{kinds[1]}1")[:, chosen].astype(np.int64)
        return c + (x * y).sum(axis=1).astype(c.dtype)

    kind = "s32" if "s32" in flags else "u32"
    return [kind], ["b32", "b32", kind], function


def _prmt(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """Bytes by a choice of nibbles, or by one of the modes that make them of two bits."""
    if flags == ["b32"]:
        return ["b32"], ["b32"] * 3, _permute
    four = np.arange(4)
    made = {
        "f4e": lambda n: n + four,
        "b4e": lambda n: n - four & 7,
        "rc8": lambda n: n + 0 * four,
        "ecl": lambda n: np.maximum(n, four),
        "ecr": lambda n: np.minimum(n, four),
        "rc16": lambda n: (n & 1) * 2 + (four & 1),
    }.get(flags[1])
    if made is None:
        return None

    def function(a: np.ndarray, b: np.ndarray, mode: np.ndarray) -> np.ndarray:
        nibbles = made((mode.astype(np.int64) & 3)[:, None])
        return _permute(a, b, (nibbles << 4 * four).sum(axis=1).astype(np.uint32))

    return ["b32"], ["b32"] * 3, function


def _nth_set(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Place of the offset-th set bit from `base` on, counting down if below 0; -1 if none."""
    bits = _bits_of(mask).astype(np.int64)
    place, base = np.arange(32), base.astype(np.int64)[:, None]
    offset = offset.astype(np.int64)[:, None]
    up = np.cumsum(bits * (place >= base), axis=1)
    down = np.cumsum((bits * (place <= base))[:, ::-1], axis=1)[:, ::-1]
    found = np.where(offset > 0, up == offset, down == -offset) & (bits == 1)
    found = np.where(offset > 0, found & (place >= base), found & (place <= base))
    found = np.where(offset == 0, (bits == 1) & (place == base), found)
    return np.where(found.any(axis=1), found.argmax(axis=1), -1).astype(np.uint32)


def _fns(root: str, flags: list[str], instruction: Instruction) -> Rule:
    return ["b32"], ["b32", "u32", "s32"], _nth_set


def _extend(root: str, flags: list[str], instruction: Instruction) -> Rule:
    """szext: the low bits, sign- or zero-extended."""

    def function(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = n & 31 if flags[0] == "wrap" else np.minimum(n, 32)
        spare = np.uint32(32) - n
        extended = _shift_right(_shift_left(a, spare), spare)
        return np.where(n == 0, a.dtype.type(0), extended)

    return [flags[1]], [flags[1], "u32"], function


def _test(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """testp: what kind of a number it is."""

    def subnormal(a: np.ndarray) -> np.ndarray:
        return (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny)

    tests = {
        "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan,
        "number": lambda a: ~np.isnan(a), "subnormal": subnormal,
        "normal": lambda a: np.isfinite(a) & (a != 0) & ~subnormal(a),
    }  # fmt: skip
    return ["pred"], [flags[1]], tests[flags[0]]


def _absolute_difference(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """vabsdiff4: of each byte, or with ``.add`` their sum and c."""
    if flags[:3] not in (["u32"] * 3, ["s32"] * 3, ["u32", "s32", "s32"]):
        return None
    if flags[3:] not in ([], ["add"]):
        return None
    kind = np.int8 if flags[1] == "s32" else np.uint8

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        x, y = (np.ascontiguousarray(v)[:, None].view(kind).astype(np.int64) for v in (a, b))
        apart = np.abs(x - y)
        if flags[3:]:
            return c + apart.sum(axis=1).astype(np.uint32)
        return apart.astype(np.uint8).view(np.uint32)[:, 0]

    return ["u32"], ["b32"] * 3, function


def _sad(root: str, flags: list[str], instruction: Instruction) -> Rule:
    return [flags[0]], [flags[0]] * 3, lambda a, b, c: c + np.maximum(a, b) - np.minimum(a, b)


MAKERS = {
    **dict.fromkeys(["shl", "shr"], _shift),
    **dict.fromkeys(["and", "or", "xor", "not", "cnot"], _logic),
    **dict.fromkeys(["popc", "clz", "brev", "bfind"], _count),
    **dict.fromkeys(["bfe", "bfi"], _field),
    "bmsk": _mask, "shf": _funnel, "lop3": _lop3, "prmt": _prmt, "sad": _sad, "fns": _fns,
    "dp4a": _dot, "dp2a": _dot, "szext": _extend, "testp": _test,
    "vabsdiff4": _absolute_difference,
}  # fmt: skip


def rule(root: str, flags: list[str], instruction: Instruction) -> Rule | None:
    """Return the rule of an instruction, None if it is none of these or its flags not known."""
    return MAKERS[root](root, flags, instruction) if root in MAKERS else None
