import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import oracle
import pytest

from cupyrec import control_groups, cpu


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


@pytest.mark.parametrize(
    ("variable", "quota", "threads"),
    [("3", 1, 3), ("1", 9, 1), ("", 9, 4), (None, 9, 4), ("0", 2.5, 3), ("many", 0.5, 1)],
)
def test_threads_at_first(monkeypatch, variable, quota, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    monkeypatch.setattr(control_groups, "cores", lambda: quota)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cpu._initial_threads() == threads
    if variable != "3":
        monkeypatch.setenv("NUMBA_NUM_THREADS", "6")
        assert cpu._initial_threads() == (1 if variable == "1" else 6)


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(4, 2, 4), (9, 2, 6), (9, 3, 4), (1, 9, 1), (0, 99, 1)]
)
def test_a_share_of_cores_and_quota(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(control_groups, "cores", lambda: 12.5)
    monkeypatch.setattr(cpu, "_threads", 8)
    monkeypatch.setattr(cpu, "_chosen", False)
    cpu.share_cores(cores, processes)
    assert cpu.num_threads() == threads
    cpu.set_num_threads(7)
    cpu.share_cores(cores, processes)
    assert cpu.num_threads() == 7  # the user's own


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


@cpu.exact_loop
def _doubled_at(address, n):
    cpu.prefetch(address)
    cpu.prefetch(np.uint64(0))  # nobody's: asking is no access
    x = numba.carray(cpu.pointer(address), (n,), np.float32)
    for i in range(n):
        x[i] *= 2


def test_loops_reach_memory_by_its_address():
    x = np.arange(5, dtype=np.float32)
    _doubled_at(np.uint64(x[1:].ctypes.data), 3)
    np.testing.assert_array_equal(x, [0, 2, 4, 6, 4])


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
from cupyrec import control_groups, cpu
assert numba.njit(lambda x: x + 1)(1) == 2
assert numba.njit(lambda x: x + 2)(1) == 3
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("cupyrec ")]
    assert (run.returncode, run.stderr) == (0, "")
    assert lines == ["cupyrec compiling CPU loops new to this installation: up to a minute"]
    assert cpu.logger is logging.getLogger("cupyrec")


def test_serial_blas_in_another_thread_gives_the_same_bits():
    x, w = oracle.normals((4096, 64)), oracle.normals((64, 64), seed=1)

    def product():
        with cpu.serial_blas():
            return x @ w, [library.get_num_threads() for library in cpu._blas().lib_controllers]

    expected, threads = product()
    assert set(threads) == {1}
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            got, threads = pool.submit(product).result()
            assert set(threads) == {1}
            np.testing.assert_array_equal(got, expected)
            np.testing.assert_array_equal(product()[0], expected)
