"""mma and ldmatrix against products of whole matrices, laid out as the PTX ISA draws them."""

import numpy as np
import pytest
from one_instruction import kernel

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

HEAD = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(const %(t)s* a, const %(t)s* b, const float* c, float* d) {
    int g = threadIdx.x %% 32 / 4, i = threadIdx.x %% 4;
    a += threadIdx.x / 32 * 16 * %(k)d; b += threadIdx.x / 32 * 8 * %(k)d;
    c += threadIdx.x / 32 * 128; d += threadIdx.x / 32 * 128;
    unsigned x[%(na)d], y[%(nb)d];
    float z[4];
    for (int r = 0; r < %(na)d; ++r)
        x[r] = *(const unsigned*)&a[(g + 8 * (r %% 2)) * %(k)d + %(per)d * (i + 4 * (r / 2))];
    for (int r = 0; r < %(nb)d; ++r)
        y[r] = *(const unsigned*)&b[g * %(k)d + %(per)d * (i + 4 * r)];  // b is stored n by k
    for (int r = 0; r < 4; ++r) z[r] = c[(g + 8 * (r / 2)) * 8 + 2 * i + r %% 2];
    asm("mma.sync.aligned.m16n8k%(k)d.row.col.f32.%(kind)s.%(kind)s.f32 {%%0, %%1, %%2, %%3}, "
        "{%(xs)s}, {%(ys)s}, {%%0, %%1, %%2, %%3};"
        : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3]) : %(ins)s);
    for (int r = 0; r < 4; ++r) d[(g + 8 * (r / 2)) * 8 + 2 * i + r %% 2] = z[r];
}
"""
LOAD = r"""
extern "C" __global__ void f(const unsigned short* x, unsigned* y) {
    __shared__ __align__(16) unsigned short tile[32 * 8];
    for (int j = 0; j < 8; ++j) tile[threadIdx.x * 8 + j] = x[threadIdx.x * 8 + j];
    __syncwarp();
    unsigned at = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x % ROWS * 8]);
    unsigned r[4] = {0, 0, 0, 0};
    asm volatile(INSTRUCTION);
    for (int j = 0; j < 4; ++j) y[threadIdx.x * 4 + j] = r[j];
}
"""


def source(kind, k):
    per = 1 if kind == "tf32" else 2
    na, nb = 16 * k // 32 // per, 8 * k // 32 // per
    names = [f"%{4 + j}" for j in range(na + nb)]
    ins = [f'"r"(x[{j}])' for j in range(na)] + [f'"r"(y[{j}])' for j in range(nb)]
    return HEAD % {
        "t": {"f16": "__half", "bf16": "__nv_bfloat16", "tf32": "float"}[kind], "k": k, "na": na,
        "nb": nb, "per": per, "kind": kind, "ins": ", ".join(ins),
        "xs": ", ".join(f"%{n}" for n in names[:na]).replace("%%", "%"),
        "ys": ", ".join(f"%{n}" for n in names[na:]).replace("%%", "%"),
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("kind", "k"), [("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8)]
)
def test_multiply(kind, k, seed):
    generator = np.random.default_rng(0)
    a = generator.integers(-8, 9, (2, 16, k)).astype(np.float32)
    b = generator.integers(-8, 9, (2, 8, k)).astype(np.float32)
    c = generator.integers(-8, 9, (2, 16, 8)).astype(np.float32)
    d = np.zeros((2, 16, 8), np.float32)

    def held(x):
        if kind == "bf16":
            return (x.view(np.uint32) >> 16).astype(np.uint16)
        return x.astype(np.float16) if kind == "f16" else x

    result = sim.run(source(kind, k), "f", 1, 64, (held(a), held(b), c, d), seed=seed)
    assert result.faults == []
    np.testing.assert_array_equal(d, c + a @ b.swapaxes(1, 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_warps_of_fewer_lanes_are_faulted(seed):
    a, b = np.ones((2, 16, 8), np.float16), np.ones((2, 8, 8), np.float16)
    c, d = np.zeros((2, 16, 8), np.float32), np.zeros((2, 16, 8), np.float32)
    result = sim.run(source("f16", 8), "f", 1, 48, (a, b, c, d), seed=seed)
    (fault,) = result.faults
    assert fault.kind == "barrier"
    assert fault.detail == "'mma' needs 32 lanes, and this warp has 16"
    assert fault.thread[0] >= 32
    assert d[0].tolist() == [[8.0] * 8] * 16  # the whole warp has gone on
    code = LOAD.replace("ROWS", "8").replace(
        "INSTRUCTION",
        '"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at)',
    )
    x, y = np.arange(256, dtype=np.uint16), np.zeros((32, 4), np.uint32)
    (fault,) = sim.run(code, "f", 1, 8, (x, y), seed=seed).faults
    assert fault.detail == "'ldmatrix' needs 32 lanes, and this warp has 8"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_load(number, transposed, seed):
    registers = ", ".join(f"%{j}" for j in range(number))
    outs = ", ".join(f'"=r"(r[{j}])' for j in range(number))
    name = f"ldmatrix.sync.aligned.m8n8.x{number}{'.trans' * transposed}.shared.b16"
    text = f'"{name} {{{registers}}}, [%{number}];" : {outs} : "r"(at)'
    code = LOAD.replace("INSTRUCTION", text).replace("ROWS", str(8 * number))
    x, y = np.arange(256, dtype=np.uint16), np.zeros((32, 4), np.uint32)
    assert sim.run(code, "f", 1, 32, (x, y), seed=seed).faults == []
    for j in range(number):
        m = x.reshape(4, 8, 8)[j]
        m = m.T if transposed else m
        pairs = [int(m[i // 4, i % 4 * 2]) | int(m[i // 4, i % 4 * 2 + 1]) << 16 for i in range(32)]
        assert y[:, j].tolist() == pairs


def packed(x, kind):
    """Registers of 32 bits, or 64, whose elements lie along the last axis."""
    if kind in {"s4", "u4"}:
        low, high = x[..., ::2] & 15, x[..., 1::2] & 15
        return (low | high << 4).astype(np.uint8).view(np.uint32)
    if kind in {"e4m3", "e5m2"}:
        one = {"e4m3": 0x38, "e5m2": 0x3C}[kind]
        codes = {0: 0, 1: one, -1: one | 0x80, 2: one + (8 if kind == "e4m3" else 4)}
        return np.vectorize(codes.get)(x).astype(np.uint8).view(np.uint32)
    dtype = {"s8": np.int8, "u8": np.uint8, "f64": np.float64}[kind]
    return np.ascontiguousarray(x.astype(dtype)).view(np.uint64 if kind == "f64" else np.uint32)


def multiplied(name, a, b, c, kinds, seed=0):
    """d of mma.sync.aligned.`name`; a is m by k, b n by k, c m by n; as the ISA draws them."""
    m, n = c.shape
    lane = np.arange(32)
    group, inside = lane // 4, lane % 4
    per = {"s4": 8, "u4": 8, "f64": 1}.get(kinds[0], 4)
    rows = a.reshape(m // 8, 8, -1, 4, per)  # half, group, register, inside, element
    left = packed(rows, kinds[0])[:, group, :, inside, 0]  # lane, half, register
    left = left.swapaxes(1, 2).reshape(32, -1)
    right = packed(b.reshape(8, -1, 4, per), kinds[1])[group, :, inside, 0]
    total = c.reshape(m // 8, 8, 4, 2)[:, group, inside].swapaxes(0, 1).reshape(32, -1).copy()
    wide = kinds[0] == "f64"
    size, kind = (8, "b64") if wide else (4, "b32")
    counts = total.shape[1], left.shape[1], right.shape[1], total.shape[1]
    names = [[f"%{x}{i}" for i in range(count)] for x, count in zip("zxyz", counts, strict=True)]
    text = ""
    for j, registers in zip((1, 2, 0), names[1:], strict=True):
        text += "".join(f"ld.global.{kind} {r}, [%rd{j}+{size * i}];\n"
                        for i, r in enumerate(registers))  # fmt: skip
    text += f"mma.sync.aligned.{name} " + ", ".join(f"{{{', '.join(r)}}}" for r in names) + ";\n"
    text += "".join(f"st.global.{kind} [%rd0+{size * i}], {r};\n" for i, r in enumerate(names[0]))
    registers = "".join(f".reg .{kind} %{x}<9>;" for x in "xyz")
    source = kernel(text, [size * x.shape[1] for x in (total, left, right)], registers)
    arrays = total, np.ascontiguousarray(left), np.ascontiguousarray(right)
    assert sim.run(source, "f", 1, 32, arrays, seed=seed).faults == []
    return total.reshape(8, 4, -1, 2).transpose(2, 0, 1, 3).reshape(m, n)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", ["m8n8k16", "m16n8k16", "m16n8k32", "m8n8k32", "m16n8k64"])
@pytest.mark.parametrize("signs", ["ss", "uu", "su", "us"])
def test_multiply_whole_numbers(shape, signs, seed):
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    for bits in (8, 4):
        if (bits == 8 and shape in {"m8n8k32", "m16n8k64"}) or (bits == 4 and k == 16):
            continue
        generator = np.random.default_rng(0)
        ranges = [(-(1 << bits - 1), 1 << bits - 1) if s == "s" else (0, 1 << bits) for s in signs]
        a = generator.integers(*ranges[0], (m, k))
        b = generator.integers(*ranges[1], (8, k))
        c = generator.integers(-1000, 1000, (m, 8)).astype(np.int32)
        kinds = [f"{s}{bits}" for s in signs]
        name = f"{shape}.row.col.s32.{kinds[0]}.{kinds[1]}.s32"
        np.testing.assert_array_equal(multiplied(name, a, b, c, kinds, seed), c + a @ b.T)


def test_multiply_saturates():
    a, b = np.full((16, 32), 127), np.full((8, 32), 127)
    c = np.full((16, 8), 2**31 - 1, np.int32)
    got = multiplied("m16n8k32.row.col.satfinite.s32.s8.s8.s32", a, b, c, ["s8", "s8"])
    assert (got == 2**31 - 1).all()
    got = multiplied("m16n8k32.row.col.s32.s8.s8.s32", a, b, c, ["s8", "s8"])
    assert (got == 2**31 - 1 + 32 * 127 * 127 - 2**32).all()


@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_multiply_8_bit_floats(kinds):
    generator = np.random.default_rng(0)
    a, b = generator.integers(-1, 3, (16, 32)), generator.integers(-1, 3, (8, 32))
    c = generator.integers(-9, 9, (16, 8)).astype(np.float32)
    got = multiplied(f"m16n8k32.row.col.f32.{kinds[0]}.{kinds[1]}.f32", a, b, c, kinds)
    np.testing.assert_array_equal(got, c + a @ b.T)


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
def test_multiply_doubles(shape):
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    generator = np.random.default_rng(0)
    a, b, c = (generator.integers(-9, 9, s).astype(float) for s in ((m, k), (8, k), (m, 8)))
    got = multiplied(f"{shape}.row.col.f64.f64.f64.f64", a, b, c, ["f64", "f64"])
    np.testing.assert_array_equal(got, c + a @ b.T)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_store(number, transposed, seed):
    """What ldmatrix reads, stmatrix puts back."""
    names = ", ".join(f"%v{j}" for j in range(number))
    flags = f"sync.aligned.m8n8.x{number}{'.trans' * transposed}.shared.b16"
    text = f"""mov.u32 %r4, cells; and.b32 %r5, %r3, {8 * number - 1}; mad.lo.u32 %r4, %r5, 16, %r4;
    ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%rd0];
    stmatrix.{flags} [%r4], {{{names}}};
    bar.warp.sync 0xffffffff;
    ldmatrix.{flags} {{{names}}}, [%r4];
    st.global.v4.u32 [%rd1], {{%v0, %v1, %v2, %v3}};"""
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    registers = ".reg .b32 %v<4>; .shared .align 16 .b8 cells[512];"
    source = kernel(text, [16, 16], registers)
    assert sim.run(source, "f", 1, 32, (x, y), seed=seed).faults == []
    assert y.tolist() == x.tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_transpose(seed):
    text = """ld.global.u32 %r4, [%rd0]; movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r4;
    st.global.u32 [%rd0], %r5;"""
    x = np.arange(64, dtype=np.uint16)
    assert sim.run(kernel(text, [4]), "f", 1, 32, (x,), seed=seed).faults == []
    assert x.reshape(8, 8).T.ravel().tolist() == [*range(64)]
