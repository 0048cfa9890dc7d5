"""Streams beside the current one, on which a device does work meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["exchange_stream", "second_stream"]


@contextlib.contextmanager
def second_stream(xp: ModuleType) -> Iterator[Callable[..., contextlib.AbstractContextManager]]:
    """Within this context work may go to a second stream, beside that of the current one.

    Yields a function: within ``with second(*arrays)`` launches go to the second stream, which does
    them when the current one has done all it has been given before. At the end of the outer context
    the current stream waits for the second; until then `arrays` are held, since CuPy's pool would
    give their memory, once freed, to the current stream's next array.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyrec import sim
    >>> x, y = sim.ones(3, np.float32), sim.empty(3, np.float32)
    >>> with second_stream(sim) as second:
    ...     with second(x):
    ...         _ = x.sum(axis=0, keepdims=True, out=y[:1])
    ...     _ = x.sum(axis=0, keepdims=True, out=y[1:2])
    >>> y[:2]
    array([3., 3.], dtype=float32)
    """
    here, there = xp.cuda.get_current_stream(), _stream(xp, xp.cuda.Device().id, "second")
    held: list[Any] = []

    @contextlib.contextmanager
    def second(*arrays: Any) -> Iterator[None]:
        held.extend(arrays)
        _wait(xp, there, here)
        there.use()
        try:
            yield
        finally:
            here.use()

    try:
        yield second
    finally:
        _wait(xp, here, there)
        held.clear()


def exchange_stream(xp: ModuleType) -> Any:
    """Return the stream, of the current device, of what messages to other ranks need.

    Examples
    --------
    >>> from cupyrec import sim
    >>> exchange_stream(sim) is exchange_stream(sim)
    True
    """
    return _stream(xp, xp.cuda.Device().id, "exchange")


@functools.cache
def _stream(xp: ModuleType, device: int, purpose: str) -> Any:
    return xp.cuda.Stream(non_blocking=True)  # a blocking one takes turns with the null stream


def _wait(xp: ModuleType, stream: Any, other: Any) -> None:
    """Let what a stream is given from now on start after all that another has by now."""
    stream.wait_event(other.record(xp.cuda.Event(disable_timing=True)))
