"""Ctrl-C, SIGTERM and SIGUSR1 as a wish granted at the end of a step, or of a change."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["ending", "held", "interruption"]

#: mpirun passes the last one on; at the others it kills its ranks within a second. Slurm sends any.
_WISHES = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of this context, which changes what must not be half changed.

    It may also decorate a function. Threads other than the main one get no signals anyway.

    Examples
    --------
    >>> done = []
    >>> try:
    ...     with held():
    ...         signal.raise_signal(signal.SIGINT)
    ...         done.append("all of it")
    ... except KeyboardInterrupt:
    ...     print(done)
    ['all of it']
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[Any] = []
    try:
        signal.signal(signal.SIGINT, lambda *signalled: received.append(signalled))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[0])


@contextlib.contextmanager
def interruption() -> Iterator[list[str]]:
    """Within this context the first SIGINT, SIGTERM or SIGUSR1 goes to the list it gives, by name.

    A second one acts as it would without us. In a thread other than the main one, which gets no
    signals, the list stays empty.

    Examples
    --------
    >>> with interruption() as interrupted:
    ...     signal.raise_signal(signal.SIGTERM)
    >>> interrupted
    ['SIGTERM']
    """
    received: list[str] = []
    before = {s: signal.getsignal(s) for s in _WISHES}
    before = {s: handler for s, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: Any) -> None:
        restore()
        received.append(signal.Signals(number).name)
        with contextlib.suppress(OSError):  # sys.stderr may be in the midst of a write
            os.write(2, b"\nstopping after this step\n")

    try:
        for number in before:
            signal.signal(number, handle)
        yield received
    finally:
        restore()


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end this context as Ctrl-C does: it cleans up.

    Examples
    --------
    >>> try:
    ...     with ending():
    ...         signal.raise_signal(signal.SIGTERM)
    ... except KeyboardInterrupt:
    ...     print("cleaning up")
    cleaning up
    """

    def handle(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    ends = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ends = []
    try:
        for number in ends:
            signal.signal(number, handle)
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
