"""Streams and events of the simulator, by the names of `cupy.cuda`.

Work of the null stream runs as it is launched. That of any other runs as late as it may: when a
stream waits for it. So what nobody waits for never happens, and a matmul of what was freed before
is a fault. NumPy's functions run as they are called, on any stream.
"""

from __future__ import annotations

import collections
import contextvars
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Device", "Event", "Stream", "get_current_stream", "submit"]


class Device(NamedTuple):
    """The one device that there is.

    Examples
    --------
    >>> Device().id
    0
    """

    id: int = 0


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


class Stream:
    """A stream of work, in its order.

    Examples
    --------
    >>> main, other = get_current_stream(), Stream(non_blocking=True)
    >>> _ = other.use()
    >>> submit(lambda: print("done"))
    >>> _ = main.use()
    >>> main.wait_event(other.record())
    done
    """

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.null = null
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._done = 0

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
        """Let work from now on start after an event."""
        stream = event.stream
        while stream and stream._done < event.work:
            stream._done += 1
            stream._waiting.popleft()()


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


def submit(work: Callable[[], None]) -> None:
    """Give work to the current stream.

    Examples
    --------
    >>> submit(lambda: print("done"))
    done
    """
    stream = _current.get()
    if stream.null:
        work()
    else:
        stream._waiting.append(work)
