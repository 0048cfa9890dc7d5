"""CPU loops: how they are compiled, and how they are spread over threads.

A loop is serial Numba code that releases the GIL and works on one block of rows; `parallel` hands
fixed blocks to a pool of threads. Block borders depend on sizes alone, never on the number of
threads, so a loop gives the same bits however many threads run it. Serial loops compile several
times faster than Numba's ``parallel=True``, may run in background threads, and need no OpenMP.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numba
from numba.core import event
from threadpoolctl import ThreadpoolController

from cupyrec import errors

__all__ = ["exact_loop", "loop", "num_threads", "parallel", "serial_blas", "set_num_threads"]

logger = logging.getLogger("cupyrec")

#: Loops whose bits are fixed across devices: every operation is rounded on its own.
exact_loop = numba.njit(cache=True, nogil=True, error_model="numpy")
#: Loops over sums and products: terms may be reordered and contracted, NaN and inf still count.
loop = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})

_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
_serial_lock, _serial, _limit = threading.Lock(), 0, None  # of `serial_blas`


class _SayCompiling(event.Listener):
    """Tell the user once why the first step takes seconds."""

    def on_start(self, _event: event.Event) -> None:
        logger.info("compiling the CPU loops, once on this machine (about 15 s)")
        event.unregister("numba:compile", self)

    def on_end(self, _event: event.Event) -> None:
        pass


event.register("numba:compile", _SayCompiling())


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="cupyrec")


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def num_threads() -> int:
    """Return the number of threads that CPU ops use, at first the cores this process may run on.

    Examples
    --------
    >>> num_threads() >= 1
    True
    """
    return _threads


def set_num_threads(threads: int) -> None:
    """Set the number of threads that CPU ops use. It changes no result, not by a bit.

    Raises
    ------
    ValueError
        If `threads` is less than 1.

    Examples
    --------
    >>> before = num_threads()
    >>> set_num_threads(1)
    >>> num_threads()
    1
    >>> set_num_threads(before)
    """
    global _threads
    _threads = errors.positive("set_num_threads", "threads", threads)


def parallel(work: Callable[[int, int], object], n: int, block: int) -> None:
    """Call ``work(start, stop)`` for each block of `block` out of `n`, over the threads.

    The calling thread works too. `work` must write to places that belong to its block alone.

    Examples
    --------
    >>> seen = [None] * 3
    >>> def work(start, stop):
    ...     seen[start // 4] = (start, stop)
    >>> parallel(work, 10, 4)
    >>> seen
    [(0, 4), (4, 8), (8, 10)]
    """
    starts = iter(range(0, n, block))  # next() on a range iterator is atomic under the GIL

    def drain() -> None:
        for start in starts:
            work(start, min(start + block, n))

    helpers = min(_threads, -(-n // block)) - 1
    futures = [_pool(_threads - 1).submit(drain) for _ in range(helpers)]
    try:
        drain()
    finally:
        collections.deque(starts, maxlen=0)  # after an error nobody starts another block
        for future in futures:
            if not future.cancel():  # one that hasn't started yet has nothing left to do
                future.result()


@contextlib.contextmanager
def serial_blas() -> Iterator[None]:
    """Within this context BLAS runs on the calling thread: blocks are ours to spread.

    OpenBLAS' own workers spin after each call and would take cores from our loops; and with fixed
    blocks a matmul gives the same bits for any number of threads. The limit is the process's:
    the first context to begin sets it, the last to end lifts it.

    Examples
    --------
    >>> with serial_blas():
    ...     pass
    """
    global _serial, _limit
    with _serial_lock:
        if _serial == 0:
            _limit = _blas().limit(limits=1)
        _serial += 1
    try:
        yield
    finally:
        with _serial_lock:
            _serial -= 1
            if _serial == 0:
                _limit.restore_original_limits()
