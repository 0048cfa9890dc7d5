"""Kernels that stay decoded, as a small launch decodes for longer than it computes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from cupyrec.sim.heap import Heap
from cupyrec.sim.machine import Machine
from cupyrec.sim.program import Program

__all__ = ["machine"]

_THREADS = 1 << 13  # of a launch whose machine is kept
_BYTES = 1 << 27  # of all machines that are kept
_STEP = 2048  # bytes, about, of a decoded instruction

_kept: OrderedDict[Program, Machine] = OrderedDict()  # the one used last at the end


@contextlib.contextmanager
def machine(program: Program, threads: int, heap: Heap) -> Iterator[Machine]:
    """Yield a machine for one launch of `threads`, which nobody else has meanwhile."""
    made = _kept.pop(program, None) if threads <= _THREADS else None
    new = made is None or made.capacity < threads
    if new:
        if made is not None:
            made.close()
        capacity = threads if threads > _THREADS else max(256, 1 << (threads - 1).bit_length())
        made = Machine(program, capacity, heap)
    try:
        yield made
    except BaseException:
        made.close()
        raise
    made.end()
    if made.capacity <= _THREADS:
        _keep(made, new)
    else:
        made.close()


def _keep(made: Machine, new: bool) -> None:
    if (other := _kept.pop(made.program, None)) is not None:  # another thread's
        other.close()
    _kept[made.program] = made
    while new and len(_kept) > 1 and sum(_nbytes(m) for m in list(_kept.values())) > _BYTES:
        _kept.popitem(last=False)[1].close()


def _nbytes(machine: Machine) -> int:
    """About what it takes: most instructions set a register of their own, of 4 bytes."""
    return len(machine.code) * (4 * machine.capacity + _STEP)
