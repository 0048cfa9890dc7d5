import logging
import subprocess
import sys
import threading
import time

import numpy as np
import oracle
import pytest

from cupyrec import cpu


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


@pytest.mark.parametrize(("n", "block"), [(0, 4), (1, 4), (4, 4), (5, 4), (1025, 1), (1025, 64)])
def test_parallel_calls_each_block_once(threads, n, block):
    seen = []
    cpu.parallel(lambda i, j: seen.append((i, j)), n, block)
    assert sorted(seen) == [(i, min(i + block, n)) for i in range(0, n, block)]


def test_parallel_runs_on_as_many_threads_as_set(threads):
    meeting = threading.Barrier(threads, timeout=30)  # passed only if so many are there at once
    workers = set()

    def work(i, j):
        meeting.wait()
        workers.add(threading.get_ident())

    cpu.parallel(work, threads, 1)
    assert len(workers) == threads
    assert threading.get_ident() in workers


def test_parallel_raises_what_a_block_raises(threads):
    def work(i, j):
        if i == 5:
            raise RuntimeError("block 5")

    with pytest.raises(RuntimeError, match="block 5"):
        cpu.parallel(work, 10, 1)
    done = []
    cpu.parallel(lambda i, j: done.append(i), 10, 1)  # the pool lives on
    assert sorted(done) == list(range(10))


def test_parallel_may_be_nested(threads):
    done = []

    def outer(i, j):
        cpu.parallel(lambda k, _: (time.sleep(0.001), done.append((i, k))), 4, 1)

    cpu.parallel(outer, 4, 1)
    assert sorted(done) == [(i, k) for i in range(4) for k in range(4)]


def test_parallel_from_several_threads():
    sums = np.zeros((4, 100))

    def work_on(row):
        def work(i, j):
            row[i:j] += 1

        for _ in range(20):
            cpu.parallel(work, 100, 7)

    callers = [threading.Thread(target=work_on, args=(row,)) for row in sums]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    np.testing.assert_array_equal(sums, 20)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, "set_num_threads: 'threads' must be at least 1, got 0."),
        (1.5, TypeError, "set_num_threads: 'threads' must be an integer, got 1.5."),
    ],
)
def test_set_num_threads_refuses(value, error, text):
    before = cpu.num_threads()
    with pytest.raises(error, match=oracle.sentence(text)):
        cpu.set_num_threads(value)
    assert cpu.num_threads() == before


@cpu.loop
def _relu_sum(x):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] if x[i] > 0 or x[i] != x[i] else x.dtype.type(0)
    return total


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 517, 1024])
def test_loop_lets_reordered_sums_see_nan_and_inf(value, at):
    x = np.full(1025, -1, np.float32)
    x[at] = value
    np.testing.assert_equal(_relu_sum(x), np.float32(value))


@cpu.exact_loop
def _multiply_add(a, b, c):
    for i in range(a.size):
        c[i] += a[i] * b[i]


def test_exact_loop_rounds_every_operation():
    a = oracle.normals(1025, seed=1)
    b, c = oracle.normals(1025, seed=2), oracle.normals(1025, seed=3)
    rounded = (a * b).astype(np.float32) + c
    fused = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    _multiply_add(a, b, c)
    assert (rounded != fused).any()
    np.testing.assert_array_equal(c, rounded)


def test_serial_blas_runs_one_thread_and_restores():
    def threads():
        return [library["num_threads"] for library in cpu._blas().info()]

    before = threads()
    assert before, "NumPy's BLAS is not found"
    with cpu.serial_blas():
        assert threads() == [1] * len(before)
    assert threads() == before


def test_first_compilation_is_announced_once():
    program = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s %(message)s", level=logging.INFO)
import numba
from cupyrec import cpu
assert numba.njit(lambda x: x + 1)(1) == 2
assert numba.njit(lambda x: x + 2)(1) == 3
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("cupyrec ")]
    assert (run.returncode, run.stderr) == (0, "")
    assert lines == ["cupyrec compiling the CPU loops, once on this machine (about 15 s)"]
    assert cpu.logger is logging.getLogger("cupyrec")
