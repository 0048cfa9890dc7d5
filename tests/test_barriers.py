"""Barriers of part of a block, of numbers and counts that registers hold, and their votes."""

import numpy as np
import pytest

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = r"""
// The first warp fills what the others read, and goes on without waiting for them.
extern "C" __global__ void produce(int* y, int arrive, int late) {
    __shared__ int cells[32];
    if (threadIdx.x < 32) {
        if (!late) cells[threadIdx.x] = threadIdx.x + 1;
        if (arrive) asm volatile("bar.arrive 1, 96;" ::: "memory");
        if (late) cells[threadIdx.x] = threadIdx.x + 1;
    } else {
        if (arrive) asm volatile("bar.sync 1, 96;" ::: "memory");
        y[threadIdx.x - 32] = cells[threadIdx.x % 32];
    }
}
// What the reader wrote before it waited, the producer that only arrived must not read.
extern "C" __global__ void one_way(int* y, int both) {
    __shared__ int cells[64];
    cells[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 32 && !both) asm volatile("barrier.cta.arrive.aligned 2, 64;" ::: "memory");
    else asm volatile("barrier.cta.sync.aligned 2, 64;" ::: "memory");
    if (threadIdx.x < 32) y[threadIdx.x] = cells[threadIdx.x + 32];
}
// Pairs of warps meet at a barrier of their own, again and again.
extern "C" __global__ void teams(int* y, int rounds, int far) {
    __shared__ int cells[128];
    int team = threadIdx.x / 64;
    for (int j = 0; j < rounds + team; ++j) {
        cells[threadIdx.x] = threadIdx.x + j;
        asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "r"(64) : "memory");
        y[threadIdx.x] = cells[threadIdx.x ^ far];
        asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "r"(64) : "memory");
    }
}
extern "C" __global__ void votes(const int* x, int* y) {
    int n = 0, all = 0, some = 0;
    asm volatile("{.reg .pred p, q; setp.ne.s32 p, %3, 0; setp.lt.s32 q, %3, 0;"
                 "barrier.cta.red.popc.u32 %0, 3, 64, p; selp.s32 %1, 1, 0, q;"
                 "bar.red.and.pred q, 4, p; selp.s32 %1, 1, 0, q;"
                 "bar.red.or.pred q, 4, 64, !p; selp.s32 %2, 1, 0, q;}"
                 : "=r"(n), "=r"(all), "=r"(some) : "r"(x[threadIdx.x]) : "memory");
    y[threadIdx.x] = n + 1000 * all + 2000 * some;
}
// Two places in the code vote at one barrier.
extern "C" __global__ void apart(int* y) {
    int n;
    if (threadIdx.x < 32) {
        n = __syncthreads_count(threadIdx.x % 2);
    } else {
        n = __syncthreads_count(threadIdx.x % 4 == 0) + 100;
    }
    y[threadIdx.x] = n;
}
extern "C" __global__ void lonely(int* y) {
    if (threadIdx.x < 32) asm volatile("bar.sync 5, 64;" ::: "memory");
    y[threadIdx.x] = 1;
}
"""


def launch(name, *args, block, **options):
    args = [np.int32(a) if isinstance(a, int) else a for a in args]
    return sim.run(SOURCE, name, 2, block, tuple(args), file="barriers.cu", **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("arch", [80, 90])
def test_some_arrive_and_others_wait(seed, arch):
    y = np.zeros(64, np.int32)
    result = sim.run(SOURCE, "produce", 1, 96, (y, np.int32(1), np.int32(0)), seed=seed, arch=arch)
    assert result.faults == []
    assert y.tolist() == [*range(1, 33)] * 2
    for arrive, late in [(0, 0), (1, 1)]:
        args = y, np.int32(arrive), np.int32(late)
        kinds = {f.kind for f in sim.run(SOURCE, "produce", 1, 96, args, seed=seed).faults}
        assert kinds
        assert kinds <= {"race", "uninitialized"}


def test_who_only_arrives_learns_nothing():
    y = np.zeros(32, np.int32)
    result = sim.run(SOURCE, "one_way", 1, 64, (y, np.int32(1)))
    assert (result.faults, y.tolist()) == ([], [*range(32, 64)])
    faults = sim.run(SOURCE, "one_way", 1, 64, (y, np.int32(0)), seed=1).faults
    assert {f.kind for f in faults} & {"race", "uninitialized"}


@pytest.mark.parametrize("seed", [0, 1])
def test_barriers_of_teams(seed):
    y = np.zeros(128, np.int32)
    args = y, np.int32(3), np.int32(33)
    assert sim.run(SOURCE, "teams", 1, 128, args, seed=seed).faults == []
    i = np.arange(128)
    assert y.tolist() == ((i ^ 33) + 2 + i // 64).tolist()
    args = y, np.int32(3), np.int32(64)
    faults = sim.run(SOURCE, "teams", 1, 128, args, seed=seed).faults
    assert {f.kind for f in faults} & {"race", "uninitialized"}


@pytest.mark.parametrize("count", [64, 10])
def test_votes(count):
    x, y = (np.arange(64) < count).astype(np.int32), np.zeros(128, np.int32)
    assert launch("votes", x, y[:64], block=64).faults != []  # two blocks write the same cells
    assert sim.run(SOURCE, "votes", 1, 64, (x, y)).faults == []
    assert y[:64].tolist() == [count + 1000 * (count == 64) + 2000 * (count < 64)] * 64


@pytest.mark.parametrize("seed", [0, 1])
def test_votes_from_two_places(seed):
    y = np.zeros(64, np.int32)
    result = sim.run(SOURCE, "apart", 1, 64, (y,), seed=seed)
    assert result.faults == []
    assert y.tolist() == [16 + 8] * 32 + [16 + 8 + 100] * 32


def test_those_who_wait_for_too_many():
    (fault,) = sim.run(SOURCE, "lonely", 1, 64, (np.zeros(64, np.int32),)).faults
    assert (fault.kind, fault.detail) == ("barrier", "threads of its block never reach it")
