"""wmma against products of whole matrices: loads and stores in both layouts, all shapes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from one_instruction import kernel

from cupyrec import sim

CASES = [
    *((kind, shape) for kind in ("f16", "bf16", "s8", "u8")
      for shape in ("m16n16k16", "m32n8k16", "m8n32k16")),
    ("tf32", "m16n16k8"), ("f64", "m8n8k4"),
]  # fmt: skip
HELD = {"f16": np.float16, "bf16": np.uint16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8,
        "f64": np.float64}  # fmt: skip


def held(x, kind):
    """The matrix as memory holds it."""
    if kind == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(HELD[kind])


def source(kind, shape, layouts, result, stride):
    """A kernel of pointers a, b, c, d and one warp; strides are of a, b and c in elements."""
    wide = kind == "f64"
    bits = "b64" if wide else "b32"
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    per = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}.get(kind, 1)
    counts = [8, 8] if kind == "f16" else [m * k // 32 // per, k * n // 32 // per]
    counts.append(m * n // 32 // (2 if result == "f16" else 1))
    a, b, c = (
        "{" + ", ".join(f"%{x}{i}" for i in range(count)) + "}"
        for x, count in zip("abc", counts, strict=True)
    )
    types = f"{result}.{result}" if kind == "f16" else f"{result}.{kind}.{kind}.{result}"
    la, lb, lc = layouts
    text = f"""wmma.load.a.sync.aligned.{la}.{shape}.global.{kind} {a}, [%rd0], {stride[0]};
    wmma.load.b.sync.aligned.{lb}.{shape}.{kind} {b}, [%rd1], {stride[1]};
    wmma.load.c.sync.aligned.{lc}.{shape}.global.{result} {c}, [%rd2], {stride[2]};
    wmma.mma.sync.aligned.{la}.{lb}.{shape}.{types}{".rn" * wide} {c}, {a}, {b}, {c};
    wmma.store.d.sync.aligned.{lc}.{shape}.global.{result} [%rd3], {c}, {stride[2]};"""
    return kernel(text, [0, 0, 0, 0], "".join(f".reg .{bits} %{x}<17>;" for x in "abc"))


@pytest.mark.parametrize("layouts", [("row", "col", "row"), ("col", "row", "col")])
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_product(kind, shape, layouts):
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    generator = np.random.default_rng(0)
    low = 0 if kind == "u8" else -8
    a, b = generator.integers(low, 9, (m, k)), generator.integers(low, 9, (k, n))
    c = generator.integers(-99, 99, (m, n))
    results = {"f16": ["f32", "f16"], "f64": ["f64"], "s8": ["s32"], "u8": ["s32"]}
    for result in results.get(kind, ["f32"]):
        dtype = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "s32": np.int32}[result]
        arrays, strides = [], []
        for x, layout in zip((a, b, c), layouts, strict=True):
            lines = x if layout == "row" else x.T
            size = lines.shape[1] + 16  # a gap after each line
            whole = np.zeros((lines.shape[0], size))
            whole[:, : lines.shape[1]] = lines
            arrays.append(whole.astype(dtype) if x is c else held(whole, kind))
            strides.append(size)
        d = np.ma.masked_all(arrays[2].shape, dtype)
        code = source(kind, shape, layouts, result, strides)
        for seed in (0, 1):
            assert sim.run(code, "f", 1, 32, (*arrays, d), seed=seed).faults == []
            got = d[:, :-16].filled(0)
            got = got if layouts[2] == "row" else got.T
            np.testing.assert_array_equal(got, (c + a @ b).astype(dtype))
            assert d[:, -16:].mask.all()


def test_costs_and_faults():
    """A row of 16 float16 is one sector; a base of 8 bytes is not aligned."""
    code = source("f16", "m16n16k16", ("row", "col", "row"), "f32", (16, 16, 16))
    a, b = np.zeros(256, np.float16), np.zeros(256, np.float16)
    c, d = np.zeros(256, np.float32), np.zeros(256, np.float32)
    counts = sim.run(code, "f", 1, 32, (a, b, c, d)).counts
    assert (counts["sectors"], counts["bytes_read"]) == (16 + 16 + 32 + 32, 512 + 512 + 1024)
    (fault,) = sim.run(code, "f", 1, 32, (a, b, c, d[:-1].copy())).faults
    assert fault.kind == "out of bounds"
    (fault,) = sim.run(code.replace("[%rd3]", "[%rd3+8]"), "f", 1, 32,
                       (a, b, c, np.zeros(300, np.float32))).faults  # fmt: skip
    assert fault.kind == "misaligned"


def test_unknown_shapes():
    code = source("f16", "m16n16k16", ("row", "col", "row"), "f32", (16, 16, 16))
    with pytest.raises(sim.PtxError, match=r"'wmma\.mma\.sync\.aligned\.row\.col\.m16n16k8"):
        args = (*(np.zeros(256, np.float16) for _ in "ab"), *(np.zeros(256, "f4") for _ in "cd"))
        sim.run(code.replace("col.m16n16k16.f32", "col.m16n16k8.f32"), "f", 1, 32, args)


SOURCE = r"""
#include <mma.h>
using namespace nvcuda::wmma;
extern "C" __global__ void f(const half* a, const half* b, float* c, int n) {
    __shared__ float tile[4][256];
    int warp = threadIdx.x / 32;
    fragment<matrix_a, 16, 16, 16, half, row_major> x;
    fragment<matrix_b, 16, 16, 16, half, col_major> y;
    fragment<accumulator, 16, 16, 16, float> z;
    fill_fragment(z, 1.f);
    for (int j = 0; j < n; j += 16) {
        load_matrix_sync(x, a + warp / 2 * 16 * n + j, n);
        load_matrix_sync(y, b + warp % 2 * 16 * n + j, n);
        mma_sync(z, x, y, z);
    }
    for (int e = 0; e < z.num_elements; ++e) z.x[e] *= 2;
    store_matrix_sync(tile[warp], z, 16, mem_row_major);
    __syncthreads();
    for (int e = threadIdx.x; e < 1024; e += 128)
        c[e] = tile[e / 512 * 2 + e % 32 / 16][e / 32 % 16 * 16 + e % 16];
}
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_cuda(arch):
    """Four warps multiply 32 by 48 with 48 by 32."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")
    nvidia = importlib.util.find_spec("nvidia")
    places = nvidia.submodule_search_locations if nvidia else ()
    folders = [Path(place) / "cuda_nvcc" / "include" for place in places]
    folder = next((f for f in folders if (f / "crt" / "mma.h").exists()), None)
    if folder is None:
        pytest.skip("mma.h needs the compiler's headers")
    generator = np.random.default_rng(0)
    a, b = generator.integers(-4, 5, (2, 32, 48)).astype(np.float16)
    c = np.zeros((32, 32), np.float32)
    options = (f"-I{folder}",)
    result = sim.run(SOURCE, "f", 1, 128, (a, b, c, np.int32(48)), arch=arch, options=options)
    assert result.faults == []
    truth = 2 * (1 + a.astype(np.float32) @ b.astype(np.float32).T)
    np.testing.assert_array_equal(c, truth)
