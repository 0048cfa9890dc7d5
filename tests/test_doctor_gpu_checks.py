"""A driver, GPUs and CuPys that are simulated, and the simulator, which is not."""

import ctypes
import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from cupyrec import arrays, nvrtc
from cupyrec import doctor_gpu_checks as checks


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self, status=0, gpus=((b"NVIDIA H100", 80 << 30, 9, 0),)):
        self.status, self.gpus = status, gpus

    def cuInit(self, flags):
        return self.status

    def cuDriverGetVersion(self, version):
        version._obj.value = 12040

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)

    def cuDeviceGetName(self, name, length, number):
        name.value = self.gpus[number][0]

    def cuDeviceTotalMem_v2(self, memory, number):
        memory._obj.value = self.gpus[number][1]

    def cuDeviceGetAttribute(self, value, attribute, number):
        value._obj.value = self.gpus[number][attribute - 73]


OLD = (b"Tesla T4", 16 << 30, 7, 5)


@pytest.mark.parametrize(
    ("driver", "state", "found"),
    [
        (
            Driver(), "ok",
            "driver for CUDA 12.4; NVIDIA H100, 85.9 GB, compute capability 9.0",
        ),
        (
            Driver(gpus=[OLD]), "missing",
            "driver for CUDA 12.4; Tesla T4, 17.2 GB, compute capability 7.5",
        ),
        (
            Driver(803), "wrong",
            "driver for CUDA 12.4: cuInit returns 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
        ),
        (Driver(100), "missing", "driver for CUDA 12.4, no GPU (CUDA_VISIBLE_DEVICES='')"),
        (Driver(gpus=[]), "missing", "driver for CUDA 12.4, no GPU (CUDA_VISIBLE_DEVICES='')"),
    ],
)  # fmt: skip
def test_gpus(driver, state, found, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert checks.gpu()[:2] == (state, found)


def test_one_gpu_that_can_is_enough(monkeypatch):
    gpus = [OLD, (b"NVIDIA H100", 80 << 30, 9, 0)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(gpus=gpus))
    assert checks.gpu().state == "ok"


def test_no_driver(monkeypatch):
    def fail(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert checks.gpu() == ("missing", "no NVIDIA driver (libcuda.so.1)", checks.DRIVER)


@pytest.mark.parametrize("name", sorted({*checks.__all__} - {"DRIVER", "gpu"}))
def test_without_cupy(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    finding = getattr(checks, name)()
    if name == "cupy_package":
        assert finding[:2] == ("missing", "not installed")
        assert "pip install 'cupyrec[cuda12]'" in finding.remedy
    else:
        assert finding == ("missing", "CuPy is not installed", "see CuPy")


@pytest.mark.parametrize(
    ("version", "variants", "state", "part"),
    [
        ("14.2.0", ["cupy-cuda12x"], "ok", "14.2.0 (cupy-cuda12x)"),
        ("12.3.0", ["cupy-cuda12x"], "wrong", "older than 13.6"),
        ("14.2.0", ["cupy-cuda12x", "cupy-cuda13x"], "wrong", "(cupy-cuda12x, cupy-cuda13x)"),
    ],
)
def test_cupys(version, variants, state, part, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy",
                        SimpleNamespace(__version__=version))  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"cupy": variants})
    finding = checks.cupy_package()
    assert finding.state == state
    assert part in finding.found


def test_a_device_that_can_not_be_used(monkeypatch):
    def refuse(device):
        raise RuntimeError("device 'cuda': needs an NVIDIA GPU, got none")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(arrays, "module", refuse)
    assert checks.cuda_device()[:2] == ("missing", "needs an NVIDIA GPU, got none")


@pytest.mark.gpu
def test_a_device():
    try:
        arrays.module("cuda")
    except RuntimeError as error:
        pytest.skip(str(error))
    assert checks.gpu().state == checks.cuda_device().state == "ok"


def test_what_the_simulator_needs():
    pytest.importorskip("cupy")
    assert checks.cublaslt_version().state == "ok"
    assert checks.simulator().state == "ok"


def test_a_cache_of_kernels_that_is_not_writable(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPYREC_CACHE_DIR", "/proc/none")
    finding = checks.nvrtc_compiler()
    assert finding.state == "missing"
    assert "/proc/none, not writable" in finding.found


def test_a_compiler_is_not_taken_from_a_cache(monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPYREC_CACHE_DIR", str(tmp_path))

    def fail(*arguments):
        raise nvrtc.CompileError("nvrtc: broken")

    nvrtc.ptx(checks._TWICE)
    monkeypatch.setattr(nvrtc, "_compile", fail)
    with pytest.raises(nvrtc.CompileError):
        checks.nvrtc_compiler()
