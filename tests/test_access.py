"""Each fault of memory planted in a kernel, and the same kernel without it; atomics; counters."""

import numpy as np
import pytest
from one_instruction import execute, kernel

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
typedef unsigned long long u64;
extern "C" __global__ void copy(const float* x, float* y, int n, int shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i + shift];
}
extern "C" __global__ void copy4(const char* x, float4* y, int shift) {
    y[threadIdx.x] = *(const float4*)(x + 16 * threadIdx.x + shift);
}
extern "C" __global__ void local_array(float* y, int n) {
    float a[8];
    for (int j = 0; j < n; ++j) a[j] = j;
    y[threadIdx.x] = a[threadIdx.x % 8];
}
extern "C" __global__ void reverse(const float* x, float* y, int wait) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    if (wait) __syncthreads();
    y[threadIdx.x] = tile[127 - threadIdx.x];
}
extern "C" __global__ void window(float* y, int at) {
    extern __shared__ float cells[];
    cells[threadIdx.x] = 1;
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = cells[threadIdx.x + at];
}
extern "C" __global__ void reread(float* x, int wait) {  // all read one value, then one writes it
    float v = x[0];
    if (wait) __syncthreads();
    if (threadIdx.x == 17) x[0] = v + 1;
}
extern "C" __global__ void three_readers(int* x, int* y, int wait) {
    int i = threadIdx.x;
    if (i == 0) y[0] = x[0];
    if (i == 32 || i == 33) y[i] = x[0];
    if (wait) __syncthreads(); else __syncwarp();
    if (i == 32) x[0] = 5;
}
extern "C" __global__ void in_warp(float* x, float* y, int wait) {
    x[threadIdx.x] = threadIdx.x;
    if (wait) __syncwarp();
    y[threadIdx.x] = x[threadIdx.x ^ 1];
}
extern "C" __global__ void in_half_warps(float* x, float* y, int far) {
    unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
    x[threadIdx.x] = threadIdx.x;
    __syncwarp(mask);
    y[threadIdx.x] = x[threadIdx.x ^ far];
}
extern "C" __global__ void sum_plain(int* total) { total[0] += 1; }
extern "C" __global__ void sum_atomic(int* total) { atomicAdd(total, 1); }

// Slots of (key, value). A reader of another block may see the key before the value.
__device__ u64 find_or_insert(u64* keys, int* values, int* next, u64 key, int slots, int how) {
    for (unsigned i = key * 11400714819323198485ull >> 40;; ++i) {
        u64 slot = i % slots;
        u64 old = atomicCAS(&keys[slot], ~0ull, key);
        if (old == ~0ull) {
            int row = atomicAdd(next, 1);
            if (how == 0) { values[slot] = row; }
            else { __threadfence(); atomicExch(&values[slot], row); }
            return row;
        }
        if (old == key) {
            if (how == 0) return values[slot];
            int row;
            while ((row = *(volatile int*)&values[slot]) < 0) {}
            __threadfence();
            return row;
        }
    }
}
extern "C" __global__ void insert(const u64* ids, u64* keys, int* values, int* next, int* rows,
                                  int n, int slots, int how) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) rows[i] = find_or_insert(keys, values, next, ids[i], slots, how);
}
// One block writes data and sets a flag, the others wait for the flag and read.
extern "C" __global__ void publish(int* data, int* flag, int* out, int writer, int reader) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 1;
        __syncthreads();
        if (threadIdx.x == 0) {
            if (writer == 1) __threadfence();
            if (writer == 2) __threadfence_block();
            atomicExch(flag, 1);
        }
    } else {
        if (threadIdx.x == 0) {
            while (atomicAdd(flag, 0) == 0) {}
            if (reader) __threadfence();
        }
        __syncthreads();
        out[blockIdx.x * blockDim.x + threadIdx.x] = data[threadIdx.x];
    }
}
extern "C" __global__ void strided(const float* x, float* y, int step) {
    y[threadIdx.x] = x[threadIdx.x * step];
}
extern "C" __global__ void banks(float* y, int step) {
    __shared__ float tile[32 * 33];
    for (int j = threadIdx.x; j < 32 * 33; j += 32) tile[j] = j;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x * step];
}
"""
FILE = "planted.cu"


def line_of(text):
    return next(i for i, line in enumerate(SOURCE.split("\n"), 1) if text in line)


def launch(name, *args, grid=1, block=32, **options):
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    return sim.run(SOURCE, name, grid, block, tuple(args), file=FILE, **options)


def only(result, kind, text):
    """The one fault, at the line that holds `text`."""
    (fault,) = result.faults
    assert (fault.kind, fault.file, fault.line) == (kind, FILE, line_of(text))
    return fault


def test_out_of_bounds_names_block_and_thread():
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    assert launch("copy", x, y, 100, 0, grid=4).faults == []
    np.testing.assert_array_equal(y, x)
    fault = only(launch("copy", x, y, 100, 1, grid=4), "out of bounds", "y[i] = x[i + shift]")
    assert (fault.block, fault.thread) == ((3, 0, 0), (3, 0, 0))
    assert str(fault) == (
        f"copy: out of bounds at planted.cu:{fault.line}, block (3, 0, 0), thread (3, 0, 0): "
        "a read of 4 bytes at byte 400 of 'argument 0' (400 bytes) is not within an allocation."
    )
    assert y.tolist() == [*range(1, 100), 0]


def test_out_of_bounds_before_the_start():
    x = np.arange(32, dtype=np.float32)
    fault = only(launch("copy", x, x.copy(), 32, -1), "out of bounds", "y[i] = x[i + shift]")
    assert fault.thread == (0, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_third_reader_is_not_forgotten(seed):
    x, y = np.ones(1, np.int32), np.zeros(64, np.int32)
    assert launch("three_readers", x, y, 1, block=64, seed=seed).faults == []
    fault = only(launch("three_readers", x, y, 0, block=64, seed=seed), "race", "x[0] = 5")
    assert (fault.thread, "thread (0, 0, 0)" in fault.detail) == ((32, 0, 0), True)


@pytest.mark.parametrize("shift", [4, 8, 1])
def test_misaligned(shift):
    x, y = np.zeros(40, np.float32), np.zeros((8, 4), np.float32)
    assert launch("copy4", x, y, 16, block=8).faults == []
    only(launch("copy4", x, y, shift, block=8), "misaligned", "const float4*")


def test_faults_tell_reads_from_writes_and_atomics():
    y = np.zeros(4, np.float32)
    result = launch("copy", np.zeros(32, np.float32), y, 32, 0)
    assert only(result, "out of bounds", "y[i] = x[i").detail == (
        "a write of 4 bytes at byte 16 of 'argument 1' (16 bytes) is not within an allocation"
    )
    result = launch("sum_atomic", np.zeros(0, np.int32))
    assert only(result, "out of bounds", "sum_atomic").detail.startswith("a read and write of 4")
    x = np.zeros(40, np.float32)
    result = launch("copy4", x, np.zeros((8, 4), np.float32), 8, block=1)
    assert only(result, "misaligned", "const float4*").detail == (
        "a read of 16 bytes at byte 8 of 'argument 0' (160 bytes) must start at a multiple of 16"
    )
    result = launch("copy", np.ma.masked_all(1, np.float32), np.zeros(1, np.float32), 1, 0)
    assert only(result, "uninitialized", "y[i] = x[i").detail == (
        "nothing wrote all of the 4 bytes at byte 0 of 'argument 0' (4 bytes)"
    )


def test_uninitialized_global_memory():
    x, y = np.ma.masked_all(32, np.float32), np.ma.masked_all(32, np.float32)
    x[:5] = 7
    result = launch("copy", np.zeros(32, np.float32), y, 20, 0)
    assert result.faults == []
    assert y.count() == 20
    only(launch("copy", np.ma.masked_all(32, np.float32), y, 20, 0), "uninitialized", "y[i] = x[i")


def test_uninitialized_local_memory():
    y = np.zeros(32, np.float32)
    assert launch("local_array", y, 8).faults == []
    assert y.tolist() == [*range(8)] * 4
    fault = only(launch("local_array", y, 6), "uninitialized", "a[threadIdx.x % 8]")
    assert fault.thread == (6, 0, 0)


def test_uninitialized_and_foreign_shared_memory():
    y = np.zeros(64, np.float32)
    assert launch("window", y, 0, grid=2, shared=160).faults == []
    only(launch("window", y, 1, grid=2, shared=160), "uninitialized", "y[blockIdx.x")
    fault = only(launch("window", y, 96, grid=2, shared=160), "out of bounds", "y[blockIdx.x")
    assert fault.block == (0, 0, 0)  # though the next block's window lies there


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_race_in_shared_memory(seed):
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    assert launch("reverse", x, y, 1, block=128, seed=seed).faults == []
    np.testing.assert_array_equal(y, x[::-1])
    kinds = {f.kind for f in launch("reverse", x, y, 0, block=128, seed=seed).faults}
    assert "race" in kinds


def test_race_of_a_write_with_reads_before_it():
    x = np.zeros(1, np.float32)
    assert launch("reread", x, 1, block=64).faults == []
    fault = only(launch("reread", x, 0, block=64), "race", "x[0] = v + 1")
    assert fault.thread == (17, 0, 0)
    assert f"read the same bytes at planted.cu:{line_of('float v = x[0]')}" in fault.detail


def test_race_within_a_warp():
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    assert launch("in_warp", x, y, 1).faults == []
    only(launch("in_warp", x, y, 0), "race", "x[threadIdx.x ^ 1]")


def test_sync_orders_only_the_lanes_of_its_mask():
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    assert launch("in_half_warps", x, y, 8).faults == []
    only(launch("in_half_warps", x, y, 16), "race", "x[threadIdx.x ^ far]")


def test_race_between_blocks():
    total = np.zeros(1, np.int32)
    assert launch("sum_atomic", total, grid=3).faults == []
    assert total.tolist() == [96]
    assert {f.kind for f in launch("sum_plain", total, grid=3).faults} == {"race"}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_value_used_before_it_is_published(seed):
    """The reader's block sees the key, but nothing orders its read of the value after the write."""
    ids = np.random.default_rng(0).integers(0, 60, 512).astype(np.uint64)

    def insert(how):
        keys, values = np.full(128, 2**64 - 1, np.uint64), np.full(128, -1, np.int32)
        following, rows = np.zeros(1, np.int32), np.zeros(512, np.int32)
        args = ids, keys, values, following, rows, 512, 128, how
        return launch("insert", *args, grid=8, block=64, seed=seed), rows

    result, _ = insert(0)
    assert ("race", line_of("return values[slot]")) in {(f.kind, f.line) for f in result.faults}
    result, rows = insert(1)
    assert result.faults == []
    assert len(set(zip(ids.tolist(), rows.tolist(), strict=True))) == len(set(ids.tolist()))
    assert set(rows.tolist()) == set(range(len(set(ids.tolist()))))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("writer", "reader", "right"), [(1, 1, True), (0, 1, False), (1, 0, False), (2, 1, False)]
)
def test_blocks_are_ordered_by_fences_on_both_sides(writer, reader, right, seed):
    data, flag, out = np.zeros(64, np.int32), np.zeros(1, np.int32), np.zeros(192, np.int32)
    result = launch("publish", data, flag, out, writer, reader, grid=3, block=64, seed=seed)
    if right:
        assert result.faults == []
        assert out.tolist() == [0] * 64 + [*range(1, 65)] * 2
    else:
        only(result, "race", "= data[threadIdx.x]")


# Counters


@pytest.mark.parametrize(("step", "sectors"), [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_sectors(step, sectors):
    x, y = np.zeros(256, np.float32), np.zeros(32, np.float32)
    counts = launch("strided", x, y, step).counts
    assert (counts["sectors"], counts["requests"]) == (sectors + 4, 2)
    assert (counts["bytes_read"], counts["bytes_written"]) == (128 if step else 4, 128)


@pytest.mark.parametrize(("step", "conflicts"), [(1, 0), (2, 1), (32, 31), (33, 0), (0, 0)])
def test_bank_conflicts(step, conflicts):
    counts = launch("banks", np.zeros(32, np.float32), step).counts
    assert (counts["bank_conflicts"], counts["shared_wavefronts"]) == (conflicts, 34 + conflicts)


def test_vectors_and_narrow_accesses():
    x, y = np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)
    text = """ld.global.v4.u8 {%v0, %v1, %v2, %v3}, [%rd0];
    st.global.v4.u8 [%rd1], {%v3, %v2, %v1, %v0};"""
    sim.run(kernel(text, [4, 4], ".reg .b16 %v<4>;"), "f", 1, 32, (x, y))
    np.testing.assert_array_equal(y.reshape(-1, 4), x.reshape(-1, 4)[:, ::-1])
    assert execute("cvt.s32.s8", "s32", ("b16", [0x80, 0x7F])).tolist() == [-128, 127]
