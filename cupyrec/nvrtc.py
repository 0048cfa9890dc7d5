"""CUDA C++ to PTX by NVRTC, cached on disk; needs the cuda12 or cuda13 extra, but no GPU or driver.

The options are those that CuPy's `RawModule` adds, so that what is read and simulated off-GPU is
what runs on one. The cache holds one file per source and set of options, each written under a
name of its own and renamed: many processes may fill it at once, and a reader sees all or nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CompileError", "cache_folder", "compile_options", "ptx", "version"]

logger = logging.getLogger("cupyrec")

EXTRA = "install cupyrec[cuda12] or cupyrec[cuda13]"


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log, with file and line of the ``.cu``."""


@functools.cache
def _cupy() -> Path:
    """Folder of CuPy, which is imported here alone: it takes half a second."""
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(f"nvrtc: CuPy must be installed ({error}); {EXTRA}.") from None
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
    try:
        return cached.read_text()
    except OSError:  # not there, or not to be read
        text = _compile(source, every, file)
    _keep(cached, text)
    return text


def _compile(source: str, options: tuple[str, ...], file: str) -> str:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, file, [], [])
    try:
        nvrtc.compileProgram(program, list(options))
        if log := nvrtc.getProgramLog(program).strip():
            logger.warning("%s", log)
        text = nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"nvrtc: {nvrtc.getProgramLog(program) or error}") from None
    finally:
        nvrtc.destroyProgram(program)
    return text.decode().rstrip("\0") if isinstance(text, bytes) else text.rstrip("\0")


def _keep(path: Path, text: str) -> None:
    """Write a file that others may be reading or writing; a cache that can't be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as temporary:
            temporary.write(text)
        os.replace(temporary.name, path)
    except OSError as error:
        logger.warning("the cache of compiled kernels can't be written: %s", error)
