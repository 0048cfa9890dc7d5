"""The schedule, launches, counts, and `sim.run` itself."""

import math
import time

import numpy as np
import pytest

from cupyrec import sim

cupy = pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
extern "C" __global__ void quantize(const float* __restrict__ x, signed char* q, float* scale,
                                    int n, int d) {
    long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    float m = 0;
    for (int j = lane; j < d; j += 32) m = fmaxf(m, fabsf(x[row * d + j]));
    for (int o = 16; o; o /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    if (lane == 0) scale[row] = m;
    for (int j = lane; j < d; j += 32) {
        float y = __fmul_rn(__fdiv_rn(x[row * d + j], m), 127.f);
        q[row * d + j] = m == 0 ? 0 : (signed char)roundf(y);
    }
}
extern "C" __global__ void places(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 100 * blockIdx.z + threadIdx.z;
}
extern "C" __global__ void order(int* slot, int* out) { out[atomicAdd(slot, 1)] = threadIdx.x; }
__device__ float table[3] = {1.5f, 2.5f, -3.5f};
__constant__ short factors[4] = {1, -2, 3, -4};
struct Pair { double x; char c; };
extern "C" __global__ void arguments(char a, short b, float c, Pair p, long long e, double* out) {
    out[threadIdx.x] = a + b + c + p.x + p.c + e
                       + table[threadIdx.x % 3] * factors[threadIdx.x % 4];
    table[threadIdx.x % 3] = 0;
}
struct Chunks { float* p[4]; int n[4]; };
extern "C" __global__ void chunks(Chunks c, const int* which, float* y) {
    y[threadIdx.x] = c.p[which[threadIdx.x]][threadIdx.x] + c.n[which[threadIdx.x]];
}
extern "C" __global__ void pointers(float* const* p, const int* which, float* y) {
    y[threadIdx.x] = p[which[threadIdx.x]][threadIdx.x];
}
extern "C" __global__ void last_block(const int* x, int* parts, int* count, int* out, int n) {
    __shared__ int s[128];
    __shared__ bool last;
    int v = 0;
    for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += gridDim.x * 128) v += x[i];
    s[threadIdx.x] = v;
    __syncthreads();
    for (int o = 64; o; o /= 2) {
        if (threadIdx.x < o) s[threadIdx.x] += s[threadIdx.x + o];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = s[0];
        __threadfence();
        last = atomicAdd(count, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x < 32) {
        v = 0;
        for (int i = threadIdx.x; i < gridDim.x; i += 32) v += parts[i];
        for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
        if (threadIdx.x == 0) *out = v;
    }
}
extern "C" __global__ void functions(const float* x, float* y, int n) {
    for (int j = 0; j < n; ++j) {
        float v = x[j * blockDim.x + threadIdx.x];
        float* w = y + 10 * (j * blockDim.x + threadIdx.x);
        w[0] = expf(v); w[1] = logf(fabsf(v)); w[2] = tanhf(v); w[3] = sinf(v); w[4] = cosf(v);
        w[5] = log1pf(expf(-fabsf(v))); w[6] = rsqrtf(fabsf(v)); w[7] = erff(v);
        w[8] = powf(fabsf(v), 0.3f); w[9] = (float)exp((double)v);
    }
}
"""


def quantized(x):
    scale = np.abs(x).max(axis=1)
    y = np.abs(x / scale[:, None]) * np.float32(127)
    return (np.sign(x) * np.floor(y + np.float32(0.5))).astype(np.int8), scale


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", range(3))
def test_row_quantizer(arch, seed):
    x = np.random.default_rng(0).standard_normal((37, 130)).astype(np.float32)
    q, scale = np.ma.masked_all((37, 130), np.int8), np.ma.masked_all(37, np.float32)
    args = x, q, scale, np.int32(37), np.int32(130)
    result = sim.run(SOURCE, "quantize", 5, 256, args, arch=arch, seed=seed)
    codes, magnitudes = quantized(x)
    assert result.faults == []
    np.testing.assert_array_equal(scale.filled(np.nan), magnitudes)
    np.testing.assert_array_equal(q.filled(0), codes)
    assert (result.counts["bytes_read"], result.counts["bytes_written"]) == (
        37 * 130 * 4, 37 * 130 + 37 * 4,
    )  # fmt: skip


def test_row_quantizer_is_fast():
    x = np.random.default_rng(0).standard_normal((1000, 128)).astype(np.float32)
    args = x, np.zeros((1000, 128), np.int8), np.zeros(1000, np.float32)
    args += np.int32(1000), np.int32(128)
    sim.run(SOURCE, "quantize", 125, 256, args)  # compiles
    seconds = []
    for _ in range(3):
        start = time.process_time()
        sim.run(SOURCE, "quantize", 125, 256, args)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1  # 0.1 s on an idle core


@pytest.mark.parametrize("seed", [0, 5])
def test_grids_and_blocks_of_three_axes(seed):
    grid, block = (2, 3, 4), (5, 1, 7)
    out = np.full((24, 35), -1, np.int32)
    assert sim.run(SOURCE, "places", grid, block, (out,), seed=seed).faults == []
    truth = 100 * (np.arange(24) // 6)[:, None] + np.arange(35) // 5
    np.testing.assert_array_equal(out, truth)


def test_seeds_permute_threads():
    orders = set()
    for seed in (0, 0, 1, 2):
        slot, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
        sim.run(SOURCE, "order", 1, 64, (slot, out), seed=seed)
        assert sorted(out.tolist()) == [*range(64)]
        orders.add(tuple(out.tolist()))
    assert tuple(range(64)) in orders
    assert len(orders) == 3


def test_arguments_and_variables():
    pair = np.zeros((), [("x", "f8"), ("c", "i1"), ("pad", "V7")])
    pair["x"], pair["c"] = 0.25, -3
    args = np.int8(-5), np.int16(300), np.float32(0.5), pair[()], np.int64(2**40), np.zeros(3)
    for _ in range(2):  # variables start afresh
        assert sim.run(SOURCE, "arguments", 1, 3, args).faults == []
    truth = [-5 + 300 + 0.5 + 0.25 - 3 + 2**40 + t for t in (1.5, -5.0, -10.5)]
    assert args[-1].tolist() == truth


@pytest.mark.parametrize("arch", [80, 100])
def test_functions_of_cuda(arch):
    x = np.random.default_rng(0).standard_normal((20, 32)).astype(np.float32) * 5
    x[0, :4] = 100, -100, 1e-30, 30000
    y = np.zeros((20, 32, 10), np.float32)
    assert sim.run(SOURCE, "functions", 1, 32, (x, y, np.int32(20)), arch=arch).faults == []
    v = x.astype(np.float64)
    with np.errstate(over="ignore"):
        truth = [np.exp(v), np.log(np.abs(v)), np.tanh(v), np.sin(v), np.cos(v),
                 np.log1p(np.exp(-np.abs(v))), np.abs(v) ** -0.5, np.vectorize(math.erf)(v),
                 np.abs(v) ** 0.3, np.exp(v)]  # fmt: skip
        for i, t in enumerate(truth):
            t = np.where(np.abs(t) < 2.0**-126, 0, t).astype(np.float32)
            np.testing.assert_allclose(y[:, :, i], t, rtol=1e-6, atol=1e-37)


def test_classes_and_balance():
    x, q, scale = np.ones((3, 64), np.float32), np.zeros((3, 64), np.int8), np.zeros(3, np.float32)
    args = x, q, scale, np.int32(3), np.int32(64)
    result = sim.run(SOURCE, "quantize", 1, 128, args)
    assert result.classes["shfl"] == 5 * 3  # the fourth warp has left
    assert result.counts["instructions"] == sum(result.classes.values())
    assert result.counts["longest_warp"] > result.counts["mean_warp"] > 0
    assert result.touched == {
        "argument 0": (768, 0), "argument 1": (0, 192), "argument 2": (0, 12),
    }  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_pointers_within_arguments_and_buffers(arch):
    chunks = [sim.asarray(np.full(32, k, np.float32)) for k in range(4)]
    addresses = [c.__cuda_array_interface__["data"][0] for c in chunks]
    which, y = np.arange(32, dtype=np.int32) % 4, np.zeros(32, np.float32)
    struct = np.zeros((), [("p", "u8", 4), ("n", "i4", 4)])
    struct["p"], struct["n"] = addresses, [10, 20, 30, 40]
    assert sim.run(SOURCE, "chunks", 1, 32, (struct[()], which, y), arch=arch).faults == []
    assert y.tolist() == [10, 21, 32, 43] * 8
    table = np.array(addresses, np.uint64)
    assert sim.run(SOURCE, "pointers", 1, 32, (table, which, y), arch=arch).faults == []
    assert y.tolist() == [0, 1, 2, 3] * 8
    del chunks[2]  # its address is in the table still
    (fault,) = sim.run(SOURCE, "pointers", 1, 32, (table, which, y), arch=arch).faults
    assert (fault.kind, fault.thread) == ("out of bounds", (2, 0, 0))


@pytest.mark.parametrize("seed", range(3))
def test_the_last_block_sums_what_all_have_written(seed):
    x = np.random.default_rng(0).integers(-99, 99, 20_000).astype(np.int32)
    parts, count, out = np.zeros(50, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    args = x, parts, count, out, np.int32(x.size)
    assert sim.run(SOURCE, "last_block", 50, 128, args, seed=seed).faults == []
    assert (out.tolist(), count.tolist()) == ([x.sum()], [50])


LIBRARY = r"""
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void sort(int* x) {
    typedef cub::BlockRadixSort<int, 64, 2> Sort;
    __shared__ typename Sort::TempStorage storage;
    int k[2] = {x[2 * threadIdx.x], x[2 * threadIdx.x + 1]};
    Sort(storage).Sort(k);
    x[2 * threadIdx.x] = k[0];
    x[2 * threadIdx.x + 1] = k[1];
}
"""


def test_radix_sort_of_cub():
    x = np.random.default_rng(0).integers(-1000, 1000, 128).astype(np.int32)
    truth = np.sort(x)
    assert sim.run(LIBRARY, "sort", 1, 64, (x,)).faults == []
    np.testing.assert_array_equal(x, truth)


def test_pointers_in_variables():
    """A variable that points to one that points to a third, which no instruction names."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")
    code = """__device__ int last[2] = {5, 6};
    __device__ int* middle = &last[0];
    __constant__ int** first = &middle;
    __device__ const char* text = "hello";
    extern "C" __global__ void f(int* x) {
        x[threadIdx.x] = (*first)[threadIdx.x % 2] + 10 * text[threadIdx.x];
    }"""
    x = np.zeros(5, np.int32)
    assert sim.run(code, "f", 1, 5, (x,)).faults == []
    assert x.tolist() == [5 + i % 2 + 10 * ord(c) for i, c in enumerate("hello")]
