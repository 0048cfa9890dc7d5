import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import oracle
import pytest

from cupyrec import arrays, kernel, sim
from cupyrec.kernel import Geometry, Kernel, KernelFault, vector_width
from cupyrec.scratch import counters

f32 = np.float32
HEADER = "#pragma once\n__device__ float twice(float x) { return 2 * x; }\n"
SOURCE = """// What: y = 2 x
#include "own.cuh"
#include "own.cuh"
extern "C" __global__ void f(const value_t* x, value_t* y, float a, long long n) {
    extern __shared__ float room[];
    long long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x ? twice(x[i]) * a : a;
}
"""
PARAMETERS = "const value_t* x, value_t* y, float a, int64_t n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A kernel of a folder of its own."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    (tmp_path / "own.cu").write_text(SOURCE)
    (tmp_path / "own.cuh").write_text(HEADER)
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    return Kernel("own.cu", "f", PARAMETERS, lambda N: Geometry(-(-N // 64), 64), optional="x")


def launch(own, x, y, a=1.5, n=None, macros=None, N=None):
    n = y.size if n is None else n
    own(x, y, a, n, macros=macros or {"value_t": "float"}, N=n if N is None else N)


def test_it_runs_on_the_simulator(own):
    x, y = sim.array(np.arange(100, dtype=f32)), sim.empty(100, f32)
    with sim.record() as seen:
        launch(own, x, y)
    np.testing.assert_array_equal(y.get(), 3 * np.arange(100, dtype=f32))
    (made,) = seen.launches
    assert (made.name, made.grid, made.block, made.file) == ("f", (2,), 64, "own.cu")
    assert made.result.counts["bytes_read"] == 400
    assert ".target sm_80" in made.ptx


def test_macros_arch_and_null_pointer(own):
    y = sim.empty(3, np.float64)
    with sim.schedule(arch=90), sim.record() as seen:
        launch(own, None, y, a=2, macros={"value_t": "double"})
    assert y.get().tolist() == [2, 2, 2]
    assert ".target sm_90" in seen.launches[0].ptx


def test_no_block_is_no_launch(own):
    with sim.record() as seen:
        launch(own, sim.empty(0, f32), sim.empty(0, f32))
    assert seen.launches == []


def test_a_fault_is_an_error(own):
    with pytest.raises(KernelFault, match=r"f: out of bounds at .*own\.cu:7, block \(1, 0, 0\)"):
        launch(own, sim.array(np.zeros(64, f32)), sim.empty(64, f32), n=65)
    with pytest.raises(KernelFault, match="nothing wrote"):
        launch(own, sim.empty(64, f32), sim.empty(64, f32))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(x=np.zeros(3, f32)), TypeError,
         "f: 'x' must be an array of device 'cuda' or 'sim', got ndarray."),
        (dict(y=None), TypeError,
         "f: 'y' must be an array of device 'cuda' or 'sim', got NoneType."),
        (dict(x=sim.empty(3, np.float64)), TypeError, "f: 'x' must be float32, got float64."),
        (dict(x=sim.empty((3, 2), f32).T), ValueError,
         "f: 'x' must be C-contiguous, got shape (2, 3) with strides (4, 8)."),
        (dict(x=sim.empty(6, f32)[::2]), ValueError,
         "f: 'x' must be C-contiguous, got shape (3,) with strides (8,)."),
        (dict(a="1"), TypeError, "f: 'a' must be float32, got '1'."),
        (dict(a=1e39), ValueError, "f: 'a' must be in float32's range, got 1e+39."),
        (dict(a=10**400), ValueError, f"f: 'a' must be in float32's range, got {10**400}."),
        (dict(n=3.0), TypeError, "f: 'n' must be int64, got 3.0."),
        (dict(n=2**63, N=1), ValueError,
         f"f: 'n' must lie in [{-(2**63)}, {2**63 - 1}] as int64, got {2**63}."),
    ],
)  # fmt: skip
def test_it_refuses(own, change, error, text):
    call = dict(x=sim.empty(3, f32), y=sim.empty(3, f32)) | change
    with pytest.raises(error, match=oracle.sentence(text)):
        launch(own, **({"N": 3, "n": 3} | call))


def test_it_refuses_another_number_of_arguments_and_none_that_has_a_device(own):
    text = "f: there must be 4 arguments (x, y, a, n), got 1."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        own(sim.empty(3, f32), N=3)
    scalar = Kernel("own.cu", "f", "const float* x, int n", lambda: Geometry(1, 1), optional="x")
    text = "f: there must be an array among the arguments, got none."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        scalar(None, 3)


class FakeArray:
    """As much of a `cupy.ndarray` as the checks look at."""

    dtype, shape, strides = np.dtype(f32), (3,), (4,)
    flags = types.SimpleNamespace(c_contiguous=True)
    device = types.SimpleNamespace(id=0)


@pytest.fixture
def fake_cupy(monkeypatch):
    """A module in CuPy's place that keeps what it is asked."""
    seen = []

    class RawModule:
        def __init__(self, code, options):
            seen.append((code, options))

        def get_function(self, name):
            def function(grid, block, arguments, shared_mem):
                seen.append((name, grid, block, arguments, shared_mem))

            function.shared_size_bytes = 1024
            seen.append(function)
            return function

    def device():
        return types.SimpleNamespace(id=0, attributes={"MaxSharedMemoryPerBlockOptin": 232448})

    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.RawModule = FakeArray, RawModule
    cupy.cuda = types.SimpleNamespace(Device=device)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return seen


def test_the_gpu_gets_the_same_launch(own, fake_cupy):
    x, y = FakeArray(), FakeArray()
    for _ in range(2):  # compiled once
        own(x, y, 1.5, 3, macros={"value_t": "float"}, N=3)
    (code, options), function, first, second = fake_cupy
    assert options == ("--std=c++17", "-Dvalue_t=float")
    assert function.max_dynamic_shared_size_bytes == 232448 - 1024  # more than 48 KB
    assert code.startswith('#line 1 "kernels/own.cu"\n// What') and "twice" in code
    name, grid, block, arguments, shared = first
    assert (name, grid, block, shared) == ("f", (1,), (64,), 0)
    assert arguments[:2] == (x, y)
    assert [(type(v), v) for v in arguments[2:]] == [(f32, 1.5), (np.int64, 3)]
    assert first == second


def test_no_more_shared_memory_than_there_is(own, fake_cupy):
    most = 232448 - 1024
    own.geometry = lambda N: Geometry((3, 1), 64, N)
    own(FakeArray(), FakeArray(), 1.5, 3, macros={"value_t": "float"}, N=most)
    assert fake_cupy[-1][1] == (3, 1) and fake_cupy[-1][4] == most
    text = (
        f"f: a block must have at most {most} bytes of dynamic shared memory on this GPU, "
        f"got {most + 1}."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        own(FakeArray(), FakeArray(), 1.5, 3, macros={"value_t": "float"}, N=most + 1)


def test_the_gpu_must_be_the_current_one(own, fake_cupy):
    other = FakeArray()
    other.device = types.SimpleNamespace(id=1)
    text = "f: 'y' must be on GPU 0, the current one, got GPU 1."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        launch(own, FakeArray(), other, n=3)


def test_devices_must_agree(own, fake_cupy):
    text = "f: 'y' must be on device 'cuda' like 'x', got 'sim'."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        launch(own, FakeArray(), sim.empty(3, f32))


def test_headers_are_pasted_once_and_lines_keep_their_numbers(own):
    lines = kernel.source("own.cu").split("\n")
    assert lines.count('#line 1 "kernels/own.cuh"') == 1
    number, name = 0, "kernels/own.cu"
    for line in lines:
        number += 1
        if found := re.match(r'#line (\d+) "(.*)"', line):
            number, name = int(found[1]) - 1, found[2]
        if 'extern "C"' in line:
            assert (name, number) == ("kernels/own.cu", 4)
        if "twice(float x)" in line:
            assert (name, number) == ("kernels/own.cuh", 2)


def test_a_missing_header_is_named(own):
    path = kernel.folder() / "own.cu"
    path.write_text('#include "other.cuh"\n' + SOURCE)
    text = f"kernel: 'other.cuh' must lie in '{kernel.folder()}', found nothing there."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        kernel.source("own.cu")


def test_an_error_of_the_compiler_names_the_line(own):
    path = kernel.folder() / "own.cu"
    path.write_text(SOURCE.replace("if (i < n)", "if (i < m)"))
    with pytest.raises(RuntimeError, match=r'kernels/own\.cu\(7\): error: identifier "m"'):
        launch(own, sim.empty(3, f32), sim.empty(3, f32))


def test_sources_are_found_beside_the_module_and_beside_its_package(tmp_path, monkeypatch):
    package = tmp_path / "cupyrec"
    for kernels in (tmp_path / "kernels", package / "kernels"):  # bare or editable; wheel
        kernels.mkdir(parents=True)
        monkeypatch.setattr(kernel, "__file__", str(package / "kernel.py"))
        assert kernel.folder() == kernels
    shutil.rmtree(package / "kernels")
    assert kernel.folder() == tmp_path / "kernels"


def test_the_real_folder():
    assert kernel.folder() == Path(__file__).parents[1] / "kernels"
    assert "philox4x32" in kernel.source("philox.cuh")


def test_vector_width():
    assert [vector_width(n) for n in (1, 2, 3, 4, 10, 16, 130)] == [1, 2, 1, 4, 2, 4, 2]
    x = sim.empty(64, f32)
    assert [vector_width(4, x[i:]) for i in range(5)] == [4, 1, 2, 1, 4]
    assert vector_width(4, x, x[2:]) == 2


def test_counters_are_zeros_again_after_a_kernel_that_did_not_finish(own):
    zeros = counters(sim, 3)
    zeros[:] = 2
    with pytest.raises(KernelFault):
        launch(own, sim.empty(3, f32), sim.empty(3, f32))  # nothing wrote x
    assert counters(sim, 3).get().tolist() == [0, 0, 0]


def test_arrays_know_their_device(fake_cupy):
    assert arrays.device(FakeArray()) == "cuda"
    assert arrays.namespace("f", FakeArray()) is sys.modules["cupy"]
    assert arrays.device(sim.empty(1)) == "sim"
