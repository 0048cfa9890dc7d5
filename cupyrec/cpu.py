"""CPU loops: how they are compiled, and how they are spread over threads.

A loop is serial Numba code that releases the GIL and works on one block of rows; `parallel` hands
fixed blocks to a pool of threads. Block borders depend on sizes alone, never on the number of
threads, so a loop gives the same bits however many threads run it. Serial loops compile several
times faster than Numba's ``parallel=True``, may run in background threads, and need no OpenMP.

Phases are short, some twenty a training step, and a thread that sleeps takes 50 us to wake up, on a
virtual machine 100 and more; so does the one that waits for it. So a thread that has nothing to do
yields its core to whoever else wants it for half a millisecond, without the GIL, before it sleeps.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils, codegen, config, event
from numba.extending import intrinsic
from threadpoolctl import LibController, ThreadpoolController

from cupyrec import activity, control_groups, errors
from cupyrec.loop_cache import LoopCache

__all__ = [
    "elementwise", "exact_inline", "exact_loop", "has", "loop", "num_threads", "parallel",
    "pointer", "prefetch", "prefetch_far", "serial_blas", "set_num_threads", "share_cores",
]  # fmt: skip

logger = logging.getLogger("cupyrec")


@functools.cache  # once
def _say_uncached() -> None:
    logger.warning(
        "found no folder to keep the compiled CPU loops in: every process compiles them anew, "
        "unless NUMBA_CACHE_DIR names one that is writable"
    )


def _decorator(**options: object) -> Callable[[Callable], Callable]:
    def decorate(function: Callable) -> Callable:
        dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
        if (cache := _cache_of(function)) is not None:
            dispatcher._cache = cache
        return dispatcher

    return decorate


def _cache_of(function: Callable) -> LoopCache | None:
    try:
        return LoopCache(function)
    except RuntimeError:  # Numba's "no locator available"
        return _say_uncached()


#: Loops whose bits are fixed across devices: every operation is rounded on its own.
exact_loop = _decorator()
#: The same, always inlined: for work on one row, where a call would cost as much as the work.
exact_inline = _decorator(forceinline=True)
#: Loops over sums and products: terms may be reordered and contracted, NaN and inf still count.
loop = _decorator(fastmath={"reassoc", "contract"})


def elementwise(*signatures: str) -> Callable[[Callable], np.ufunc]:
    """Return a decorator that compiles a function of scalars into a ufunc for these types."""

    def decorate(function: Callable) -> np.ufunc:
        ufunc = numba.vectorize(function)
        if (cache := _cache_of(function)) is not None:
            ufunc._dispatcher.cache = cache
        for signature in signatures:
            ufunc.add(signature)
        ufunc.disable_compile()
        return ufunc

    return decorate


def has(feature: str) -> bool:
    """Return whether loops are compiled for processors with a feature, as LLVM calls it.

    Examples
    --------
    >>> has("no such feature")
    False
    """
    features = config.CPU_FEATURES  # of the environment, in place of the processor's
    return f"+{feature}" in (features or codegen.get_host_cpu_features()).split(",")


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """In a loop: an integer address as a pointer that `numba.carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


def _prefetch(locality: int) -> Any:
    @intrinsic
    def ask(_context: Any, address: Any) -> Any:
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
            how = [cgutils.int32_t(n) for n in (0, locality, 1)]  # to read, how near, data
            given = [v.type for v in (pointer, *how)]
            of_type = cgutils.ir.FunctionType(cgutils.ir.VoidType(), given)
            call = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], of_type)
            builder.call(call, [pointer, *how])
            return context.get_dummy_value()

        return types.void(types.uint64), generate

    return ask


#: In a loop: ask for the cache line at an address without waiting for it.
prefetch = _prefetch(3)
#: The same, but into L2: more lines can be under way, and more wait there until their turn.
prefetch_far = _prefetch(2)


def _told_threads() -> int | None:
    """The number that the environment tells, if it tells one."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        with contextlib.suppress(KeyError, ValueError):
            if (threads := int(os.environ[name])) >= 1:
                return threads
    return None


def _initial_threads() -> int:
    if (threads := _told_threads()) is not None:
        return threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return math.ceil(min(cores or 1, control_groups.cores()))


_TURNS = 2000  # before a thread sleeps
_yield_core = types.ExternalFunction("sched_yield", types.int32())
_threads = _initial_threads()
_chosen = _told_threads() is not None  # by the user, who knows best
_serial_lock, _serial, _before = threading.Lock(), 0, ()  # of `serial_blas`


@functools.cache  # once
def _say_compiling() -> None:
    logger.info("compiling CPU loops new to this installation: up to a minute")


class _Compiling(event.Listener):
    """Tell the user why the first step takes seconds, and other ranks that this one gets on."""

    def on_start(self, _event: event.Event) -> None:
        activity.begin("compiling")
        _say_compiling()

    def on_end(self, _event: event.Event) -> None:
        activity.end("compiling")


event.register("numba:compile", _Compiling())


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def num_threads() -> int:
    """Return the number of threads that CPU ops use.

    At first that is the environment's ``OMP_NUM_THREADS`` or ``NUMBA_NUM_THREADS``, else the number
    of cores that this process may run on, or as many as its control group's CPU quota fills, if
    they are fewer; of several ranks of a host each takes its share, see `share_cores`.

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
    global _threads, _chosen
    _threads, _chosen = errors.positive("set_num_threads", "threads", threads), True


def share_cores(cores: int, processes: int) -> None:
    """Use at most so many threads from now on, unless their number was chosen.

    Parameters
    ----------
    cores : int
        This process's share of the host's.
    processes : int
        That share them, and the CPU quota of their control group.

    Examples
    --------
    >>> before = num_threads()
    >>> share_cores(before, 1)
    >>> num_threads() == before
    True
    """
    global _threads
    if not _chosen:
        _threads = max(1, int(min(_threads, cores, control_groups.cores() / processes)))


@exact_loop
def _await_change(counter, seen):
    for _ in range(_TURNS):
        _yield_core()  # after which memory is read again
        if counter[0] != seen:
            return


@exact_loop
def _await_sum(flags, total):
    for _ in range(_TURNS):
        _yield_core()
        if flags.sum() == total:
            return


class _Job:
    """What the calling thread does with others that come in time.

    A flag tells that a helper is done; under the GIL it also publishes what that one wrote. The
    queue wakes up a caller that sleeps.
    """

    def __init__(self, work: Callable[[], None], helpers: int) -> None:
        self._work: Callable[[], None] | None = work
        self._claims = iter(range(helpers))  # next() is atomic under the GIL
        self._contexts = [contextvars.copy_context() for _ in range(helpers)]
        self._errors: list[BaseException | None] = [None] * helpers
        self._flags, self._done = np.zeros(helpers, np.int64), queue.SimpleQueue()
        self._unclaimed: list[int] = []

    def help(self) -> None:
        """Work, unless the job is over."""
        claim = next(self._claims, None)
        if claim is None:
            return
        try:
            self._contexts[claim].run(self._work)
        except BaseException as raised:
            self._errors[claim] = raised
        self._flags[claim] = 1
        self._done.put(None)

    def finish(self) -> None:
        """Wait for those who have begun, and raise their first error; nobody begins any more.

        An interrupt is raised when blocks are over, since they write. It may come between any two
        steps: each is done whole or not at all, and may be done again.
        """
        interrupt = None
        while True:
            try:
                self._unclaimed.extend(self._claims)
                begun = len(self._flags) - len(self._unclaimed)
                if begun:
                    _await_sum(self._flags, begun)
                while self._flags.sum() < begun:
                    self._done.get()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        raised = [error for error in (interrupt, *self._errors) if error is not None]
        # Who takes the job up later finds nothing to hold.
        self._work, self._contexts, self._errors = None, [], []
        try:
            if raised:
                raise raised[0]
        finally:
            del raised, interrupt  # whose tracebacks have this frame


class _Helpers:
    """Threads that take part in jobs; a fork leaves them behind."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._jobs, self._published = queue.SimpleQueue(), np.zeros(1, np.int64)
        self._count, self._lock = 0, threading.Lock()

    def offer(self, job: _Job, helpers: int) -> None:
        if self._count < helpers:
            with self._lock:
                self._grow(helpers)
        for _ in range(helpers):
            self._jobs.put(job)
        self._published[0] += 1  # two callers may count as one: it changes

    def _grow(self, count: int) -> None:
        if self._count == 0:  # else a helper might compile them, under a lock, while we fork
            _await_change(self._published, -1)
            _await_sum(self._published, self._published[0])
        with contextlib.suppress(RuntimeError):  # no more threads: those there are will do
            while self._count < count:
                given = self._jobs, self._published
                threading.Thread(target=_help, args=given, name="cupyrec", daemon=True).start()
                self._count += 1


def _help(jobs: queue.SimpleQueue, published: np.ndarray) -> None:
    while True:
        seen = int(published[0])
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            _await_change(published, seen)
            job = jobs.get()
        job.help()
        del job  # and what it holds


_helpers = _Helpers()


def parallel(work: Callable[[int, int], object], n: int, block: int) -> None:
    """Call ``work(start, stop)`` for each block of `block` out of `n`, over the threads.

    The calling thread works too. `work` must write to places that belong to its block alone, must
    not fork, and finds the caller's context variables, `numpy.errstate` among them. An error of a
    block is raised once no other block runs.

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
        try:
            for start in starts:
                work(start, min(start + block, n))
        except BaseException:
            collections.deque(starts, maxlen=0)  # nobody starts another block
            raise

    helpers = max(0, min(_threads, -(-n // block)) - 1)
    if helpers == 0:
        return drain()
    job = _Job(drain, helpers)
    try:
        try:
            _helpers.offer(job, helpers)
            drain()
        finally:
            job.finish()
    except KeyboardInterrupt:
        job.finish()  # the interrupt may have come on the way there
        raise


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
    global _serial, _before
    with _serial_lock:
        if _serial == 0:  # controllers by hand: threadpoolctl's own `limit` takes 30 us, this 6
            _before = [(library, library.get_num_threads()) for library in _blas().lib_controllers]
            for library, _ in _before:
                _set_blas_threads(library, 1)
        _serial += 1
    try:
        yield
    finally:
        with _serial_lock:
            _serial -= 1
            if _serial == 0:
                for library, threads in _before:
                    _set_blas_threads(library, threads)


def _set_blas_threads(library: LibController, threads: int) -> None:
    """threadpoolctl 3.8 heeds one Python thread alone, the first to ask; ours take turns."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(threads)
