"""What `cupyrec doctor` looks at of a GPU, CuPy and the simulator; see `doctor_checks`."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import tempfile

from cupyrec.doctor_checks import Finding, missing, numbers, ok, wrong

__all__ = [
    "DRIVER", "cublaslt_version", "cuda_device", "cupy_package", "gpu", "nvrtc_compiler",
    "simulator",
]  # fmt: skip

_GB = 1e9
_OLDEST = 8, 0  # compute capability
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_TWICE = """extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}"""

_CUDA = (
    "for --device cuda and sim: pip install 'cupyrec[cuda12]', or 'cupyrec[cuda13]' with a driver "
    "of 580 or newer"
)
#: What to do without a GPU or its driver.
DRIVER = (
    "for --device cuda: a GPU of compute capability 8.0 or higher and NVIDIA's driver, 525 or "
    "newer, by sudo ubuntu-drivers install or, of Debian, sudo apt install nvidia-driver"
)


def gpu() -> Finding:
    """Return which GPUs the driver has; that needs no CuPy."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return missing("no NVIDIA driver (libcuda.so.1)", DRIVER)
    status = driver.cuInit(0)
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    what = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if status not in (0, _NO_DEVICE):
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        told = (name.value or b"?").decode()
        remedy = "for --device cuda: load the driver anew or restart, until nvidia-smi works"
        return wrong(f"{what}: cuInit returns {status} ({told})", remedy)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        told = "" if seen is None else f" (CUDA_VISIBLE_DEVICES='{seen}')"
        return missing(f"{what}, no GPU{told}", DRIVER)
    gpus = [_describe(driver, number) for number in range(count.value)]
    found = f"{what}; {'; '.join(text for text, _ in gpus)}"
    old = all(capability < _OLDEST for _, capability in gpus)
    return missing(found, DRIVER) if old else ok(found)


def _describe(driver: ctypes.CDLL, number: int) -> tuple[str, tuple[int, int]]:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGetName(name, len(name), number)  # a device's handle is its number
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), number)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number)
        capability.append(value.value)
    size = f"{memory.value / _GB:.1f} GB"
    major, minor = capability
    text = f"{name.value.decode()}, {size}, compute capability {major}.{minor}"
    return text, (major, minor)


def _without_cupy() -> Finding | None:
    if importlib.util.find_spec("cupy") is None:
        return missing("CuPy is not installed", "see CuPy")
    return None


def cupy_package() -> Finding:
    """Return which CuPy there is."""
    if importlib.util.find_spec("cupy") is None:
        return missing("not installed", _CUDA)
    import cupy

    variants = sorted(set(importlib.metadata.packages_distributions().get("cupy", ())))
    found = f"{cupy.__version__} ({', '.join(variants)})"
    if len(variants) > 1:
        return wrong(found, f"they overwrite each other: pip uninstall {variants[0]}, or the other")
    if numbers(cupy.__version__) < (13, 6):
        return wrong(f"{found}, older than 13.6", _CUDA)
    return ok(found)


def cuda_device() -> Finding:
    """Return whether a kernel is compiled and runs on the GPU."""
    if lack := _without_cupy():
        return lack
    from cupyrec import arrays

    try:
        cupy = arrays.module("cuda")
    except RuntimeError as error:
        return missing(str(error).removeprefix("device 'cuda': "), "see GPU and CuPy")
    x = cupy.ones(32, dtype="f")
    cupy.RawKernel(_TWICE, "twice")((1,), (32,), (x, 32))
    if float(x.get().sum()) != 64:
        raise RuntimeError("a kernel gives wrong numbers")
    return ok("a kernel was compiled and ran")


def nvrtc_compiler() -> Finding:
    """Return whether NVRTC compiles CUDA, and where that is kept."""
    if lack := _without_cupy():
        return lack
    from cupyrec import nvrtc

    major, minor = nvrtc.version()
    cache = nvrtc.cache_folder()
    with tempfile.TemporaryDirectory() as folder:  # not out of a cache
        os.environ["CUPYREC_CACHE_DIR"] = folder
        nvrtc.ptx(_TWICE)
    found = f"{major}.{minor}, compiled kernels are kept in {cache}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        remedy = "each process compiles its kernels: name a folder by CUPYREC_CACHE_DIR"
        return missing(f"{found}, not writable ({error.strerror})", remedy)
    return ok(found)


def cublaslt_version() -> Finding:
    """Return which cublasLt there is."""
    if lack := _without_cupy():
        return lack
    from cupyrec import cublaslt_library

    library = cublaslt_library.library()
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    version = library.cublasLtGetVersion()
    return ok(f"{version // 10000}.{version // 100 % 100}.{version % 100}, {library._name}")


def simulator() -> Finding:
    """Return whether the simulator runs a kernel."""
    if lack := _without_cupy():
        return lack
    import numpy as np

    from cupyrec import sim

    x = np.ones(32, np.float32)
    result = sim.run(_TWICE, "twice", grid=1, block=32, args=(x, np.int32(32)))
    if x.sum() != 64 or result.faults:
        raise RuntimeError("a kernel gives wrong numbers")
    return ok("a kernel was compiled and ran")
