"""A rank that fails says where it stood and why, and ends the job.

The others would wait for it for ever: a rank that merely raises leaves them in their next
collective. So whatever nobody catches, in any thread, ends all ranks. A rank that the launcher ends
because of another says where it stood, from a thread of its own: the main thread may wait in C.
What all fail by, wrong options say, rank 0 tells, and the others leave that to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyrec import activity

if TYPE_CHECKING:
    from cupyrec.parallel.communicator import Communicator

__all__ = ["OtherRankError", "Position", "abort", "deadline", "failed", "guard", "say"]

_PATIENCE = 5  # seconds that MPI may take to end the job, before this process ends itself
_MOMENT = 1.0  # seconds that another rank gets to tell what it may know as well, or better
_EVER = 1e9  # seconds, which clocks can count
_guarded: Communicator | None = None


class OtherRankError(RuntimeError):
    """Work that ranks do together has failed on another one, which says why."""


class Position(NamedTuple):
    """Where a rank stands.

    Examples
    --------
    >>> print(Position(step=12, calls=57, name="rows", inside=True, doing="", ended=False))
    in 'rows' (call 57) at step 12
    """

    step: int
    calls: int
    name: str  # of the call that it is in or was in last
    inside: bool
    doing: str  # besides calls: what it may take long at
    ended: bool  # by itself: it makes no more calls
    alone: bool = False  # whether some of that needs no other rank, whatever the call waits for

    @classmethod
    def of(cls, ranks: Communicator) -> Position:
        """Return where this rank stands.

        Examples
        --------
        >>> from cupyrec.parallel import Communicator
        >>> print(Position.of(Communicator()))
        before any call at step 0
        """
        alone, inside = activity.now(), ranks.now is not None
        doing = ", ".join(dict.fromkeys([*ranks.doing, *alone]))
        return cls(ranks.step, ranks.calls, ranks.last, inside, doing, False, bool(alone))

    @property
    def gets_on(self) -> bool:
        """Whether it does, though none of this changes for long."""
        return self.alone or bool(self.doing and not self.inside)  # else it may wait for others

    def __str__(self) -> str:
        call = f"{'in' if self.inside else 'after'} '{self.name}' (call {self.calls})"
        call = call if self.calls else "before any call"
        state = "its program has ended" if self.ended else self.doing
        return f"{call} at step {self.step}" + (f", {state}" if state else "")


def say(text: str) -> None:
    """Write lines to stderr in one piece, whatever state its file object is in.

    Examples
    --------
    >>> say("rank 1 of 2 failed")
    """
    rest = f"{text}\n".encode()
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(2, rest) :]


@contextlib.contextmanager
def deadline(seconds: float, message: str = "") -> Iterator[None]:
    """End this process with a message unless the context ends in so many seconds; inf: never.

    A moment later it ends even if Python can't run, since a library holds its lock, and says where
    its threads are; without a message, at once.

    Examples
    --------
    >>> with deadline(60, "not done within a minute"):
    ...     pass
    """

    def end() -> None:
        say(message)
        os._exit(1)

    seconds = min(seconds, _EVER)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    if message:
        timer.start()
    faulthandler.dump_traceback_later(seconds + _MOMENT * bool(message), exit=True, file=2)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def abort(ranks: Communicator, message: str, code: int = 1) -> None:
    """Say why, and end all ranks.

    Examples
    --------
    See `failed`.
    """
    say(message)
    with deadline(_PATIENCE):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
                stream.flush()
        ranks.abort(code or 1)


def failed(error: object, code: int = 1) -> None:
    """End all ranks because of an error of this one; where there is but one, do nothing.

    For those who catch what would have ended the program.

    Examples
    --------
    >>> failed(ValueError("no such file"))
    """
    if _guarded is not None:
        _let_others_tell(_guarded, error)
        _end_all(_guarded, error, code)


def _let_others_tell(ranks: Communicator, error: object) -> None:
    """Wait for a rank that fails by the same, or whose failure this one's is, to end all ranks."""
    if isinstance(error, (Exception, KeyboardInterrupt)):  # `fit` raises this on all ranks
        seconds = 3 * _MOMENT if isinstance(error, OtherRankError) else _MOMENT * (ranks.rank > 0)
        with ranks.busy(f"failing by {type(error).__name__}"):
            time.sleep(seconds)


def _end_all(ranks: Communicator, error: object, code: int) -> None:
    if isinstance(error, BaseException):
        text = "".join(traceback.format_exception_only(error)).strip()
        error = text.removeprefix(f"{type(error).__module__}.")
    abort(ranks, f"{_name(ranks)} failed {Position.of(ranks)}: {error}", code)


def guard(ranks: Communicator) -> None:
    """Let what nobody catches end all ranks, and SIGTERM say where this one stands.

    Examples
    --------
    See `cupyrec.parallel.world`, which does it.
    """
    global _guarded
    _guarded = ranks
    main, thread = sys.excepthook, threading.excepthook

    def main_failed(kind: type, error: BaseException, where: TracebackType | None) -> None:
        if _guarded is not None:
            _let_others_tell(ranks, error)
        main(kind, error, where)
        if _guarded is not None:
            _end_all(ranks, error, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def thread_failed(arguments: Any) -> None:
        thread(arguments)
        if not issubclass(arguments.exc_type, SystemExit):
            failed(arguments.exc_value)

    def forget() -> None:
        global _guarded
        _guarded = None

    sys.excepthook, threading.excepthook = main_failed, thread_failed
    os.register_at_fork(after_in_child=forget)  # which is no rank
    if threading.current_thread() is threading.main_thread():
        _report_ends(ranks)


def _report_ends(ranks: Communicator) -> None:
    """On SIGTERM, say where this rank stands, even if the main thread takes no notice."""
    said, lock = [], threading.RLock()

    def report() -> None:
        with lock:
            if not said:
                said.append(True)
                say(f"{_name(ranks)} got SIGTERM {Position.of(ranks)}")

    def end(number: int, _frame: Any) -> None:  # as if there were no handler
        if _guarded is not None:
            report()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def listen() -> None:
        while numbers := os.read(readable, 64):
            if signal.SIGTERM in numbers:
                report()

    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    if before != -1:  # an event loop's
        signal.set_wakeup_fd(before)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else nothing would be written
        signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(before))  # not to ours
    threading.Thread(target=listen, name="cupyrec-signals", daemon=True).start()


def _name(ranks: Communicator) -> str:
    return f"rank {ranks.rank} of {ranks.size}"
