"""mma and ldmatrix against products of whole matrices, laid out as the PTX ISA draws them."""

import numpy as np
import pytest

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
