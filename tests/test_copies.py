import numpy as np
import pytest

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
#include <cuda_pipeline.h>
extern "C" __global__ void f(const float* x, float* y, int wait, int take) {
    __shared__ float4 tile[64];
    __pipeline_memcpy_async(&tile[threadIdx.x], (const float4*)x + threadIdx.x, 16, 16 - take);
    __pipeline_commit();
    __pipeline_memcpy_async(&tile[32 + threadIdx.x], (const float4*)x + 32 + threadIdx.x, 16);
    __pipeline_commit();
    if (wait == 1) __pipeline_wait_prior(1);
    if (wait == 0) __pipeline_wait_prior(0);
    ((float4*)y)[threadIdx.x] = tile[threadIdx.x];
    ((float4*)y)[32 + threadIdx.x] = wait < 2 && wait ? make_float4(0, 0, 0, 0)
                                                      : tile[32 + threadIdx.x];
}
"""


def launch(wait, take, seed=0):
    x, y = np.arange(1, 257, dtype=np.float32), np.zeros(256, np.float32)
    return sim.run(SOURCE, "f", 1, 32, (x, y, np.int32(wait), np.int32(take)), seed=seed), x, y


@pytest.mark.parametrize("seed", [0, 1])
def test_copies_land_when_waited_for(seed):
    result, x, y = launch(0, 16, seed)
    assert result.faults == []
    np.testing.assert_array_equal(y, x)
    result, x, y = launch(1, 16, seed)
    assert result.faults == []
    np.testing.assert_array_equal(y[:128], x[:128])


def test_copies_fill_with_zeros():
    result, x, y = launch(0, 8)
    assert result.faults == []
    np.testing.assert_array_equal(y[:128].reshape(-1, 4)[:, :2], x[:128].reshape(-1, 4)[:, :2])
    assert not y[:128].reshape(-1, 4)[:, 2:].any()


def test_reading_before_the_wait():
    result, _, _ = launch(2, 16)
    assert {f.kind for f in result.faults} == {"uninitialized"}
    assert {f.line for f in result.faults} >= {11}


ORDERS = r"""
#include <cuda_pipeline.h>
extern "C" __global__ void f(float4* x, float4* y, int how) {
    __shared__ float4 tile[64];
    int i = threadIdx.x, other = (i + 32) % 64;
    __pipeline_memcpy_async(&tile[i], &x[i], 16);
    __pipeline_commit();
    if (how == 1) { __syncthreads(); x[other] = make_float4(0, 0, 0, 0); __syncthreads(); }
    if (how == 2) x[i] = make_float4(0, 0, 0, 0);
    if (how == 3) { __syncthreads(); tile[other] = make_float4(0, 0, 0, 0); __syncthreads(); }
    if (how == 4) __syncthreads();
    __pipeline_wait_prior(0);
    if (how != 4) __syncthreads();
    y[i] = tile[other];
    if (how == 5) x[other] = make_float4(0, 0, 0, 0);
    if (how == 6) {
        __syncthreads();
        __pipeline_memcpy_async(&tile[i], &x[i], 16);
        __pipeline_commit();
        *(volatile float*)&tile[i] = 1;
    }
    __pipeline_wait_prior(0);
}
"""
WAIT = "__pipeline_wait_prior(0);"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("how", "lines"),
    [
        (0, set()),
        (1, {WAIT}),  # the source changes before the copy has landed, barriers or not
        (2, {WAIT}),
        (3, {WAIT}),  # and so does the target
        (4, {"y[i] = tile[other];"}),  # the copy lands after the barrier
        (5, set()),
        (6, {WAIT}),  # even by its own thread
    ],
)  # fmt: skip
def test_what_happens_before_the_copy_lands(how, lines, seed):
    x, y = np.ones((64, 4), np.float32), np.zeros((64, 4), np.float32)
    result = sim.run(ORDERS, "f", 1, 64, (x, y, np.int32(how)), seed=seed)
    assert {f.kind for f in result.faults} <= {"race"}
    found = {ORDERS.split("\n")[f.line - 1].strip() for f in result.faults}
    assert found <= lines
    assert bool(found) == bool(lines)


def test_the_fault_of_a_copy_names_both_lines():
    x, y = np.ones((64, 4), np.float32), np.zeros((64, 4), np.float32)
    (fault,) = sim.run(ORDERS, "f", 1, 64, (x, y, np.int32(2)), file="c.cu").faults
    assert fault.line == 1 + ORDERS.split("\n").index(f"    {WAIT}")
    assert fault.detail == (
        "thread (0, 0, 0) of block (0, 0, 0) wrote the same bytes at c.cu:9, "
        "while this copy was under way"
    )


def test_a_copy_reads_no_more_than_it_must():
    x, y = np.arange(1, 255, dtype=np.float32), np.zeros(256, np.float32)
    code = SOURCE.replace(
        "+ 32 + threadIdx.x, 16)", "+ 32 + threadIdx.x, 16, threadIdx.x / 31 * 8)"
    )
    assert sim.run(code, "f", 1, 32, (x, y, np.int32(0), np.int32(16))).faults == []
    assert y[128:].tolist() == [*range(129, 255), 0, 0]
    code = code.replace("31 * 8", "31 * 4")
    (fault,) = sim.run(code, "f", 1, 32, (x, y, np.int32(0), np.int32(16))).faults
    assert (fault.kind, fault.thread) == ("out of bounds", (31, 0, 0))
    assert fault.detail.startswith("a read of 12 bytes at byte 1008 of 'argument 0'")
