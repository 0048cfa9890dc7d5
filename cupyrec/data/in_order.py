"""Work that several threads do ahead, in order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_order"]

T, R = TypeVar("T"), TypeVar("R")


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Iterate over ``work(item)`` of all items, while threads do what comes next.

    The items are asked for by the thread that iterates, one more of them ahead than there are
    threads. An error, of an item or of its work, is raised when its turn comes, and ends the
    iteration. Threads end with it, and when the iterator is closed or dropped.

    Parameters
    ----------
    work : callable
        Called from several threads at once.
    items : iterable
    threads : int
        With 1 all is done by the thread that iterates, and nothing ahead.

    Examples
    --------
    >>> list(in_order(abs, [-1, 2, -3], threads=2))
    [1, 2, 3]
    """
    if threads == 1:
        yield from map(work, items)
        return
    items, pending, failure = iter(items), collections.deque[Future](), None
    pool, more = ThreadPoolExecutor(threads, thread_name_prefix="cupyrec-in-order"), True
    try:
        while more or pending:
            while more and len(pending) <= threads:
                try:
                    pending.append(pool.submit(work, next(items)))
                except StopIteration:
                    more = False
                except Exception as error:  # after what came before it
                    more, failure = False, error
            if pending:
                yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        del failure  # whose traceback has this frame
        pool.shutdown(cancel_futures=True)
