"""Barriers in shared memory: phases, counts, what they order, and copies that arrive."""

import numpy as np
import pytest
from one_instruction import kernel

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
#include <cuda_awbarrier.h>
#include <cuda_pipeline.h>
// Each thread writes a cell, then reads that of another, round by round.
extern "C" __global__ void rounds(int* y, int n, int wait) {
    __shared__ __mbarrier_t full;
    __shared__ int cells[2][96];
    if (threadIdx.x == 0) __mbarrier_init(&full, blockDim.x);
    __syncthreads();
    int sum = 0;
    for (int j = 0; j < n; ++j) {
        cells[j % 2][threadIdx.x] = threadIdx.x + j;
        auto token = __mbarrier_arrive(&full);
        if (wait) while (!__mbarrier_test_wait(&full, token)) {}
        sum += cells[j % 2][95 - threadIdx.x];
    }
    y[threadIdx.x] = sum;
}
extern "C" __global__ void no_init_order(int* y) {
    __shared__ __mbarrier_t full;
    if (threadIdx.x == 0) __mbarrier_init(&full, blockDim.x);
    if (threadIdx.x == 40) __mbarrier_arrive(&full);
}
extern "C" __global__ void too_many(int* y) {
    __shared__ __mbarrier_t full;
    if (threadIdx.x == 0) __mbarrier_init(&full, 2);
    __syncthreads();
    if (threadIdx.x < 2) y[threadIdx.x] = __mbarrier_token_pending_count(__mbarrier_arrive(&full));
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.noComplete.shared.b64 _, [%0], %1;"
                     :: "r"((unsigned)__cvta_generic_to_shared(&full)), "r"(y[2]) : "memory");
        __mbarrier_inval(&full);
        if (y[3]) __mbarrier_arrive(&full);
    }
}
extern "C" __global__ void copies(const float4* x, float4* y, int wait) {
    __shared__ __mbarrier_t full;
    __shared__ float4 cells[64];
    if (threadIdx.x == 0) __mbarrier_init(&full, blockDim.x);
    __syncthreads();
    __pipeline_memcpy_async(&cells[threadIdx.x], &x[threadIdx.x], 16);
    if (wait) {
        __pipeline_arrive_on(&full);
        auto token = __mbarrier_arrive(&full);
        while (!__mbarrier_test_wait(&full, token)) {}
    }
    y[threadIdx.x] = cells[63 - threadIdx.x];
}
"""

STANDARD = r"""
#pragma nv_diag_suppress static_var_with_dynamic_init
#include <cuda/barrier>
extern "C" __global__ void standard(int* y) {
    __shared__ cuda::barrier<cuda::thread_scope_block> meeting;
    __shared__ int cells[64];
    if (threadIdx.x == 0) init(&meeting, blockDim.x);
    __syncthreads();
    cells[threadIdx.x] = threadIdx.x;
    meeting.arrive_and_wait();
    int v = cells[63 - threadIdx.x];
    if (threadIdx.x < 32) { meeting.arrive_and_drop(); y[threadIdx.x] = v; return; }
    meeting.arrive_and_wait();
    cells[threadIdx.x] = v + 100;
    meeting.arrive_and_wait();
    y[threadIdx.x] = cells[threadIdx.x ^ 1];
}
"""


def launch(name, *args, block, **options):
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    return sim.run(SOURCE, name, 1, block, tuple(args), file="mbarriers.cu", **options)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_phases(arch, seed):
    y = np.zeros(96, np.int32)
    assert launch("rounds", y, 5, 1, block=96, arch=arch, seed=seed).faults == []
    assert y.tolist() == [5 * (95 - i) + 10 for i in range(96)]
    faults = launch("rounds", y, 1, 0, block=96, arch=arch, seed=seed).faults
    assert {f.kind for f in faults} & {"race", "uninitialized"}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_standard_barrier(arch, seed):
    y = np.zeros(64, np.int32)
    assert sim.run(STANDARD, "standard", 1, 64, (y,), arch=arch, seed=seed).faults == []
    assert y.tolist() == [63 - i for i in range(32)] + [100 + 63 - (i ^ 1) for i in range(32, 64)]


def test_initialisation_must_be_ordered():
    kinds = {f.kind for f in launch("no_init_order", np.zeros(1, np.int32), block=64).faults}
    assert kinds & {"race", "uninitialized"}


def test_counts():
    y = np.array([9, 9, 1, 0], np.int32)
    assert launch("too_many", y, block=32).faults == []
    assert y[:2].tolist() == [2, 1]
    (fault,) = launch("too_many", np.array([0, 0, 3, 0], np.int32), block=32).faults
    assert (fault.kind, fault.detail) == (
        "barrier", "more threads arrive in one phase than it expects",
    )  # fmt: skip
    (fault,) = launch("too_many", np.array([0, 0, 1, 1], np.int32), block=32).faults
    assert fault.kind == "uninitialized"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("arch", [80, 90])
def test_copies_arrive(arch, seed):
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    assert launch("copies", x, y, 1, block=64, arch=arch, seed=seed).faults == []
    np.testing.assert_array_equal(y.reshape(-1, 4), x.reshape(-1, 4)[::-1])
    faults = launch("copies", x, y, 0, block=64, seed=seed).faults
    assert {f.kind for f in faults} & {"race", "uninitialized"}


def test_bytes_that_copies_bring():
    """The phase is over when all have arrived and all bytes are there, in either order."""
    test = """mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r4], 0;
    selp.u32 %r5, 1, 0, %p1; st.global.u32 [%rd0+{}], %r5;"""
    text = f""".shared .align 8 .b64 bar; mov.u32 %r4, bar;
    mbarrier.init.shared::cta.b64 [%r4], 2;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r4], 16; {test.format(0)}
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd5, [%r4], 48; {test.format(4)}
    mbarrier.pending_count.b64 %r6, %rd5; st.global.u32 [%rd0+20], %r6;
    mbarrier.arrive.shared::cta.b64 _, [%r4]; {test.format(8)}
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4], 8; {test.format(12)}
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r4], 40; {test.format(16)}
    mbarrier.test_wait.shared::cta.b64 %p1, [%r4], %rd5; selp.u32 %r5, 1, 0, %p1;
    st.global.u32 [%rd0+24], %r5;"""
    y = np.zeros(7, np.uint32)
    assert sim.run(kernel(text, [0]), "f", 1, 1, (y,)).faults == []
    assert y.tolist() == [0, 0, 0, 0, 1, 2, 1]
