"""What `cupyrec doctor` looks at, each by a small function that returns a `Finding`.

They run in processes of their own, where each imports what may be broken. One raises what it didn't
expect; `doctor.GROUPS` has a remedy for that. What a GPU needs stands in `doctor_gpu_checks`.
"""

from __future__ import annotations

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
from types import ModuleType
from typing import NamedTuple

from cupyrec import __version__, control_groups

__all__ = [
    "MPI", "Finding", "blas", "commands", "cores", "extra", "huge_pages", "installation",
    "interpreter", "launcher", "loops", "memory", "missing", "mpi4py_package", "mpi_library",
    "numbers", "ok", "packages", "temporary_folder", "this_folder", "wrong",
]  # fmt: skip

_GB = 1e9
_LITTLE = 1e9  # bytes of memory or of a disk that hardly any training does with
_DIRECT = 4096  # bytes, and their alignment, that any disk reads past the page cache
_ANSWER = 5.0  # seconds for a launcher to tell its version
#: What to do for several ranks.
MPI = "for several ranks: pip install 'cupyrec[mpi]', or apt install libopenmpi-dev openmpi-bin"


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


def ok(found: str) -> Finding:
    """Return that a thing is there and works."""
    return Finding("ok", found)


def missing(found: str, remedy: str) -> Finding:
    """Return that a thing is not there, and what to do for what it serves."""
    return Finding("missing", found, remedy)


def wrong(found: str, remedy: str) -> Finding:
    """Return that a thing is broken, or not there though nothing works without it."""
    return Finding("wrong", found, remedy)


# The machine


def installation() -> Finding:
    """Return which cupyrec this is."""
    return ok(f"{__version__}, in {Path(__file__).parent}")


def interpreter() -> Finding:
    """Return which Python runs it."""
    return ok(f"{platform.python_version()}, {sys.executable}")


def memory() -> Finding:
    """Return how much memory there is, and is left."""
    try:
        told = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
        total, free = (1024 * int(told[name]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError):
        return missing("/proc/meminfo can't be read", "to see how much there is: mount /proc")
    limit = control_groups.memory()
    found = f"{free / _GB:.1f} of {total / _GB:.1f} GB available"
    if limit < total:
        found += f", {limit / _GB:.1f} GB to this process by its control group"
    if min(free, limit) < _LITTLE:
        return missing(found, "for all but small tables: end other programs, or raise the limit")
    return ok(found)


def huge_pages() -> Finding:
    """Return whether look-ups in large tables may use huge pages."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())[1]
    except (OSError, TypeError):
        chosen = "unknown"
    if chosen in ("always", "madvise"):
        return ok(chosen)
    remedy = f"look-ups in large tables are slower so: as root, echo madvise > {setting}"
    return missing(chosen, remedy)


def cores() -> Finding:
    """Return how many cores and threads will work."""
    from cupyrec import cpu

    allowed, quota = len(os.sched_getaffinity(0)), control_groups.cores()
    limit = f", of which a control group gives {quota:g}" if quota < allowed else ""
    return ok(f"{cpu.num_threads()} threads on {allowed} of {os.cpu_count()} cores{limit}")


def _disk(folder: str) -> Finding:
    free = f"{folder}: {shutil.disk_usage(folder).free / _GB:.1f} GB free"
    try:
        direct = _reads_directly(folder)
    except OSError as error:
        return missing(
            f"{free}, not writable ({error.strerror})",
            "name folders that are, by --out, by embedding.path and by TMPDIR",
        )
    if shutil.disk_usage(folder).free < _LITTLE:
        return missing(free, "there is little room for checkpoints and rows: make some")
    if not direct:
        remedy = "rows of the tier cached_ssd are read through the page cache here, and fill memory"
        return missing(f"{free}, no direct reads", f"{remedy}: keep them on a disk with direct I/O")
    return ok(f"{free}, direct reads")


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


def this_folder() -> Finding:
    """Return the room in the current folder."""
    return _disk(os.getcwd())


def temporary_folder() -> Finding:
    """Return the room where temporary files lie."""
    return _disk(tempfile.gettempdir())


# What training on the CPU needs


def packages() -> Finding:
    """Return the versions of what cupyrec's metadata ask for; whether it works, others tell."""
    try:
        required = importlib.metadata.requires("cupyrec") or []
    except importlib.metadata.PackageNotFoundError:
        return missing("cupyrec runs from a folder", "the command cupyrec: pip install .")
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
        if least and numbers(version) < numbers(least):
            lacks.append(f"{name} {version} is older than {least}")
    if lacks:
        return wrong("; ".join(lacks), "nothing works without: pip install --upgrade cupyrec")
    return ok(", ".join(found))


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare.

    Examples
    --------
    >>> numbers("14.2.0rc1") > numbers("13.6")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def blas() -> Finding:
    """Return which NumPy there is, and which BLAS it has."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    found = [
        f"{blas['internal_api']} {blas['version']}, {blas['num_threads']} threads"
        for blas in threadpool_info()
        if blas["user_api"] == "blas"
    ]
    if not found:
        return missing(
            f"{np.__version__}, no BLAS that threadpoolctl knows",
            "for products on as many threads as --threads says: pip install numpy brings one",
        )
    return ok(f"{np.__version__}, {'; '.join(found)}")


def loops() -> Finding:
    """Return where compiled CPU loops are kept."""
    import numba

    from cupyrec import cpu, loop_cache

    try:
        folder = loop_cache.LoopCache(cpu._await_sum.py_func).cache_path
    except RuntimeError:  # Numba's: no folder can be written
        return missing(
            f"Numba {numba.__version__}, compiled loops are kept nowhere",
            "each process compiles its loops for a minute: name a folder by NUMBA_CACHE_DIR",
        )
    return ok(f"Numba {numba.__version__}, compiled loops are kept in {folder}")


def commands() -> Finding:
    """Return whether all that training needs can be imported."""
    import cupyrec.commands

    return ok(f"{len(cupyrec.commands.MODELS)} models")


# What several ranks need


def mpi4py_package() -> Finding:
    """Return which mpi4py there is."""
    if importlib.util.find_spec("mpi4py") is None:
        return missing("not installed", "for several ranks: pip install mpi4py")
    import mpi4py

    return ok(mpi4py.__version__)


def mpi_library() -> Finding:
    """Return which MPI starts here; one that is half installed hangs or ends the process."""
    if importlib.util.find_spec("mpi4py") is None:
        return missing("mpi4py is not installed", MPI)
    try:
        mpi = _mpi()
    except (ImportError, RuntimeError) as error:  # mpi4py looks for a library
        return missing(str(error).splitlines()[0], MPI)
    mpi.Init()
    from cupyrec.parallel.communicator import _cuda_aware

    name = re.split(r"[,\n]", mpi.Get_library_version())[0].strip()
    aware = "CUDA-aware" if _cuda_aware(mpi) else "not CUDA-aware: GPUs' memory goes by the host's"
    mpi.Finalize()
    return ok(f"{name}, {aware}")


def _mpi() -> ModuleType:
    """MPI, not yet started."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def launcher() -> Finding:
    """Return what starts ranks, and whether it is the library's own."""
    launcher = next(filter(None, map(shutil.which, ("mpirun", "mpiexec", "srun"))), None)
    if launcher is None:
        beside = Path(sys.executable).with_name("mpirun")
        if beside.exists():
            remedy = f"for several ranks: export PATH={beside.parent}:$PATH"
            return missing(f"{beside}, which is not on PATH", remedy)
        return missing("neither mpirun nor mpiexec nor srun on PATH", MPI)
    asked = [launcher, "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=_ANSWER)
    said = (told.stdout + told.stderr).strip()
    found = f"{launcher}, {said.splitlines()[0].strip() if said else 'which tells no version'}"
    if told.returncode:
        return wrong(found, MPI)
    of = next((name for name in ("Open MPI", "Intel", "HYDRA") if name in said), "")
    if of and (own := _vendor()) and (of == "Open MPI") != (own == "Open MPI"):
        remedy = "ranks would not find each other: put the launcher of that library first on PATH"
        return wrong(f"{found}, but the library is {own}", remedy)
    allowed = "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"
    if of == "Open MPI" and os.geteuid() == 0 and {*allowed} - os.environ.keys():
        remedy = f"for several ranks by root: export {' '.join(f'{name}=1' for name in allowed)}"
        return missing(f"{found}, refuses root", remedy)
    return ok(found)


def _vendor() -> str:
    try:
        return _mpi().get_vendor()[0]
    except (ImportError, RuntimeError):
        return ""


# Extras


def extra(name: str, needed: str, packages: tuple[str, ...]) -> Callable[[], Finding]:
    """Return a check of an extra's packages; they are not imported, some take seconds."""

    def look() -> Finding:
        lacks = [package for package in packages if importlib.util.find_spec(package) is None]
        if lacks:
            return missing(
                f"{', '.join(lacks)} not installed", f"{needed}: pip install 'cupyrec[{name}]'"
            )
        told = importlib.metadata.packages_distributions()
        names = [told.get(package, [package])[0] for package in packages]
        return ok(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))

    return look
