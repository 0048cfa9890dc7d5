"""CUDA C++ to PTX by NVRTC, and what ptxas makes of that; needs no GPU or driver, but an extra.

The options are those that CuPy's `RawModule` adds, so that what is read and simulated off-GPU is
what runs on one. The cache holds one file per source and set of options, each written under a
name of its own and renamed: many processes may fill it at once, and a reader sees all or nothing.
A file that was damaged since counts as not there.
What NVRTC warns of is not kept, so that it warns again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cupyrec import activity

__all__ = [
    "CompileError", "Resources", "cache_folder", "compile_options", "ptx", "ptxas", "version",
]  # fmt: skip

logger = logging.getLogger("cupyrec")

EXTRA = "install cupyrec[cuda12] or cupyrec[cuda13]"


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a source; the message holds its log, with the line."""


@functools.cache
def _cupy() -> Path:
    """Folder of CuPy, which is imported here alone: it takes half a second."""
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(f"nvrtc: CuPy must be installed ({error}); {EXTRA}.") from None
    with contextlib.suppress(Exception):  # CuPy 13 doesn't look into NVIDIA's wheels itself
        from cuda import pathfinder

        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    return Path(cupy.__file__).parent


@functools.cache
def _cuda_headers() -> str:
    """Folder of cuda_fp16.h and its like, of the wheels or of an installed toolkit."""
    _cupy()
    from cuda import pathfinder

    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise FileNotFoundError(f"nvrtc: the headers of the CUDA runtime must be there; {EXTRA}.")
    return folder


@functools.cache
def version() -> tuple[int, int]:
    """Return the version of NVRTC, e.g. (12, 9)."""
    _cupy()
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()


def compile_options(arch: int, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the options that CuPy's `RawModule` hands to NVRTC, for PTX of ``compute_<arch>``.

    Parameters
    ----------
    arch : int
        Compute capability times 10, e.g. 80 or 90.
    options : tuple of str
        The caller's own, e.g. ``("-DDIM=16",)``.
    """
    include = _cupy() / "_core" / "include"
    cccl = (f"-I{include / 'cupy' / '_cccl' / name}" for name in ("cub", "thrust", "libcudacxx"))
    standard = any(re.match(r"--?std=", option) for option in options)
    return (
        *cccl,
        *options,
        *(() if standard else ("--std=c++17",)),
        f"-I{include}",
        f"-I{_cuda_headers()}",
        "-ftz=true",
        f"-arch=compute_{arch}",
        "--device-as-default-execution-space",
    )


def cache_folder() -> Path:
    """Return the folder of cached PTX: $CUPYREC_CACHE_DIR, else ~/.cache/cupyrec."""
    return Path(os.environ.get("CUPYREC_CACHE_DIR") or Path.home() / ".cache" / "cupyrec")


def ptx(
    source: str,
    *,
    arch: int = 80,
    macros: Mapping[str, object] | None = None,
    options: tuple[str, ...] = (),
    file: str = "kernel.cu",
) -> str:
    """Compile CUDA C++ to PTX, or read the PTX of the same source and options from the cache.

    Parameters
    ----------
    source : str
        CUDA C++; kernels are best ``extern "C"``.
    arch : int
        Compute capability times 10.
    macros : mapping
        Name -> value, each a ``-D`` option.
    options : tuple of str
        Further options of NVRTC.
    file : str
        What messages and line information call the source.

    Raises
    ------
    CompileError
        NVRTC refuses the source.
    ModuleNotFoundError
        CuPy, which brings NVRTC, is not installed.
    """
    own = tuple(f"-D{name}={value}" for name, value in (macros or {}).items()) + tuple(options)
    every = compile_options(arch, own)
    source = f'#line 1 "{file}"\n{source}'
    key = hashlib.sha256(repr((source, every, version())).encode()).hexdigest()
    cached = cache_folder() / f"{key}.ptx"
    text = _kept(cached)
    if text is not None:
        return text
    with activity.during("compiling"):
        text, log = _compile(source, every, file)
    if log:
        logger.warning("%s", log)
    else:
        _keep(cached, text)
    return text


def _compile(source: str, options: tuple[str, ...], file: str) -> tuple[str, str]:
    """The PTX, and what NVRTC has to say about it."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, file, [], [])
    try:
        nvrtc.compileProgram(program, list(options))
        log = nvrtc.getProgramLog(program).strip("\0 \n")
        text = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"nvrtc: {nvrtc.getProgramLog(program) or error}") from None
    finally:
        nvrtc.destroyProgram(program)
    return (text.decode() if isinstance(text, bytes) else text).rstrip("\0"), log


def _sealed(text: str) -> str:
    """A text and, on a last line of its own, what tells whether it is whole."""
    return f"{text}\n// sha256 {hashlib.sha256(text.encode()).hexdigest()}\n"


def _kept(path: Path) -> str | None:
    """The text of a file that `_keep` wrote; None if there is none, or it was damaged since."""
    try:
        sealed = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    text = sealed.rpartition("\n// sha256 ")[0]
    return text if sealed == _sealed(text) else None


def _keep(path: Path, text: str) -> None:
    """Write a file that others may be reading or writing; a cache that can't be written is none."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as temporary:
            temporary.write(_sealed(text))
        os.replace(temporary.name, path)
    except OSError as error:
        logger.warning("the cache of compiled kernels can't be written: %s", error)
    finally:
        if temporary is not None:  # gone if it was renamed
            with contextlib.suppress(OSError):
                os.unlink(temporary.name)


class Resources(NamedTuple):
    """What a kernel takes on the hardware, as ptxas says.

    Attributes
    ----------
    registers : int
        Of a thread.
    spills : int
        Bytes of registers stored to and loaded from memory, by a thread.
    stack : int
        Bytes of local memory of a thread.
    shared : int
        Bytes of static shared memory of a block.
    warnings : tuple of str
        Of the whole PTX.
    """

    registers: int
    spills: int
    stack: int
    shared: int
    warnings: tuple[str, ...]


@functools.cache
def _ptxas() -> tuple[str, str]:
    """Path and version of ptxas, of the wheel or of an installed toolkit."""
    try:
        from cuda import pathfinder

        path = pathfinder.find_nvidia_binary_utility("ptxas")
    except (ImportError, AttributeError):  # not there, or before version 1.3.4
        path = None
    path = path or shutil.which("ptxas")
    if path is None:
        raise FileNotFoundError(
            "ptxas: must be installed or on PATH, found in neither; install cupyrec[sim]."
        )
    return path, subprocess.run([path, "--version"], capture_output=True, text=True).stdout


def ptxas(ptx: str, arch: int) -> dict[str, Resources]:
    """Assemble PTX for ``sm_<arch>``; return the resources of each kernel in it, by name.

    Results are cached like PTX.

    Parameters
    ----------
    ptx : str
    arch : int
        Compute capability times 10.

    Raises
    ------
    CompileError
        ptxas refuses the PTX.
    FileNotFoundError
        There is no ptxas.
    """
    path, version = _ptxas()
    return dict(_assembled(ptx, arch, path, version))


@functools.lru_cache(maxsize=1024)
def _assembled(ptx: str, arch: int, path: str, version: str) -> dict[str, Resources]:
    key = hashlib.sha256(repr((ptx, arch, version)).encode()).hexdigest()
    cached = cache_folder() / f"{key}.json"
    if (kept := _kept(cached)) is not None:
        known = json.loads(kept)
        return {name: Resources(*values, tuple(said)) for name, (*values, said) in known.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [path, "-v", f"-arch=sm_{arch}", "-o", f"{folder}/kernel.cubin", file]
        done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        raise CompileError(f"ptxas: {said.strip() or f'exit status {done.returncode}'}")
    resources = _resources(said)
    _keep(cached, json.dumps(resources))
    return resources


def _resources(said: str) -> dict[str, Resources]:
    """What ``ptxas -v`` says of each kernel."""

    def number(pattern: str, part: str) -> int:
        return sum(int(n) for n in re.findall(pattern, part))

    warnings = tuple(line.strip() for line in said.splitlines() if "warning" in line)
    parts = re.split(r"Compiling entry function '(\w+)' for '\w+'", said)
    return {
        name: Resources(
            number(r"Used (\d+) registers", part),
            number(r"(\d+) bytes spill (?:stores|loads)", part),
            number(r"(\d+) bytes stack frame", part),
            number(r"(\d+) bytes smem", part),
            warnings,
        )
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }
