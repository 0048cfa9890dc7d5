"""Reading ahead in a background thread."""

from __future__ import annotations

import atexit
import collections
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TypeVar

from cupyrec import activity, errors

__all__ = ["prefetch"]

T = TypeVar("T")


def prefetch(iterable: Iterable[T], depth: int = 4) -> Iterator[T]:
    """Iterate over `iterable` while a thread of its own computes up to `depth` items ahead.

    An error in the thread is raised here, after the items before it. The thread ends when the
    items do, and when the iterator returned is closed, dropped or left by an exception; the
    source is then closed too, if it can be.

    Raises
    ------
    ValueError, TypeError
        `depth` is not an integer of at least 1.

    Examples
    --------
    >>> list(prefetch(x * x for x in range(4)))
    [0, 1, 4, 9]
    """
    return _consume(_Reader(iter(iterable), errors.positive("prefetch", "depth", depth)))


def _consume(reader: _Reader) -> Iterator:
    reader.thread.start()
    try:
        while True:
            item, error = reader.take()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        reader.stop()


_END = object()
_readers: weakref.WeakSet[_Reader] = weakref.WeakSet()


class _Reader:
    """A bounded queue and the thread that fills it.

    The thread is a daemon, so that an abandoned iterator never keeps the interpreter alive; but
    it is stopped before the interpreter goes down, as a thread caught in native code then aborts.
    """

    def __init__(self, iterator: Iterator, depth: int) -> None:
        self.iterator = iterator
        self.depth = depth
        self.items: collections.deque = collections.deque()
        self.stopped = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.work, name="cupyrec-prefetch", daemon=True)
        _readers.add(self)

    def work(self) -> None:
        try:
            for item in self.iterator:
                if not self.put(item, None):
                    break
            self.put(_END, None)
        except BaseException as error:  # raised again at the consumer
            self.put(None, error)
        finally:
            if hasattr(self.iterator, "close"):
                self.iterator.close()

    def put(self, item: object, error: BaseException | None) -> bool:
        """Append an item when there is room; False once nobody waits for it."""
        with self.changed:
            while len(self.items) >= self.depth and not self.stopped:
                self.changed.wait()
            self.items.append((item, error))
            self.changed.notify_all()
            return not self.stopped

    def take(self) -> tuple[object, BaseException | None]:
        with self.changed:
            while not self.items:
                with activity.during("reading"):
                    self.changed.wait()
            self.changed.notify_all()
            return self.items.popleft()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(timeout=5)  # a source that blocks for good must not block us too


@atexit.register
def _stop_all() -> None:
    for reader in list(_readers):
        reader.stop()
