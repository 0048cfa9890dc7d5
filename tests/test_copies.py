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
