"""What `cupyrec doctor` looks at, each by a small function that returns a `Finding`.

They run in processes of their own, where whatever may be broken is imported. One raises what it
didn't expect, and the remedy that stands beside it in `GROUPS` is told with that.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cupyrec import __version__, control_groups

__all__ = ["GROUPS", "Finding"]

_GB = 1e9
_LITTLE = 1e9  # bytes of memory or of a disk that hardly any training does with
_DIRECT = 4096  # bytes, and their alignment, that any disk reads past the page cache
_ANSWER = 5.0  # seconds for a launcher to tell its version
_OLDEST = 8, 0  # compute capability
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_TWICE = """extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}"""

_CUDA = "for --device cuda: pip install 'cupyrec[cuda12]', or 'cupyrec[cuda13]' with driver 580 on"
_SIM = "for --device sim: pip install 'cupyrec[sim]'"
_MPI = "for several ranks: pip install 'cupyrec[mpi]', or apt install libopenmpi-dev openmpi-bin"
_DRIVER = (
    "for --device cuda: a GPU of compute capability 8.0 or higher and NVIDIA's driver, 525 or newer; "
    "sudo ubuntu-drivers install, or of Debian sudo apt install nvidia-driver; all else runs without"
)


class Finding(NamedTuple):
    """What was found of one thing.

    Attributes
    ----------
    state : str
        ``ok``; ``missing``: one can do without; ``wrong``: broken, or nothing works without it.
    found : str
    remedy : str
        Of what isn't ok: what can't be done so, and how to mend it.
    """

    state: str
    found: str
    remedy: str = ""


def _ok(found: str) -> Finding:
    return Finding("ok", found)


def _missing(found: str, remedy: str) -> Finding:
    return Finding("missing", found, remedy)


def _wrong(found: str, remedy: str) -> Finding:
    return Finding("wrong", found, remedy)


# The machine


def _cupyrec() -> Finding:
    return _ok(f"{__version__}, in {Path(__file__).parent}")


def _python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info < (3, 11):
        return _wrong(found, "nothing works before Python 3.11: make a virtual environment of one")
    return _ok(found)


def _memory() -> Finding:
    told = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = (1024 * int(told[name]) for name in ("MemTotal", "MemAvailable"))
    limit = control_groups.memory()
    found = f"{free / _GB:.1f} of {total / _GB:.1f} GB available"
    if limit < total:
        found += f", {limit / _GB:.1f} GB to this process by its control group"
    if min(free, limit) < _LITTLE:
        return _missing(found, "for all but small tables: end other programs, or raise the limit")
    return _ok(found)


def _huge_pages() -> Finding:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = setting.read_text() if setting.exists() else "[not there]"
    chosen = text[text.index("[") + 1 : text.index("]")]
    if chosen in ("always", "madvise"):
        return _ok(chosen)
    remedy = f"look-ups in large tables are slower so: as root, echo madvise > {setting}"
    return _missing(chosen, remedy)


def _cores() -> Finding:
    from cupyrec import cpu

    allowed, quota, threads = len(os.sched_getaffinity(0)), control_groups.cores(), cpu.num_threads()
    limit = f", of which a control group gives {quota:g}" if quota < allowed else ""
    return _ok(f"{threads} threads on {allowed} of {os.cpu_count()} cores{limit}")


def _disk(folder: str) -> Finding:
    free = f"{folder}: {shutil.disk_usage(folder).free / _GB:.1f} GB free"
    try:
        direct = _reads_directly(folder)
    except OSError as error:
        return _missing(
            f"{free}, not writable ({error.strerror})",
            "name folders that are, by --out, by embedding.path and by TMPDIR",
        )
    if shutil.disk_usage(folder).free < _LITTLE:
        return _missing(free, "there is little room for checkpoints and rows: make some")
    if not direct:
        remedy = "rows of the tier cached_ssd are read through the page cache here, and fill memory"
        return _missing(f"{free}, no direct reads", f"{remedy}: keep them on a disk with direct I/O")
    return _ok(f"{free}, direct reads")


def _reads_directly(folder: str) -> bool:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".cupyrec-doctor-") as file:
        file.write(bytes(_DIRECT))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.preadv(descriptor, [mmap.mmap(-1, _DIRECT)], 0) == _DIRECT
        except OSError:
            return False
        finally:
            os.close(descriptor)


def _here() -> Finding:
    return _disk(os.getcwd())


def _temporary() -> Finding:
    return _disk(tempfile.gettempdir())


# What training on the CPU needs


def _packages() -> Finding:
    """Of what the metadata of cupyrec ask for, what is there, not whether it works."""
    try:
        required = importlib.metadata.requires("cupyrec") or []
    except importlib.metadata.PackageNotFoundError:
        return _missing("cupyrec runs from a folder", "the command cupyrec: pip install .")
    found, lacks = [], []
    for line in required:
        name, least = re.match(r"([\w.-]+)(?:\s*>=\s*([\d.]+))?", line).groups()
        if "extra ==" in line:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacks.append(f"{name} is not there")
            continue
        found.append(f"{name} {version}")
        if least and _numbers(version) < _numbers(least):
            lacks.append(f"{name} {version} is older than {least}")
    if lacks:
        return _wrong("; ".join(lacks), "nothing works without: pip install --upgrade cupyrec")
    return _ok(", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _numpy() -> Finding:
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    found = [
        f"{blas['internal_api']} {blas['version']}, {blas['num_threads']} threads"
        for blas in threadpool_info()
        if blas["user_api"] == "blas"
    ]
    if not found:
        return _missing(
            f"{np.__version__}, no BLAS that threadpoolctl knows",
            "matrix products may use more threads than --threads says: pip install numpy brings one",
        )
    return _ok(f"{np.__version__}, {'; '.join(found)}")


def _loops() -> Finding:
    import numba

    from cupyrec import cpu, loop_cache

    try:
        folder = loop_cache.LoopCache(cpu._await_sum.py_func).cache_path
    except RuntimeError:  # Numba's: no folder can be written
        return _missing(
            f"Numba {numba.__version__}, compiled loops are kept nowhere",
            "each process compiles its loops for a minute: name a folder by NUMBA_CACHE_DIR",
        )
    return _ok(f"Numba {numba.__version__}, compiled loops are kept in {folder}")


def _commands() -> Finding:
    import cupyrec.commands

    return _ok(f"{len(cupyrec.commands.MODELS)} models")


# What a GPU and the simulator need


def _gpu() -> Finding:
    """By the driver itself, which needs no CuPy."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _missing("no NVIDIA driver (libcuda.so.1)", _DRIVER)
    status = driver.cuInit(0)
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    what = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if status not in (0, _NO_DEVICE):
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        told = (name.value or b"?").decode()
        remedy = "for --device cuda: load the driver anew or restart, until nvidia-smi works"
        return _wrong(f"{what}: cuInit returns {status} ({told})", remedy)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        told = "" if seen is None else f" (CUDA_VISIBLE_DEVICES='{seen}')"
        return _missing(f"{what}, no GPU{told}", _DRIVER)
    gpus = [_describe(driver, number) for number in range(count.value)]
    found = f"{what}; {'; '.join(text for text, _ in gpus)}"
    old = all(capability < _OLDEST for _, capability in gpus)
    return _missing(found, _DRIVER) if old else _ok(found)


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


def _without_cupy(remedy: str) -> Finding | None:
    if importlib.util.find_spec("cupy") is None:
        return _missing("CuPy is not installed", remedy)
    return None


def _cupy() -> Finding:
    if lack := _without_cupy(_CUDA):
        return lack
    import cupy

    variants = sorted(set(importlib.metadata.packages_distributions().get("cupy", ())))
    found = f"{cupy.__version__} ({', '.join(variants)})"
    if len(variants) > 1:
        return _wrong(found, f"they overwrite each other: pip uninstall {' '.join(variants)}; {_CUDA}")
    if _numbers(cupy.__version__) < (13, 6):
        return _wrong(f"{found}, older than 13.6", _CUDA)
    return _ok(found)


def _cuda() -> Finding:
    """Whether a kernel of ours is compiled and runs on the GPU."""
    if lack := _without_cupy(_CUDA):
        return lack
    from cupyrec import arrays

    try:
        cupy = arrays.module("cuda")
    except RuntimeError as error:
        return _missing(str(error).removeprefix("device 'cuda': "), "see GPU and CuPy")
    x = cupy.ones(32, dtype="f")
    cupy.RawKernel(_TWICE, "twice")((1,), (32,), (x, 32))
    if float(x.get().sum()) != 64:
        raise RuntimeError("a kernel gives wrong numbers")
    return _ok("a kernel was compiled and ran")


def _nvrtc() -> Finding:
    if lack := _without_cupy(_SIM):
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
        return _missing(f"{found}, not writable ({error.strerror})", remedy)
    return _ok(found)


def _cublaslt() -> Finding:
    if lack := _without_cupy(_SIM):
        return lack
    from cupyrec import cublaslt_library

    library = cublaslt_library.library()
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return _ok(f"{library.cublasLtGetVersion()}, {library._name}")


def _simulator() -> Finding:
    if lack := _without_cupy(_SIM):
        return lack
    import numpy as np

    from cupyrec import sim

    x = np.ones(32, np.float32)
    result = sim.run(_TWICE, "twice", grid=1, block=32, args=(x, np.int32(32)))
    if x.sum() != 64 or result.faults:
        raise RuntimeError("a kernel gives wrong numbers")
    return _ok("a kernel was compiled and ran")


# What several ranks need


def _mpi4py() -> Finding:
    if importlib.util.find_spec("mpi4py") is None:
        return _missing("not installed", "for several ranks: pip install mpi4py")
    import mpi4py

    return _ok(mpi4py.__version__)


def _mpi() -> Finding:
    """Start MPI as one process, which libraries that are half installed hang or abort in."""
    if importlib.util.find_spec("mpi4py") is None:
        return _missing("mpi4py is not installed", _MPI)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py looks for a library
        return _missing(str(error).splitlines()[0], _MPI)
    from cupyrec.parallel.communicator import _cuda_aware

    name = re.split(r"[,\n]", MPI.Get_library_version())[0].strip()
    aware = "CUDA-aware" if _cuda_aware(MPI) else "not CUDA-aware: GPUs' memory goes by the host's"
    return _ok(f"{name}, {aware}")


def _launcher() -> Finding:
    launcher = next(filter(None, map(shutil.which, ("mpirun", "mpiexec", "srun"))), None)
    if launcher is None:
        beside = Path(sys.executable).with_name("mpirun")
        if beside.exists():
            remedy = f"for several ranks: export PATH={beside.parent}:$PATH"
            return _missing(f"{beside}, which is not on PATH", remedy)
        return _missing("neither mpirun nor mpiexec nor srun on PATH", _MPI)
    asked = [launcher, "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=_ANSWER, errors="replace")
    said = (told.stdout + told.stderr).strip()
    found = f"{launcher}, {said.splitlines()[0].strip() if said else 'which tells no version'}"
    if told.returncode:
        return _wrong(found, _MPI)
    of = next((name for name in ("Open MPI", "Intel", "HYDRA") if name in said), "")
    if of and (own := _vendor()) and (of == "Open MPI") != (own == "Open MPI"):
        remedy = "ranks would not find each other: put the launcher of that library first on PATH"
        return _wrong(f"{found}, but the library is {own}", remedy)
    told = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    if of == "Open MPI" and os.geteuid() == 0 and told - os.environ.keys():
        remedy = f"root may start ranks after export {' '.join(f'{name}=1' for name in sorted(told))}"
        return _missing(f"{found}, refuses root", remedy)
    return _ok(found)


def _vendor() -> str:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return ""
    return MPI.get_vendor()[0]


# Extras


def _extra(name: str, needed: str, packages: tuple[str, ...]) -> Callable[[], Finding]:
    """Whether an extra's packages are there; they are not imported, some take seconds."""

    def look() -> Finding:
        lacks = [package for package in packages if importlib.util.find_spec(package) is None]
        if lacks:
            return _missing(
                f"{', '.join(lacks)} not installed", f"{needed}: pip install 'cupyrec[{name}]'"
            )
        told = importlib.metadata.packages_distributions()
        names = [told.get(package, [package])[0] for package in packages]
        return _ok(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))

    return look


_AGAIN = "pip install --force-reinstall"

#: Process -> name of each thing that it looks at, in order: how, and what to do if that fails.
GROUPS: dict[str, dict[str, tuple[Callable[[], Finding], str]]] = {
    "machine": {
        "cupyrec": (_cupyrec, f"nothing works without: {_AGAIN} cupyrec"),
        "Python": (_python, "nothing works without: make a new virtual environment"),
        "memory": (_memory, "mount /proc to see how much memory there is"),
        "huge pages": (_huge_pages, "mount /sys to see whether look-ups can use them"),
        "this folder": (_here, "go to another folder, this one can't be looked at"),
        "temporary folder": (_temporary, "evaluate and predict need one: name it by TMPDIR"),
    },
    "cpu": {
        "packages": (_packages, f"nothing works without: {_AGAIN} cupyrec"),
        "NumPy": (_numpy, f"nothing works without: {_AGAIN} numpy threadpoolctl"),
        "CPU loops": (_loops, f"nothing works without: {_AGAIN} numba"),
        "cores": (_cores, f"nothing works without: {_AGAIN} numba"),
        "commands": (_commands, f"no training without: {_AGAIN} cupyrec and what is named here"),
    },
    "driver": {"GPU": (_gpu, "for --device cuda: install the driver anew, until nvidia-smi works")},
    "cuda": {
        "CuPy": (_cupy, f"for --device cuda and sim: {_AGAIN} 'cupyrec[cuda12]'"),
        "cublasLt": (_cublaslt, f"for --device cuda and sim: {_AGAIN} 'cupyrec[cuda12]'"),
        "NVRTC": (_nvrtc, f"for --device cuda and sim: {_AGAIN} 'cupyrec[cuda12]'"),
        "simulator": (_simulator, f"for --device sim: {_AGAIN} 'cupyrec[sim]'"),
        "device cuda": (_cuda, f"for --device cuda: {_AGAIN} 'cupyrec[cuda12]'"),
    },
    "mpi": {
        "mpi4py": (_mpi4py, f"for several ranks: {_AGAIN} mpi4py"),
        "MPI": (_mpi, _MPI),
        "launcher": (_launcher, _MPI),
    },
    "extras": {
        f"extra {name}": (_extra(name, needed, packages), f"{needed}: {_AGAIN} 'cupyrec[{name}]'")
        for name, needed, packages in [
            ("serve", "for cupyrec serve", ("uvicorn", "starlette", "orjson", "prometheus_client")),
            ("plot", "for cupyrec report", ("matplotlib",)),
            ("tensorboard", "for --tensorboard", ("tensorboardX",)),
            ("torch", "for cupyrec.interop.torch", ("torch",)),
        ]
    },
}
