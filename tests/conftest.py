"""Hypothesis tries the same examples in every run, and waits for Numba to compile."""

import gc
import os
import sys

import pytest
from hypothesis import settings

import cupyrec
from cupyrec import arrays, cpu
from cupyrec.parallel import world

settings.register_profile("cupyrec", deadline=None, derandomize=True)
settings.load_profile("cupyrec")


def pytest_collection_finish():
    """What is there by now, thousands of tests among it, no collection looks through again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    """Under mpirun the other ranks may wait for one that failed; its end ends them all."""
    if report.failed and world().size > 1:
        sys.stderr.write(f"\nrank {world().rank}: {report.nodeid}\n{report.longreprtext}\n")
        os._exit(1)


@pytest.fixture(autouse=True)
def seeded():
    """No test depends on those before it."""
    cupyrec.manual_seed(0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Loops over rows of embeddings cut even the few rows of a test into several blocks."""
    monkeypatch.setattr("cupyrec.ops.embedding_rows._ROWS", 7)


@pytest.fixture
def same_threads():
    """What a script sets the number of threads to is its own affair."""
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.fixture(params=["sim"])
def sim(request):
    """The array module of the simulator, for what it alone can count."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    return arrays.module(request.param)


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def xp(request):
    """The array module of a device that runs kernels."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    if request.param == "cuda":
        try:
            return arrays.module("cuda")
        except RuntimeError as error:
            pytest.skip(str(error))
    return arrays.module("sim")


@pytest.fixture(params=["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def np_or_xp(request):
    """The array module of every device."""
    if request.param == "cpu":
        return arrays.module("cpu")
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    try:
        return arrays.module(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
