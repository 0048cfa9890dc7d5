"""One launch of a kernel: its arguments, its faults, its costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from cupyrec import nvrtc
from cupyrec.sim.array import ndarray
from cupyrec.sim.machine import Fault, Machine
from cupyrec.sim.memory import the_heap
from cupyrec.sim.ptx import Module, parse

__all__ = ["Result", "run"]


@dataclasses.dataclass
class Result:
    """What a launch did wrong and what it cost; its results are in the arrays it was given.

    ``counts`` has ``sectors`` of 32 bytes over ``requests`` of warps to global memory,
    ``bytes_read`` and ``bytes_written`` (distinct ones), ``bank_conflicts`` beyond the
    ``shared_wavefronts`` needed, ``divergent_branches``, ``longest_warp`` and ``mean_warp``
    (instructions), and ``instructions`` of warps; ``classes`` has those by opcode,
    of ``cp`` in full.
    """

    faults: list[Fault]
    counts: dict[str, float]
    classes: dict[str, int]
    touched: dict[str, tuple[int, int]]  # array or variable -> distinct bytes read and written


def run(
    source: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: tuple[Any, ...],
    *,
    arch: int = 80,
    seed: int = 0,
    shared: int = 0,
    options: tuple[str, ...] = (),
    file: str = "kernel.cu",
) -> Result:
    """Run one launch of a CUDA kernel on the CPU.

    Parameters
    ----------
    source : str
        CUDA C++ or PTX.
    name : str
        Of the kernel, which is best ``extern "C"``.
    grid, block : int or tuple of int
        Blocks, and threads of a block.
    args : tuple
        An array, of the simulator or of NumPy, is a buffer in global memory, changed in place; a
        NumPy scalar is passed as the type it has. ``sim.empty`` and ``np.ma.masked_all`` make
        arrays whose bytes nothing has written.
    arch : int
        Compute capability times 10 of the PTX.
    seed : int
        Not 0: blocks, warps and lanes take their turns in an order drawn from it.
    shared : int
        Bytes of dynamic shared memory.
    options : tuple of str
        Of NVRTC.
    file : str
        What faults call the source.

    Raises
    ------
    CompileError
        NVRTC refuses the source.
    PtxError
        The kernel has an instruction that is not known.
    TypeError, ValueError
        The arguments are not those that the kernel takes.

    Examples
    --------
    >>> twice = '''extern "C" __global__ void twice(float* x, int n) {
    ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < n) x[i] *= 2;
    ... }'''
    >>> x = np.arange(5, dtype=np.float32)
    >>> result = run(twice, "twice", 1, 32, (x, np.int32(5)))  # doctest: +SKIP
    >>> x, result.faults  # doctest: +SKIP
    (array([0., 2., 4., 6., 8.], dtype=float32), [])
    """
    is_ptx = ".version" in source and ".entry" in source
    options = ("-lineinfo", *options)
    text = source if is_ptx else nvrtc.ptx(source, arch=arch, options=options, file=file)
    module = _parsed(text)
    kernel = module.functions.get(name)
    if kernel is None or not kernel.entry:
        names = [f.name for f in module.functions.values() if f.entry]
        raise ValueError(f"sim.run: 'name' must be one of the kernels {names}, got {name!r}.")
    heap = the_heap()
    if len(args) != len(kernel.params):
        raise ValueError(f"sim.run: 'args' must have {len(kernel.params)} values, got {len(args)}.")
    buffers, params = [], b""
    machine = None
    try:
        for i, (value, param) in enumerate(zip(args, kernel.params, strict=True)):
            if isinstance(value, ndarray):
                if not value.flags.c_contiguous:
                    raise ValueError(
                        f"sim.run: 'args[{i}]' must be C-contiguous, got strides {value.strides}."
                    )
                raw = np.int64(value.__cuda_array_interface__["data"][0]).tobytes()
            elif isinstance(value, np.ndarray):
                made = heap.allocate(value.nbytes, f"argument {i}")
                buffers.append((value, made))
                if not isinstance(value, np.ma.MaskedArray):
                    heap.write(made, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
                raw = np.int64(made.address).tobytes()
            elif isinstance(value, np.generic):
                raw = value.tobytes()
            else:
                raise TypeError(
                    f"sim.run: 'args[{i}]' must be an array or a NumPy scalar, "
                    f"got {type(value).__name__}."
                )
            if len(raw) != param.size:
                raise TypeError(
                    f"sim.run: 'args[{i}]' must have the {param.size} bytes that the kernel takes, "
                    f"got {len(raw)}."
                )
            params = params.ljust(-(-len(params) // param.align) * param.align, b"\0") + raw
        machine = Machine(module, name, _three(grid), _three(block), params, heap, shared, seed)
        _check_limits(machine, _three(grid), _three(block))
        machine.run()
        result = _result(machine)
        for value, made in buffers:
            data = heap.view(made).view(value.dtype).reshape(value.shape)
            np.copyto(np.ma.getdata(value), data)
            if isinstance(value, np.ma.MaskedArray):
                start = made.address - heap.base
                written = heap.written[start : start + made.size].reshape(*value.shape, -1)
                value.mask = ~written.astype(bool).all(axis=-1)
    finally:
        if machine is not None:
            machine.close()
        for _, made in buffers:
            heap.free(made)
    return result


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Module:
    return parse(text)


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(x) <= 3 or min(x) < 1:
        raise ValueError(f"sim.run: 'grid' and 'block' must be 1 to 3 sizes above 0, got {size}.")
    return (*map(int, x), 1, 1)[:3]


_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99}  # KB a block may have; 227 from 90 on


def _check_limits(machine: Machine, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    """Refuse what a GPU refuses to launch."""
    kernel, arch = machine.kernel, machine.module.arch
    where, threads = f"sim.run: {kernel.name}", math.prod(block)
    most = min(1024, math.prod(kernel.limits.get("maxntid", (1024,))))
    if threads > most or block[2] > 64:
        raise ValueError(
            f"{where}: a block must have at most {most} threads, 64 along z, got {block}."
        )
    exact = math.prod(kernel.limits.get("reqntid", (threads,)))
    if threads != exact:
        raise ValueError(f"{where}: a block must have {exact} threads, got {block}.")
    if grid[0] >= 2**31 or max(grid[1:]) >= 2**16:
        raise ValueError(
            f"{where}: a grid must have less than 2**31 blocks along x, 2**16 along y and z, "
            f"got {grid}."
        )
    most = _SHARED.get(arch, 96 if 0 < arch < 90 else 227) << 10
    if (total := machine.shared_bytes) > most:
        raise ValueError(
            f"{where}: a block must have at most {most} bytes of shared memory on sm_{arch}, "
            f"got {total}."
        )


def _result(machine: Machine) -> Result:
    classes: dict[str, int] = {}
    for (_, instruction), n in zip(machine.code, machine.issued, strict=True):
        if n:
            kind = instruction.parts[0]
            kind = instruction.opcode if kind == "cp" else kind  # copies, and waits for them
            classes[kind] = classes.get(kind, 0) + n
    touched: dict[str, tuple[int, int]] = {}
    for allocation, reads, writes in machine.table.touched():
        before = touched.get(allocation.name, (0, 0))  # arrays of equal shape have one name
        touched[allocation.name] = before[0] + reads, before[1] + writes
    counts = dict.fromkeys(
        ["sectors", "requests", "bank_conflicts", "shared_wavefronts", "divergent_branches"], 0
    )
    real = machine.warp_steps[machine.existing_places > 0]
    counts |= machine.counts
    counts |= {
        "bytes_read": sum(r for r, _ in touched.values()),
        "bytes_written": sum(w for _, w in touched.values()),
        "instructions": sum(classes.values()),
        "longest_warp": int(real.max()),
        "mean_warp": math.fsum(real) / real.size,
    }
    return Result(machine.faults, counts, classes, touched)
