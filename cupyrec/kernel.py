"""CUDA kernels: declared once beside their launcher, checked at every launch, run by GPU or `sim`.

CuPy checks no argument: a Python float would arrive as a double, a strided view be read as if it
were contiguous, a grid of 0 blocks be launched as one. What is wrong is an error here.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyrec import activity, arrays, nvrtc, scratch

__all__ = [
    "Geometry", "Kernel", "KernelFault", "blocks", "folder", "source", "vector_width",
]  # fmt: skip

_TYPES = {
    "bool": np.bool_, "float": np.float32, "double": np.float64, "int": np.int32,
    "int8_t": np.int8, "uint8_t": np.uint8, "int16_t": np.int16, "uint16_t": np.uint16,
    "int32_t": np.int32, "uint32_t": np.uint32, "int64_t": np.int64, "uint64_t": np.uint64,
}  # fmt: skip
_STANDARD = "--std=c++17"  # CuPy 14's own; CuPy 13 would take C++11
_NO_MACROS: Mapping[str, object] = {}


class KernelFault(RuntimeError):
    """The simulator saw a kernel do what it must not."""


class Geometry(NamedTuple):
    """How a kernel is cut into blocks.

    Attributes
    ----------
    grid : int or tuple of int
        Blocks along x, y, z; a launch of no block is none.
    block : int
        Threads of a block.
    shared : int
        Bytes of dynamic shared memory a block.

    Examples
    --------
    >>> Geometry(grid=100, block=256).shared
    0
    """

    grid: int | tuple[int, ...]
    block: int
    shared: int = 0


def blocks(work: int, block: int) -> int:
    """Return how many blocks of `block` cover `work`.

    Examples
    --------
    >>> blocks(1000, 256)
    4
    """
    return -(-work // block)


def vector_width(width: int, *arrays: Any) -> int:
    """Return how many floats of a row of `width` one instruction may move: 4, 2 or 1.

    Examples
    --------
    >>> vector_width(130)
    2
    """
    addresses = [array.__cuda_array_interface__["data"][0] for array in arrays]
    fits = (n for n in (4, 2) if width % n == 0 and not any(a % (4 * n) for a in addresses))
    return next(fits, 1)


class _Parameter(NamedTuple):
    name: str
    type: str
    pointer: bool


def folder() -> Path:
    """Return where the ``.cu`` files lie: in the package where it was installed, else beside it.

    Examples
    --------
    >>> (folder() / "__init__.py").exists()
    True
    """
    package = Path(__file__).parent
    return next(p for p in (package / "kernels", package.parent / "kernels") if p.is_dir())


def source(file: str) -> str:
    """Return a ``.cu`` with the ``.cuh`` it includes pasted in; lines keep their numbers.

    CuPy's cache on disk knows sources and options, not headers.

    Raises
    ------
    ValueError
        A header is not in the folder.
    """
    return "".join(_pasted(file, set()))


def _pasted(file: str, seen: set[str]) -> list[str]:
    path = folder() / file
    if not path.is_file():
        raise ValueError(f"kernel: '{file}' must lie in '{folder()}', found nothing there.")
    lines = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        include = re.match(r'#include "([\w.]+)"', line)
        if include and include[1] not in seen:
            seen.add(include[1])
            lines.append(f'#line 1 "kernels/{include[1]}"\n')
            lines += _pasted(include[1], seen)
            lines.append(f'#line {number + 1} "kernels/{file}"\n')
        else:
            lines.append("\n" if include else line)
    return lines


class Kernel:
    """A CUDA kernel.

    Parameters
    ----------
    file : str
        In `folder`.
    name : str
        Of the ``extern "C"`` function.
    parameters : str
        As in the ``.cu``: ``"const float* x, int64_t n"``. A pointer takes an array of that dtype,
        or None for a null pointer where its name stands in `optional`. ``value_t`` is what the
        macro of that name says.
    geometry : callable
        Sizes by keyword -> `Geometry`; it never looks at the device, so that results don't either.
    optional : str
        Names of pointers that may be null.

    Examples
    --------
    >>> fill = Kernel("fill.cu", "fill", "float* x, float value, int64_t n",
    ...               lambda n: Geometry(-(-n // 256), 256))
    >>> fill.geometry(n=1000)
    Geometry(grid=4, block=256, shared=0)
    """

    def __init__(
        self,
        file: str,
        name: str,
        parameters: str,
        geometry: Callable[..., Geometry],
        optional: str = "",
    ) -> None:
        self.file, self.name, self.geometry = file, name, geometry
        self.optional = set(optional.split())
        self.parameters = []
        for parameter in parameters.split(","):
            words = parameter.replace("*", " * ").replace("const ", "").split()
            self.parameters.append(_Parameter(words[-1], words[0], "*" in words))
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self, *arguments: Any, macros: Mapping[str, object] = _NO_MACROS, **sizes: int
    ) -> None:
        """Launch on the arrays' device; on the GPU, on CuPy's current stream.

        Parameters
        ----------
        *arguments : array, number or None
            One a parameter.
        macros : mapping
            Name -> value of ``-D`` options.
        **sizes : int
            What `geometry` takes.

        Raises
        ------
        ValueError, TypeError
            An argument is not what the kernel takes: number, dtype, order in memory, device, range.
        KernelFault
            On the simulator: an access out of bounds, a race, …
        """
        device, values = self._check(arguments, macros)
        geometry = self.geometry(**sizes)
        grid = geometry.grid if isinstance(geometry.grid, tuple) else (geometry.grid,)
        if min(grid) <= 0:
            return
        if device == "sim":
            try:
                self._simulate(values, grid, geometry, macros)
            except BaseException:
                scratch.forget_counters()  # it may have stopped halfway
                raise
        else:
            function, most = self._function(macros)
            if geometry.shared > most:
                raise ValueError(
                    f"{self.name}: a block must have at most {most} bytes of dynamic shared memory "
                    f"on this GPU, got {geometry.shared}."
                )
            function(grid, (geometry.block,), values, shared_mem=geometry.shared)

    # Arguments

    def _check(self, arguments: tuple, macros: Mapping[str, object]) -> tuple[str, tuple]:
        if len(arguments) != len(self.parameters):
            raise ValueError(
                f"{self.name}: there must be {len(self.parameters)} arguments "
                f"({', '.join(p.name for p in self.parameters)}), got {len(arguments)}."
            )
        values, first = [], ""
        device = None
        for argument, parameter in zip(arguments, self.parameters, strict=True):
            kind = macros.get(parameter.type, parameter.type)
            dtype = np.dtype(_TYPES[str(kind)])
            if not parameter.pointer:
                values.append(self._scalar(parameter.name, argument, dtype))
                continue
            if argument is None and parameter.name in self.optional:
                values.append(np.uint64(0))
                continue
            where = arrays.device(argument)
            if where not in ("cuda", "sim"):
                raise TypeError(
                    f"{self.name}: '{parameter.name}' must be an array of device 'cuda' or 'sim', "
                    f"got {type(argument).__name__}."
                )
            if device not in (None, where):
                raise TypeError(
                    f"{self.name}: '{parameter.name}' must be on device '{device}' like '{first}', "
                    f"got '{where}'."
                )
            device, first = where, first or parameter.name
            arrays.check_current(self.name, parameter.name, argument)
            if argument.dtype != dtype:
                raise TypeError(
                    f"{self.name}: '{parameter.name}' must be {dtype}, got {argument.dtype}."
                )
            if not argument.flags.c_contiguous:
                raise ValueError(
                    f"{self.name}: '{parameter.name}' must be C-contiguous, got shape "
                    f"{argument.shape} with strides {argument.strides}."
                )
            values.append(argument)
        if device is None:
            raise ValueError(f"{self.name}: there must be an array among the arguments, got none.")
        return device, tuple(values)

    def _scalar(self, name: str, value: Any, dtype: np.dtype) -> np.generic:
        """The value as the type that the kernel takes, and no other."""
        whole = isinstance(value, (int, np.integer, np.bool_))
        if not whole and not (dtype.kind == "f" and isinstance(value, (float, np.floating))):
            raise TypeError(f"{self.name}: '{name}' must be {dtype}, got {value!r}.")
        large = int(np.finfo(dtype).max) if dtype.kind == "f" else math.inf
        if large < abs(value) != math.inf:
            raise ValueError(f"{self.name}: '{name}' must be in {dtype}'s range, got {value}.")
        if dtype.kind in "iu":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            if not low <= value <= high:
                raise ValueError(
                    f"{self.name}: '{name}' must lie in [{low}, {high}] as {dtype}, got {value}."
                )
        return dtype.type(value)

    # Devices

    def ptx(self, arch: int, macros: Mapping[str, object] = _NO_MACROS) -> str:
        """Return the kernel's PTX, with line information, for ``compute_<arch>``.

        Raises
        ------
        CompileError
            NVRTC refuses the source.
        """
        key = ("ptx", arch, *macros.items())
        if key not in self._compiled:
            self._compiled[key] = nvrtc.ptx(
                source(self.file), arch=arch, macros=macros, options=(_STANDARD, "-lineinfo"),
                file=f"kernels/{self.file}",
            )  # fmt: skip
        return self._compiled[key]

    def _simulate(
        self, values: tuple, grid: tuple[int, ...], geometry: Geometry, macros: Mapping[str, object]
    ) -> None:
        sim = sys.modules["cupyrec.sim"]  # there, since its arrays are

        def work(*values: Any) -> None:
            arch, seed = sim.recorder.scheduled()
            text = self.ptx(arch, macros)
            result = sim.run(
                text, self.name, grid, geometry.block, values, seed=seed, shared=geometry.shared
            )
            launch = sim.recorder.Launch(
                self.name, grid, geometry.block, geometry.shared, text, result, self.file
            )
            sim.recorder.launched(launch)
            if result.faults:
                raise KernelFault("\n".join(str(fault) for fault in result.faults))

        sim.cuda.submit(work, *values)

    def _function(self, macros: Mapping[str, object]) -> tuple[Any, int]:
        """The compiled kernel on CuPy's current device, and how much shared memory it may take."""
        import cupy

        device = cupy.cuda.Device()
        key = (device.id, *macros.items())
        if key not in self._compiled:
            options = (_STANDARD, *(f"-D{name}={value}" for name, value in macros.items()))
            text = f'#line 1 "kernels/{self.file}"\n{source(self.file)}'
            with activity.during("compiling"):
                function = cupy.RawModule(code=text, options=options).get_function(self.name)
            limit = device.attributes["MaxSharedMemoryPerBlockOptin"] - function.shared_size_bytes
            function.max_dynamic_shared_size_bytes = limit
            self._compiled[key] = function, limit
        return self._compiled[key]
