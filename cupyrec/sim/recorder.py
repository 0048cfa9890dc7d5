"""What a stretch of work on the device ``sim`` asked of it: launches, host syncs, allocations.

An allocation counts where CuPy's pool would have to ask the driver: where no freed block of the
same size, in steps of 512 bytes, is at hand.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cupyrec.sim.launch import Result

__all__ = [
    "Launch", "Record", "allocated", "check_schedule", "freed", "graph_launched", "launched",
    "record", "schedule", "scheduled", "synced",
]  # fmt: skip

_STEP = 512  # bytes

_records: list[Record] = []
_idle: collections.Counter[int] = collections.Counter()  # freed blocks by size
_schedule = (80, 0)


class Launch(NamedTuple):
    """One launch. The kernels of cupyrec have a `ptx` and a `result`.

    Functions of the array module have `moved`: the bytes that they must at least read and write.
    """

    name: str
    grid: tuple[int, ...] = ()
    block: int = 0
    shared: int = 0
    ptx: str = ""
    result: Result | None = None
    file: str = ""
    moved: int = 0


@dataclasses.dataclass
class Record:
    """Launches in their order, and how often the host waited and memory was taken.

    Those of a graph are among them, whenever it is launched: `graphs` times in all.
    """

    launches: list[Launch] = dataclasses.field(default_factory=list)
    syncs: int = 0
    allocations: int = 0
    graphs: int = 0


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Yield a `Record` of what happens within this context.

    Examples
    --------
    >>> from cupyrec import sim
    >>> with record() as seen:
    ...     total = (sim.asarray([1, 2]) + 1).sum().item()
    >>> total, [launch.name for launch in seen.launches], seen.syncs
    (5, ['add', 'sum'], 1)
    """
    made = Record()
    _records.append(made)
    try:
        yield made
    finally:
        _records[:] = [r for r in _records if r is not made]


@contextlib.contextmanager
def schedule(arch: int = 80, seed: int = 0) -> Iterator[None]:
    """Within this context kernels run as PTX of ``compute_<arch>``, in the order of this seed.

    Raises
    ------
    TypeError, ValueError
        `arch` is no compute capability times 10, or `seed` no whole number from 0 on.

    Examples
    --------
    >>> with schedule(arch=90, seed=3):
    ...     scheduled()
    (90, 3)
    """
    global _schedule
    check_schedule("sim.schedule", arch, seed)
    before, _schedule = _schedule, (arch, seed)
    try:
        yield
    finally:
        _schedule = before


def check_schedule(where: str, arch: int, seed: int) -> None:
    """Raise unless kernels can run for this architecture, in the order of this seed."""
    for name, value in {"arch": arch, "seed": seed}.items():
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"{where}: '{name}' must be a whole number, got {value!r}.")
    if not 50 <= arch < 200:
        raise ValueError(
            f"{where}: 'arch' must be a compute capability times 10, as 80 or 90, got {arch}."
        )
    if seed < 0:
        raise ValueError(f"{where}: 'seed' must be 0 or more, got {seed}.")


def scheduled() -> tuple[int, int]:
    """Return the architecture and seed that kernels run by, see `schedule`.

    Examples
    --------
    >>> scheduled()
    (80, 0)
    """
    return _schedule


def launched(launch: Launch) -> None:
    """Count a launch."""
    for made in _records:
        made.launches.append(launch)


def graph_launched() -> None:
    """Count a launch of a graph."""
    for made in _records:
        made.graphs += 1


def synced() -> None:
    """Count a wait of the host for the device."""
    for made in _records:
        made.syncs += 1


def allocated(nbytes: int, pooled: bool = True) -> None:
    """Count a block of memory, unless it is `pooled` and a freed one serves."""
    size = -(-nbytes // _STEP)
    if pooled and _idle[size]:
        _idle[size] -= 1
    else:
        for made in _records:
            made.allocations += 1


def freed(nbytes: int) -> None:
    """Note a block that may serve again."""
    _idle[-(-nbytes // _STEP)] += 1
