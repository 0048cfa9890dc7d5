"""Branches, calls, barriers; and waits that never end."""

import numpy as np
import oracle
import pytest
from one_instruction import HEADER, kernel

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
__device__ __noinline__ int collatz(int n, int* longest) {
    int steps = 0;
    for (; n != 1; ++steps) n = n % 2 ? 3 * n + 1 : n / 2;
    atomicMax(longest, steps);
    return steps;
}
__device__ __noinline__ float4 scaled(float4 v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
extern "C" __global__ void lengths(const int* n, int* steps, int* longest) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    steps[i] = i % 3 ? collatz(n[i], longest) : collatz(n[i] + 1, longest) + 100;
}
extern "C" __global__ void calls(float4* x) { x[threadIdx.x] = scaled(x[threadIdx.x], 2.f); }
extern "C" __global__ void choices(const int* x, int* y) {
    int i = threadIdx.x;
    switch (x[i]) {
        case 0: y[i] = i; break;
        case 1: y[i] = -i; break;
        case 2: y[i] = i * i; break;
        case 3: y[i] = 7; break;
        case 4: y[i] = i / 3; break;
        default: y[i] = 99;
    }
}
extern "C" __global__ void early_return(int* y, int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}
extern "C" __global__ void uneven_loops(int* y) {
    for (int j = 0; j <= threadIdx.x / 32; ++j) __syncthreads();
    y[threadIdx.x] = 1;
}
extern "C" __global__ void half_a_warp(int* y, unsigned mask) {
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(mask, v, 1);
    y[threadIdx.x] = v;
}
extern "C" __global__ void votes(const int* x, int* y) {
    y[threadIdx.x] = __syncthreads_count(x[threadIdx.x]) + 1000 * __syncthreads_and(x[threadIdx.x])
                     + 2000 * __syncthreads_or(x[threadIdx.x]);
}
extern "C" __global__ void locked(int* lock, int* total, int rounds) {
    for (int j = 0; j < rounds; ++j) {
        bool done = false;
        while (!done) {
            if (atomicCAS(lock, 0, 1) == 0) {
                __threadfence();
                *total += 1;
                __threadfence();
                atomicExch(lock, 0);
                done = true;
            }
        }
    }
}
extern "C" __global__ void forever(volatile int* x) { while (x[0] == 0) {} }
extern "C" __global__ void forever_bare(int* x) { while (true) {} }
extern "C" __global__ void stops(const int* x) { if (x[threadIdx.x] < 0) __trap(); }
extern "C" __global__ void diverges(int* y) {
    if (threadIdx.x % 64 < 40) y[threadIdx.x] = y[threadIdx.x] * y[threadIdx.x] + 3;
    else atomicAdd(&y[0], 0);
}
"""


def launch(name, *args, grid=1, block=32, **options):
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    return sim.run(SOURCE, name, grid, block, tuple(args), file="control.cu", **options)


def faults(result):
    return [(f.kind, SOURCE.split("\n")[f.line - 1].strip()[:30]) for f in result.faults]


def length(n):
    steps = 0
    while n != 1:
        n, steps = 3 * n + 1 if n % 2 else n // 2, steps + 1
    return steps


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_loops_and_calls_diverge_and_meet(arch, seed):
    n = np.random.default_rng(0).integers(1, 1000, 130).astype(np.int32)
    steps, longest = np.zeros(130, np.int32), np.zeros(1, np.int32)
    result = launch("lengths", n, steps, longest, grid=2, block=65, arch=arch, seed=seed)
    truth = [length(k) if i % 3 else length(k + 1) for i, k in enumerate(n.tolist())]
    assert result.faults == []
    assert steps.tolist() == [s if i % 3 else s + 100 for i, s in enumerate(truth)]
    assert longest.tolist() == [max(truth)]
    assert result.counts["longest_warp"] > result.counts["mean_warp"]


def test_structs_pass_through_calls():
    x = np.arange(128, dtype=np.float32).reshape(32, 4)
    assert launch("calls", x).faults == []
    np.testing.assert_array_equal(x.ravel(), 2 * np.arange(128))


def test_switch():
    x, y = np.arange(32, dtype=np.int32) % 7, np.zeros(32, np.int32)
    assert launch("choices", x, y).faults == []
    cases = {
        0: lambda i: i,
        1: lambda i: -i,
        2: lambda i: i * i,
        3: lambda i: 7,
        4: lambda i: i // 3,
    }
    assert y.tolist() == [cases.get(i % 7, lambda i: 99)(i) for i in range(32)]


def test_indexed_branch():
    text = """ld.global.u32 %r4, [%rd0];
    table: .branchtargets L0, L1;
    brx.idx %r4, table;
    L0: mov.u32 %r5, 10; bra END;
    L1: mov.u32 %r5, 20;
    END: st.global.u32 [%rd0], %r5;"""
    x = np.array([0, 1, 1, 0], np.int32)
    assert sim.run(kernel(text, [4]), "f", 1, 4, (x,)).faults == []
    assert x.tolist() == [10, 20, 20, 10]


def test_barrier_that_ended_threads_never_reach():
    y = np.zeros(64, np.int32)
    assert launch("early_return", y, 64, block=64).faults == []
    result = launch("early_return", y, 40, block=64)
    assert faults(result) == [("barrier", "__syncthreads();")]
    assert result.faults[0].thread == (40, 0, 0)


def test_barriers_in_uneven_loops():
    y = np.zeros(64, np.int32)
    assert [f.kind for f in launch("uneven_loops", y, block=64).faults] == ["barrier"]
    assert launch("uneven_loops", y, block=32).faults == []


def test_shuffle_whose_mask_names_absent_lanes():
    y = np.zeros(32, np.int32)
    assert launch("half_a_warp", y, np.uint32(0xFFFF)).faults == []
    assert y.tolist() == [i ^ 1 for i in range(16)] + [*range(16, 32)]
    result = launch("half_a_warp", y, np.uint32(0x1FFFF))
    assert faults(result) == [("barrier", "if (threadIdx.x < 16) v = __sh")]


def test_votes_of_a_block():
    x, y = np.ones(96, np.int32), np.zeros(96, np.int32)
    launch("votes", x, y, block=96)
    assert y.tolist() == [96 + 3000] * 96
    x[5:] = 0
    launch("votes", x, y, block=96)
    assert y.tolist() == [5 + 2000] * 96


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_threads_that_spin_do_not_starve_the_one_they_wait_for(seed):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    result = launch("locked", lock, total, 2, grid=2, block=33, seed=seed)
    assert result.faults == []
    assert (lock.tolist(), total.tolist()) == ([0], [132])


@pytest.mark.parametrize("name", ["forever", "forever_bare"])
def test_endless_loop(name):
    (fault,) = launch(name, np.zeros(1, np.int32), max_steps=1000).faults
    assert (fault.kind, fault.detail) == ("endless", "no end after 1000 steps (max_steps)")
    assert "forever" in SOURCE.split("\n")[fault.line - 1]


CALLS = """.func g(.param .b32 n) {{ .reg .b32 %r<2>; .param .b32 m;
{inner}
ret; }}
.func h(.param .b32 n) {{ .param .b32 m;
{outer}
ret; }}
.visible .entry f(.param .u64 p) {{ .param .b32 m;
call.uni g, (m); call.uni h, (m);
ret; }}"""


@pytest.mark.parametrize(
    ("inner", "outer", "name", "line"),
    [
        ("call.uni g, (m);", "", "g", 5),
        ("call.uni h, (m);", "call.uni g, (m);", "g", 8),
        ("", "call.uni g, (m); call.uni h, (m);", "h", 8),
    ],
)
def test_recursion_is_refused(inner, outer, name, line):
    text = (
        "sim: a function must not call itself, directly or through others, got "
        f"'{name}' (PTX line {line}, :0)."
    )
    with pytest.raises(sim.PtxError, match=oracle.sentence(text)):
        sim.run(HEADER + CALLS.format(inner=inner, outer=outer), "f", 1, 1, (np.zeros(1),))


def test_functions_may_be_called_from_many():
    chain = HEADER + CALLS.format(inner="", outer="call.uni g, (m); call.uni g, (m);")
    assert sim.run(chain, "f", 1, 1, (np.zeros(1),)).faults == []


def test_recursion_names_the_line_of_the_source():
    code = """__device__ __noinline__ int fib(int n) {
        return n < 2 ? n : fib(n - 1) + fib(n - 2);
    }
    extern "C" __global__ void f(int* x) { x[0] = fib(x[0]); }"""
    with pytest.raises(
        sim.PtxError, match=r"itself, .*got '\w*fib\w*' \(PTX line \d+, own\.cu:2\)"
    ):
        sim.run(code, "f", 1, 1, (np.zeros(1, np.int32),), file="own.cu")


def test_trap():
    x = np.arange(32, dtype=np.int32)
    assert launch("stops", x).faults == []
    (fault,) = launch("stops", np.where(x == 3, np.int32(-1), x)).faults
    assert (fault.kind, fault.thread) == ("trap", (3, 0, 0))


def test_divergent_branches_are_counted():
    y = np.zeros(128, np.int32)
    assert launch("diverges", y, block=128).counts["divergent_branches"] == 2
