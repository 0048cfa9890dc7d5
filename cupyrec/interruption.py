"""Ctrl-C, SIGTERM and SIGUSR1 as a wish granted at the end of a step, or of a change."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Interrupted", "ending", "held", "interruption"]

#: mpirun passes the last one on; at the others it kills its ranks within a second. Slurm sends any.
_WISHES = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
_CODES = {"SIGHUP": 128 + signal.SIGHUP, "SIGTERM": 128 + signal.SIGTERM}


class Interrupted(KeyboardInterrupt):
    """A signal has ended what is left in order.

    Parameters
    ----------
    by : str
        The signal's name, or what it was else.
    *message : str
        What there is to be told about it.

    Attributes
    ----------
    code : int
        For the process to end with: 128 and the signal's number, as shells have it; of Ctrl-C, and
        of what stands for it where that can't be sent, 130.

    Examples
    --------
    >>> Interrupted("SIGTERM").code, Interrupted("SIGUSR1", "stopped after step 3").code
    (143, 130)
    """

    def __init__(self, by: str, *message: str) -> None:
        super().__init__(*message)
        self.code = _CODES.get(by, 128 + signal.SIGINT)


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

    def handle(number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name)

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
