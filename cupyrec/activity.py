"""What this process is at that may take long, though it gets on: compiling, reading.

It waits for no other rank meanwhile, so that whoever watches over ranks takes it for alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["begin", "during", "end", "now"]

_now: list[str] = []  # of all threads; changes of a list are atomic


def begin(what: str) -> None:
    """From now on this process is at it, until `end`.

    Examples
    --------
    See `during`.
    """
    _now.append(what)


def end(what: str) -> None:
    """Take back what was told to `begin`.

    Examples
    --------
    See `during`.
    """
    _now.remove(what)


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Within this context this process is at it.

    Examples
    --------
    >>> with during("compiling"):
    ...     now()
    ['compiling']
    """
    begin(what)
    try:
        yield
    finally:
        end(what)


def now() -> list[str]:
    """Return what this process is at.

    Examples
    --------
    >>> now()
    []
    """
    return list(_now)
