import threading

import numpy as np
import pytest

from cupyrec import sim
from cupyrec.sim import kept
from cupyrec.sim.heap import the_heap
from cupyrec.sim.parser import parse
from cupyrec.sim.program import Program

SUM = """
extern "C" __global__ void sum(const float* x, float* out, int n, int fault) {
    __shared__ float part[64];
    extern __shared__ float more[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? x[i] : 0;
    more[threadIdx.x] = 1;
    if (fault != 1) __syncthreads();
    float total = 0;
    for (int j = 0; j < blockDim.x; j++) total += part[j] * more[j];
    if (fault == 2) out -= 8;
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
"""
EMPTY = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry empty()
{
ret;
}
"""


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept, "_kept", type(kept._kept)())


def run(grid, block, seed=0, fault=0):
    n = grid * block - 3
    x = np.arange(n, dtype=np.float32)
    out = np.full(grid, -1, np.float32)
    result = sim.run(
        SUM, "sum", grid, block, (x, out, np.int32(n), np.int32(fault)), seed=seed, shared=4 * block
    )
    return out.tolist(), result


@pytest.mark.parametrize("seed", [0, 5])
def test_launches_do_not_see_each_other(seed):
    """Each in any order as if it were the only one: results, counts, faults, costs."""
    cases = [(1, 32, 0), (5, 64, 1), (5, 64, 0), (2, 48, 2), (40, 64, 0), (1, 7, 0), (5, 64, 0)]
    alone = []
    for grid, block, fault in cases:
        kept._kept.clear()
        alone.append(run(grid, block, seed, fault))
    kept._kept.clear()
    assert [run(grid, block, seed, fault) for grid, block, fault in cases] == alone
    assert [bool(result.faults) for _, result in alone] == [fault > 0 for _, _, fault in cases]
    assert len(kept._kept) == 1


def test_a_kernel_is_decoded_once():
    run(5, 64)
    (machine,) = kept._kept.values()
    steps = list(machine.steps)
    run(2, 32)
    assert list(kept._kept.values()) == [machine]
    assert all(a is b for a, b in zip(steps, machine.steps, strict=True) if a)


def test_memory_is_given_back():
    live = list(the_heap().live)
    run(5, 64)
    assert list(the_heap().live) == live


def test_a_launch_that_fails_keeps_nothing():
    live = list(the_heap().live)
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="must be writeable"):
        sim.run(SUM, "sum", 1, 4, (np.ones(4, np.float32), x, np.int32(4), np.int32(0)), shared=16)
    assert not kept._kept
    assert list(the_heap().live) == live


def program():
    return Program(parse(EMPTY), "empty")


def test_two_at_once():
    one = program()
    with kept.machine(one, 32, the_heap()) as first, kept.machine(one, 32, the_heap()) as second:
        assert first is not second
    assert list(kept._kept.values()) == [first]
    assert not vars(second)


def test_large_launches_are_not_kept():
    one = program()
    with kept.machine(one, 32, the_heap()) as small:
        assert small.capacity == 256
    with kept.machine(one, kept._THREADS + 32, the_heap()) as large:
        assert large.capacity == kept._THREADS + 32
    assert list(kept._kept.values()) == [small]
    with kept.machine(one, 257, the_heap()) as larger:
        assert larger.capacity == 512
    assert list(kept._kept.values()) == [larger]
    assert not vars(small)


def test_those_not_used_for_longest_go_first(monkeypatch):
    programs = [program() for _ in range(3)]
    with kept.machine(programs[0], 32, the_heap()) as machine:
        size = kept._nbytes(machine)
    monkeypatch.setattr(kept, "_BYTES", 2 * size)
    for i in (1, 0, 2):
        with kept.machine(programs[i], 32, the_heap()):
            pass
    assert list(kept._kept) == [programs[0], programs[2]]


def test_threads_launch_at_once():
    alone = run(5, 64)
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(5, 64))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4
