"""Streams, graphs and memory pools of the simulator, by the names of `cupy.cuda`.

Work of the null stream runs as it is launched. That of any other runs as late as it may: when a
stream waits for it. So what nobody waits for never happens, and work on what was freed before is a
fault. Of a stream that is capturing it runs whenever the graph is launched, with the addresses that
it was given: as on a GPU a graph owns no memory, and neither a wait of the host nor a copy from it
can be part of one.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cupyrec.sim import recorder
from cupyrec.sim.heap import Allocation, the_heap

__all__ = [
    "Device", "Event", "Graph", "MemoryPool", "Stream", "forbid", "get_current_stream", "submit",
    "using_allocator", "waits",
]  # fmt: skip


class Device(NamedTuple):
    """The one device that there is; ``with`` makes it the current one.

    Examples
    --------
    >>> with Device() as device:
    ...     device.id
    0
    """

    id: int = 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    """A point in a stream, or in none before it is recorded.

    Examples
    --------
    >>> Stream().record(Event()).work
    0
    """

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.work = 0  # how much the stream had been given

    def synchronize(self) -> None:
        """Let the host wait until it has passed."""
        if self.stream is not None:
            recorder.synced()
            self.stream._reach(self.work)


class Stream:
    """A stream of work, in its order; ``with`` makes it the current one.

    Examples
    --------
    >>> main, other = get_current_stream(), Stream(non_blocking=True)
    >>> with other:
    ...     submit(lambda: print("done"))
    >>> main.wait_event(other.record())
    done
    >>> with other:
    ...     other.begin_capture()
    ...     submit(lambda: print("again"))
    ...     graph = other.end_capture()
    >>> graph.launch()
    again
    """

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.null = null
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._done = 0
        self._captured: list[Callable[[], None]] | None = None
        self._forked: Stream | None = None  # the capturing one that this has waited for
        self._forks: list[Stream] = []
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(_current.get())
        return self.use()

    def __exit__(self, *error: Any) -> None:
        self._before.pop().use()

    def use(self) -> Stream:
        """Make this thread's work go to this stream from now on."""
        _current.set(self)
        return self

    def record(self, event: Event | None = None) -> Event:
        """Return an event that passes when all work so far has."""
        event = event or Event()
        event.stream, event.work = self, self._done + len(self._waiting)
        return event

    def wait_event(self, event: Event) -> None:
        """Let work from now on start after an event; one of a capture makes it part of that."""
        stream = event.stream
        if stream:
            stream._reach(event.work, self._captured)
        if stream and stream.is_capturing() and self._captured is None:
            self._forked = stream
            stream._forks.append(self)

    def _reach(self, work: int, captured: list[Callable[[], None]] | None = None) -> None:
        """Have work done up to the so-manieth that there was, or make it part of a capture."""
        while self._done < work:
            self._done += 1
            following = self._waiting.popleft()
            following() if captured is None else captured.append(following)

    def begin_capture(self, mode: int | None = None) -> None:
        """Keep what is launched from now on, here and on streams that wait for this one."""
        self._captured = []

    def end_capture(self) -> Graph:
        """Return what was launched since `begin_capture`."""
        left = 0
        for fork in self._forks:
            left += len(fork._waiting)
            fork._forked = None
            fork._waiting.clear()
        captured, self._captured, self._forks = self._captured, None, []
        if left:
            raise RuntimeError(
                "sim: a stream that is capturing must wait for those that have waited for it, got "
                f"{left} launches that nobody waits for."
            )
        return Graph(captured)

    def is_capturing(self) -> bool:
        """Return whether work is kept for a graph."""
        return self._captured is not None or self._forked is not None


_null = Stream(null=True)
_current = contextvars.ContextVar("stream", default=_null)  # each thread has its own


def get_current_stream() -> Stream:
    """Return the stream that this thread's work goes to.

    Examples
    --------
    >>> get_current_stream().null
    True
    """
    return _current.get()


class Graph:
    """Work that was captured, to be launched as often as one likes."""

    def __init__(self, captured: list[Callable[[], None]]) -> None:
        self._captured = captured

    def launch(self, stream: Stream | None = None) -> None:
        """Run all of it, in its order."""
        recorder.graph_launched()
        for work in self._captured:
            work()


def submit(work: Callable[..., None], *given: Any) -> None:
    """Give ``work(*given)`` to the current stream.

    Examples
    --------
    >>> submit(print, "done")
    done
    """
    stream = _current.get()
    if stream.null:
        work(*given)
        return
    kept = stream._waiting if stream._captured is None else stream._captured
    kept.append(functools.partial(work, *map(_unowned, given)))


def waits(what: str) -> None:
    """Let the host wait for the current stream.

    Raises
    ------
    RuntimeError
        The current stream is capturing.

    Examples
    --------
    >>> waits("get")
    """
    forbid(what)
    get_current_stream().record().synchronize()


def forbid(what: str) -> None:
    """Raise RuntimeError if the current stream is capturing.

    Examples
    --------
    >>> forbid("a copy from the host")
    """
    if _current.get().is_capturing():
        raise RuntimeError(
            "sim: a stream that is capturing must neither wait for the device nor take data from "
            f"the host, got {what}."
        )


def _unowned(value: Any) -> Any:
    """The same addresses, which nobody keeps from being given back."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unowned, value))
    if isinstance(value, dict):
        return {name: _unowned(item) for name, item in value.items()}
    if hasattr(value, "_host"):
        return value._view(_unowned(value._host))
    heap = the_heap()
    if not isinstance(value, np.ndarray) or not np.may_share_memory(value, heap.bytes):
        return value
    start = value.ctypes.data - heap.base
    return np.ndarray(value.shape, value.dtype, heap.bytes, start, value.strides)


# Memory


class Memory:
    """Bytes of the heap that are given back when no array uses them, NumPy's views among those."""

    def __init__(self, made: Allocation, give_back: Callable[[Allocation], None]) -> None:
        weakref.finalize(self, give_back, made)
        self.__array_interface__ = {
            "version": 3, "shape": (made.size,), "typestr": "|u1", "data": (made.address, False),
        }  # fmt: skip


def _malloc(nbytes: int, name: str) -> Memory:
    made = the_heap().allocate(nbytes, name)
    recorder.allocated(nbytes)
    return Memory(made, _free)


def _free(allocation: Allocation) -> None:
    the_heap().free(allocation)
    recorder.freed(allocation.size)


class MemoryPool:
    """Memory that goes back to the heap with the pool: arrays that outlive it hold nothing.

    Examples
    --------
    >>> from cupyrec import sim
    >>> with using_allocator(MemoryPool().malloc):
    ...     _ = sim.empty(3)
    """

    def __init__(self) -> None:
        # By stream and size: memory goes back to the stream that it was taken on.
        self._idle: dict[tuple[int, int], list[Allocation]] = collections.defaultdict(list)
        self._every: list[Allocation] = []
        weakref.finalize(self, _free_all, self._every)

    def malloc(self, size: int, name: str = "memory of a pool") -> Memory:
        """Return memory, if there is any of this size such as was given back."""
        idle = self._idle[id(_current.get()), size]
        if idle:
            made = idle.pop()
        else:
            made = the_heap().allocate(size, name)
            self._every.append(made)
            recorder.allocated(size, pooled=False)
        return Memory(made, idle.append)


def _free_all(allocations: list[Allocation]) -> None:
    for allocation in allocations:
        the_heap().free(allocation)


_allocator = contextvars.ContextVar("allocator", default=_malloc)


def allocate(nbytes: int, name: str) -> Memory:
    """Return memory of the current allocator.

    Examples
    --------
    >>> allocate(3, "x").__array_interface__["shape"]
    (3,)
    """
    return _allocator.get()(nbytes, name)


@contextlib.contextmanager
def using_allocator(allocator: Callable[..., Memory]) -> Iterator[None]:
    """Within this context arrays of this thread come from an allocator.

    Examples
    --------
    See `MemoryPool`.
    """
    token = _allocator.set(allocator)
    try:
        yield
    finally:
        _allocator.reset(token)
