"""One launch of a kernel: its arguments, its faults, its costs."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np

from cupyrec import nvrtc
from cupyrec.sim import kept, recorder
from cupyrec.sim.arguments import Arguments
from cupyrec.sim.heap import Allocation, the_heap
from cupyrec.sim.machine import MAX_STEPS, Fault, Machine
from cupyrec.sim.parser import parse
from cupyrec.sim.program import Program
from cupyrec.sim.ptx import Function, Instruction
from cupyrec.sim.threads import padded

__all__ = ["Executed", "Result", "run"]


class Executed(NamedTuple):
    """What a launch spent on one instruction of its PTX.

    ``counts`` are those of `Result.counts` that are this instruction's: what it asked memory for,
    and branches.
    """

    opcode: str
    source: tuple[str, int]  # file and line of the CUDA source; line 0 where the compiler made it
    warps: int
    threads: int  # one that a predicate turns off is among them
    counts: Mapping[str, int]


@dataclasses.dataclass
class Result:
    """What a launch did wrong and what it cost; its results are in the arrays it was given.

    ``counts`` has ``sectors`` of 32 bytes over ``requests`` of warps to global memory,
    ``bytes_read`` and ``bytes_written`` (distinct ones), ``bank_conflicts`` beyond the
    ``shared_wavefronts`` needed, ``divergent_branches``, ``longest_warp`` and ``mean_warp``
    (instructions), and ``instructions`` of warps; ``classes`` has those by opcode,
    of ``cp`` in full; ``executed`` has them one by one, with the line of the source.
    """

    faults: list[Fault]
    counts: dict[str, float]
    classes: dict[str, int]
    touched: dict[str, tuple[int, int]]  # array or variable -> distinct bytes read and written
    _code: list[tuple[Function, Instruction]] = dataclasses.field(repr=False)
    _spent: tuple[list[int], list[int], dict[int, Mapping[str, int]]] = dataclasses.field(
        repr=False
    )

    @functools.cached_property
    def executed(self) -> list[Executed]:
        """What was spent on each instruction, in their order."""
        issued, threads, costs = self._spent
        return [
            Executed(one.opcode, one.source, issued[pc], threads[pc], costs.get(pc, {}))
            for pc, (_, one) in enumerate(self._code) if issued[pc]
        ]  # fmt: skip


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
    max_steps: int = MAX_STEPS,
) -> Result:
    """Run one launch of a CUDA kernel on the CPU; its ``printf`` prints nothing.

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
        arrays whose bytes nothing has written. One NumPy array may be several arguments, but not
        two views that overlap.
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
    max_steps : int
        Steps after which a launch is given up as endless; a step is one instruction of any threads
        that stand at it.

    Raises
    ------
    CompileError
        NVRTC refuses the source.
    PtxError
        The kernel has an instruction that is not known.
    TypeError, ValueError
        The arguments are not those that the kernel takes, or no GPU makes such a launch.

    Notes
    -----
    Races are found by who last wrote a byte and two who read it, and by fences as acquire and
    release: a third reader's may be missed, and a pattern that only sequentially consistent fences
    of other threads order may be blamed.

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
    recorder.check_schedule("sim.run", arch, seed)
    is_ptx = ".version" in source and ".entry" in source
    options = ("-lineinfo", *options)
    text = source if is_ptx else nvrtc.ptx(source, arch=arch, options=options, file=file)
    program = _program(text, name)
    grid, block = _three("grid", grid), _three("block", block)
    for word, value in {"shared": shared, "max_steps": max_steps}.items():
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"sim.run: '{word}' must be a whole number, got {value!r}.")
        if value < 0:
            raise ValueError(f"sim.run: '{word}' must be 0 or more, got {value}.")
    _check_geometry(program.kernel, grid, block)
    heap = the_heap()
    with (
        _no_collector(),
        closing(Arguments(heap, program.kernel, args)) as arguments,
        kept.machine(program, padded(grid, block), heap) as machine,
    ):
        machine.begin(grid, block, arguments.params, shared, seed, max_steps)
        _check_shared(machine, shared)
        machine.run()
        touched = machine.table.touched()
        result = _result(machine, touched)
        arguments.collect({allocation.address for allocation, _, writes in touched if writes})
    return result


@contextmanager
def _no_collector() -> Iterator[None]:
    """Don't look for garbage while a launch runs, which makes many objects and none of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.lru_cache(maxsize=256)
def _program(text: str, name: str) -> Program:
    module = parse(text)
    kernel = module.functions.get(name)
    if kernel is None or not kernel.entry:
        names = [f.name for f in module.functions.values() if f.entry]
        raise ValueError(f"sim.run: 'name' must be one of the kernels {names}, got {name!r}.")
    return Program(module, name)


def _three(name: str, size: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Three sizes of a grid or block."""
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not all(isinstance(n, (int, np.integer)) for n in sizes):
        raise TypeError(f"sim.run: '{name}' must be a whole number or up to 3, got {size!r}.")
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"sim.run: '{name}' must be 1 to 3 sizes above 0, got {size}.")
    return (*map(int, sizes), 1, 1)[:3]


_THREADS = 1 << 26  # registers are arrays over all threads
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99}  # KB a block may have; 227 from 90 on


def _check_geometry(kernel: Function, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    """Refuse blocks and grids that a GPU refuses, or that this host has no memory for."""
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
    if math.prod(grid) * threads > _THREADS:
        raise ValueError(
            f"{where}: a launch must have at most {_THREADS} threads to be simulated, "
            f"got {math.prod(grid) * threads}."
        )


def _check_shared(machine: Machine, shared: int) -> None:
    """Refuse more shared memory than a block may have."""
    where, arch = f"sim.run: {machine.kernel.name}", machine.module.arch
    if (static := machine.shared_bytes - shared) > 48 << 10:
        raise ValueError(
            f"{where}: a block must have at most {48 << 10} bytes of shared memory that is not "
            f"dynamic, got {static}."
        )
    most = _SHARED.get(arch, 96 if 0 < arch < 90 else 227) << 10
    if (total := machine.shared_bytes) > most:
        raise ValueError(
            f"{where}: a block must have at most {most} bytes of shared memory on sm_{arch}, "
            f"got {total}."
        )


def _result(machine: Machine, found: list[tuple[Allocation, int, int]]) -> Result:
    classes: dict[str, int] = {}
    for kind, warps in zip(machine.program.classes, machine.issued, strict=True):
        if warps:
            classes[kind] = classes.get(kind, 0) + warps
    counts = dict.fromkeys(
        ["sectors", "requests", "bank_conflicts", "shared_wavefronts", "divergent_branches"], 0
    )
    for cost in machine.costs.values():
        for name, n in cost.items():
            counts[name] += n
    touched: dict[str, tuple[int, int]] = {}
    for allocation, reads, writes in found:
        before = touched.get(allocation.name, (0, 0))  # arrays of equal shape have one name
        touched[allocation.name] = before[0] + reads, before[1] + writes
    real = machine.warp_steps[machine.existing_places > 0]
    counts |= {
        "bytes_read": sum(r for r, _ in touched.values()),
        "bytes_written": sum(w for _, w in touched.values()),
        "instructions": sum(classes.values()),
        "longest_warp": int(real.max()),
        "mean_warp": math.fsum(real) / real.size,
    }
    spent = machine.issued, machine.threads, machine.costs
    return Result(machine.faults, counts, classes, touched, machine.code, spent)
