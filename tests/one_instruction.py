"""PTX kernels of one instruction, written here by hand: no compiler is needed."""

import numpy as np

from cupyrec import sim

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"
NUMPY = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u8": np.uint8,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s8": np.int8, "s16": np.int16,
    "s32": np.int32, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def plain(kind):
    """The type by which memory holds a value."""
    return {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(kind, kind)


def kernel(text, pointers, registers="", scalars=()):
    """A kernel `f` of pointers %rd0, %rd1, … that are moved on to this thread's element."""
    params = [f".param .u64 p{i}" for i in range(len(pointers))]
    params += [f".param .{kind} s{i}" for i, kind in enumerate(scalars)]
    lines = [
        f"ld.param.u64 %rd{i}, [p{i}];\nmad.wide.u32 %rd{i}, %r0, {size}, %rd{i};"
        for i, size in enumerate(pointers)
    ]
    return (
        f"{HEADER}.visible .entry f({', '.join(params)}) {{\n.reg .b32 %r<9>; .reg .b64 %rd<9>;\n"
        f".reg .pred %p<9>;\n{registers}\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\n"
        "mov.u32 %r3, %tid.x;\nmad.lo.s32 %r0, %r1, %r2, %r3;\n"
        + "\n".join(lines)
        + f"\n{text}\nret;\n}}\n"
    )


def execute(instruction, result, *operands):
    """What ``instruction d, a, b, …;`` leaves in d; result is a type, operands (type, values).

    An operand of type ``pred`` is set from values that are not 0. ``{d}``, ``{a}``, ``{b}``, … in
    the instruction stand for registers; without them they follow it in order.
    """
    names = "abcxy"[: len(operands)]
    if "{d}" not in instruction:
        instruction += " {d}, " + ", ".join(f"{{{n}}}" for n in names)
    length = max(len(values) for _, values in operands)
    kinds = [plain(k) if k != "pred" else "u32" for k, _ in operands]
    arrays = [
        np.resize(np.asarray(v), length).astype(NUMPY[k])
        for k, (_, v) in zip(kinds, operands, strict=True)
    ]
    out_kind = plain(result) if result != "pred" else "u32"
    out = np.zeros(length, NUMPY[out_kind])

    def bits(kind):
        return f".b{max(16, 8 * np.dtype(NUMPY[kind]).itemsize)}"

    registers = "".join(
        f".reg {bits(k)} %v{i};\n" for i, k in enumerate([out_kind, *kinds])
    ) + ".reg .pred %q<9>;\n"  # fmt: skip
    text = "".join(f"ld.global.{k} %v{i}, [%rd{i}];\n" for i, k in enumerate(kinds, 1))
    where = {"d": "%v0"}
    for i, (name, (kind, _)) in enumerate(zip(names, operands, strict=True), 1):
        where[name] = f"%v{i}"
        if kind == "pred":
            text += f"setp.ne.u32 %q{i}, %v{i}, 0;\n"
            where[name] = f"%q{i}"
    if result == "pred":
        where["d"] = "%q0"
    for name, register in where.items():
        instruction = instruction.replace(f"{{{name}}}", register)
    text += instruction + ";\n"
    if result == "pred":
        text += "selp.u32 %v0, 1, 0, %q0;\n"
    text += f"st.global.{out_kind} [%rd0], %v0;"
    sizes = [a.itemsize for a in [out, *arrays]]
    outcome = sim.run(kernel(text, sizes, registers), "f", 1, length, (out, *arrays))
    assert outcome.faults == []
    return out.astype(bool) if result == "pred" else out


def pairs(x, y=None):
    """Every x with every y."""
    grid = np.meshgrid(x, x if y is None else y, indexing="ij")
    return [g.ravel() for g in grid]


# Values, and comparison with what they should give

EDGES = {
    kind: np.array(sorted({0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1,
                           info.max // 2, info.max // 3}), dtype)
    for kind, dtype in NUMPY.items() if kind[0] in "su" and kind != "u8"
    and kind != "s8" for info in [np.iinfo(dtype)]
}  # fmt: skip
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, -7.25, 1e-38, -1.4e-45, 1.1754944e-38, 3.4028235e38, -3.4e38,
     0.1, 16777217.0, np.inf, -np.inf, np.nan], np.float32,
)  # fmt: skip
TINY = 2.0**-126


def wrap(value, kind):
    bits = int(kind[1:])
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def flushed(x):
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def check_same(got, truth):
    """Equal bits, any NaN for NaN."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(truth))
    known = ~np.isnan(truth)
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got[known].view(bits), truth[known].view(bits))


def _table(kind):
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = (
            bits.view(np.float16).astype(np.float64)
            if kind == "f16"
            else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        )
    keep = np.isfinite(values) & (bits != 0x8000)
    order = np.argsort(values[keep])
    return values[keep][order], bits[keep][order]


TABLES = {kind: _table(kind) for kind in ("f16", "bf16")}
