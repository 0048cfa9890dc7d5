"""The ranks of a job, and the one thread of each that makes all MPI calls.

What is to be sent is given to that thread's queue, in the same order on every rank; whoever gave it
goes on, and waits when the result is needed. So keys travel while a forward pass computes, and MPI
need not be safe for threads. While the thread waits for messages it sleeps between looks, since
ranks may outnumber cores.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from cupyrec import arrays, timeline
from cupyrec.parallel import devices
from cupyrec.parallel.failure import OtherRankError

__all__ = ["Communicator", "Transfer"]

_T = TypeVar("_T")
_TAGS = 32768  # that any MPI has
_MOST = 1 << 30  # bytes of a message
_LOOKS = 64  # that yield the core, before the thread sleeps between looks
_SLEEP, _LONGEST = 2e-5, 5e-4  # seconds between looks
_IDLEST = 1e-2  # the same of a rank that may wait long
_IDLE = 0.5  # seconds after which a thread with nothing to do looks around


class Transfer:
    """A part of an all-to-all: rows that go to each rank, and the place for those that come.

    Parameters
    ----------
    send, receive : contiguous arrays
        Rows for rank 0, then those for rank 1, ...; and from them.
    to, of : sequence of int
        Number of rows for and from each rank. Without `to` all get the same, which is all rows.
    """

    def __init__(
        self, send: Any, to: Sequence[int] | None, receive: Any, of: Sequence[int]
    ) -> None:
        self.send, self.to = send, None if to is None else np.cumsum([0, *to])
        self.receive, self.of = receive, np.cumsum([0, *of])

    def sent(self, rank: int) -> Any:
        """Rows for a rank."""
        return self.send if self.to is None else self.send[self.to[rank] : self.to[rank + 1]]

    def received(self, rank: int) -> Any:
        """The place for a rank's rows."""
        return self.receive[self.of[rank] : self.of[rank + 1]]


class Communicator:
    """Ranks that train one model together; by itself, without MPI, one rank.

    Every rank must make the same calls in the same order. Each call names what it is for, which
    errors and metrics tell.

    Parameters
    ----------
    connect : callable, optional
        Called in the thread that makes the MPI calls; returns mpi4py's `MPI` and a communicator.

    Attributes
    ----------
    rank, size : int
        Number of this rank, and of ranks.
    cuda_aware : bool
        Whether MPI reads and writes the memory of GPUs.
    bytes_sent : Counter of str
        To other ranks, by what they were for.
    step : int
        That this rank is at, for messages.
    stall_timeout : float
        Seconds without progress on any rank after which the job is ended; inf: never.

    Examples
    --------
    >>> ranks = Communicator()
    >>> ranks.rank, ranks.size
    (0, 1)
    >>> ranks.all_gather("losses", np.array([0.5]))
    array([[0.5]])
    """

    stall_timeout: float = 300.0

    def __init__(self, connect: Callable[[], tuple[Any, Any]] | None = None) -> None:
        self.rank, self.size = 0, 1
        self.cuda_aware = False
        self.bytes_sent: collections.Counter[str] = collections.Counter()
        self.now: str | None = None  # what the thread is at
        self.last: str = ""  # what it is at or was at last
        self.calls = 0  # made so far
        self.step = 0
        self.doing: list[str] = []  # what this rank may take long at
        self.look_around: Callable[[], None] = lambda: None  # often, by the thread
        self._mpi = self._ranks = None
        self._connect = connect
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if connect is not None:
            self._thread = threading.Thread(target=self._work, name="cupyrec-mpi", daemon=True)
            self._thread.start()
            self.submit("connection", self._start).result()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size})"

    @property
    def shard(self) -> str:
        """What begins the `repr` of something of which each rank has a part, which it is of.

        Examples
        --------
        >>> Communicator().shard
        ''
        """
        return f"shard {self.rank} of {self.size}, " if self.size > 1 else ""

    def __deepcopy__(self, memo: dict) -> Communicator:
        return self  # ranks are what they are, whatever model is copied

    def _start(self) -> None:
        self._mpi, ranks = self._connect()
        self._ranks = ranks.Dup()  # our messages are not to be taken for those of others
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.cuda_aware = _cuda_aware(self._mpi)

    def _work(self) -> None:
        while True:
            try:
                what, job, future, given = self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                self.look_around()
                continue
            self.now, self.last, self.calls = what, what, self.calls + 1
            try:
                with timeline.span(what), given.taken_up():
                    result = job()
                future.set_result(result)
            except BaseException as error:  # raised again where the result is waited for
                future.set_exception(error)
            self.now = None
            del job, future, given
            result = None

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Within this context this rank counts as alive, but for its time in calls.

        Examples
        --------
        >>> with Communicator().busy("saving"):
        ...     pass
        """
        self.doing.append(what)
        try:
            yield
        finally:
            self.doing.remove(what)

    def abort(self, code: int) -> None:
        """End all ranks at once, the launcher with this exit code.

        Examples
        --------
        See `cupyrec.parallel.failed`, which says why as well.
        """
        if self._mpi is not None and not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def submit(self, what: str, job: Callable[[], Any], *xp: Any) -> Future:
        """Let the thread do a job, after those that it was given before.

        Parameters
        ----------
        what : str
            For errors and metrics.
        job : callable
            Makes calls of this class.
        *xp : module
            Array modules of the devices that the job works on, once they have done what this thread
            has given them; on the same GPU, see `devices`.

        Returns
        -------
        concurrent.futures.Future
            Its `result` waits, returns what `job` does and raises what it raises.

        Examples
        --------
        >>> ranks = Communicator()
        >>> ranks.submit("a test", lambda: ranks.rank).result()
        0
        """
        future: Future = Future()
        if self._thread in (None, threading.current_thread()):
            future.set_result(job())
        else:
            self._jobs.put((what, job, future, devices.Given(*xp)))
        return future

    def all_to_all(self, what: str, *transfers: Transfer) -> None:
        """Send every rank its rows and receive theirs; none where there are none.

        Raises
        ------
        ValueError
            This rank's own rows don't fit.

        Examples
        --------
        >>> x, y = np.arange(2.0), np.empty(2)
        >>> Communicator().all_to_all("a test", Transfer(x, [2], y, [2]))
        >>> y
        array([0., 1.])
        """
        self.submit(what, lambda: self._all_to_all(what, transfers), *_modules(transfers)).result()

    def _all_to_all(self, what: str, transfers: Sequence[Transfer]) -> None:
        rank, requests, staged = self.rank, [], []
        tag = self.calls % _TAGS
        if self.size > 1:
            for xp in _modules(transfers):
                devices.finish(xp)  # MPI heeds no stream
        for transfer in transfers:
            stage = arrays.device(transfer.send) == "cuda" and not self.cuda_aware
            if stage and self.size > 1:
                transfer = _staged(transfer, staged)
            for k in range(1, self.size):  # each rank begins with another
                source, target = (rank - k) % self.size, (rank + k) % self.size
                for place in _pieces(transfer.received(source)):
                    requests.append(self._ranks.Irecv(place, source, tag))
                for rows in _pieces(transfer.sent(target)):
                    requests.append(self._ranks.Isend(rows, target, tag))
                    self.bytes_sent[what] += rows.nbytes
        for transfer in transfers:
            own, place = transfer.sent(rank), transfer.received(rank)
            if own.size and arrays.address(own) != arrays.address(place):
                place[...] = own
        self._wait(requests)
        for transfer in transfers:
            devices.received(transfer.receive)
        for host, place in staged:
            xp = arrays.namespace("all_to_all", place)
            place[...] = arrays.copy_to(xp, host)
            devices.finish(xp)  # before the host's memory is used again

    def all_to_all_counts(self, what: str, counts: np.ndarray) -> np.ndarray:
        """Send every rank its numbers, (N, ...) in the host's memory; return those that come.

        Few numbers of many ranks are one call of MPI's, rather than two messages a rank.

        Examples
        --------
        >>> Communicator().all_to_all_counts("a test", np.array([3]))
        array([3])
        """
        counts = np.ascontiguousarray(counts)
        return self.submit(what, lambda: self._all_to_all_counts(what, counts)).result()

    def _all_to_all_counts(self, what: str, counts: np.ndarray) -> np.ndarray:
        received = counts.copy()
        if self.size > 1 and counts.size:
            self._wait([self._ranks.Ialltoall(_buffer(counts), _buffer(received))])
            self.bytes_sent[what] += counts.nbytes - counts[self.rank].nbytes
        return received

    def all_gather(self, what: str, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, of equal shape and in the host's memory: (N, ...).

        Examples
        --------
        See the class.
        """
        array = np.ascontiguousarray(array)
        return self.submit(what, lambda: self._all_gather(what, array)).result()

    def _all_gather(self, what: str, array: np.ndarray) -> np.ndarray:
        everyone = np.empty((self.size, *array.shape), array.dtype)
        everyone[self.rank] = array
        if self.size > 1 and array.size:
            sent, received = _buffer(array), _buffer(everyone)
            self._wait([self._ranks.Iallgather(sent, received)])
            self.bytes_sent[what] += array.nbytes * (self.size - 1)
        return everyone

    def all_gather_json(self, what: str, value: Any) -> list[Any]:
        """Return a value of each rank, of any length, that JSON can write.

        Examples
        --------
        >>> Communicator().all_gather_json("names", {"name": "a"})
        [{'name': 'a'}]
        """
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)

        def job() -> list[Any]:
            lengths = self._all_gather(what, np.array([text.size]))[:, 0]
            texts = np.empty(int(lengths.sum()), np.uint8)
            same = Transfer(text, None, texts, lengths)
            self._all_to_all(what, [same])
            return [json.loads(same.received(rank).tobytes()) for rank in range(self.size)]

        return self.submit(what, job).result()

    def broadcast_json(self, what: str, value: Any = None) -> Any:
        """Return rank 0's value, which JSON can write, on all ranks, however late it may come.

        Others sleep until then, in turns that get longer: a rank that has waited for a second
        costs nothing to speak of, and hears at most a tenth later than it could.

        Examples
        --------
        >>> Communicator().broadcast_json("command", {"do": "rest"})
        {'do': 'rest'}
        """

        def job() -> Any:
            text = np.frombuffer(json.dumps(value).encode(), np.uint8)
            if self.size > 1:
                length = np.array([text.size])
                self._wait([self._ranks.Ibcast(_buffer(length), 0)], _IDLEST)
                text = text.copy() if self.rank == 0 else np.empty(int(length[0]), np.uint8)
                self._wait([self._ranks.Ibcast(text, 0)])
            return json.loads(text.tobytes())

        return self.submit(what, job).result()

    def together(self, what: str, work: Callable[[], _T]) -> _T:
        """Do this rank's part of a work; raise on all ranks if it fails on one.

        Raises
        ------
        OtherRankError
            It failed on another rank.

        Examples
        --------
        >>> Communicator().together("a test", lambda: 3)
        3
        """
        failed = None
        try:
            with self.busy(what):
                done = work()
        except Exception as error:
            failed = error
        told = None if failed is None else f"{type(failed).__name__}: {failed}"
        for rank, text in enumerate(self.all_gather_json(what, told)):
            if failed is not None:
                raise failed
            if text is not None:
                raise OtherRankError(f"{what}: rank {rank} must get on, got {text}")
        return done

    def any(self, what: str, flag: bool) -> Future:
        """Return a future of whether `flag` is true on any rank.

        Examples
        --------
        >>> Communicator().any("interruption", False).result()
        False
        """
        return self.submit(what, lambda: bool(self._all_gather(what, np.array([flag])).any()))

    def barrier(self, what: str) -> None:
        """Wait until every rank has come here.

        Examples
        --------
        >>> Communicator().barrier("a test")
        """
        self.all_gather(what, np.zeros(1, np.uint8))

    def _wait(self, requests: list[Any], longest: float = _LONGEST) -> None:
        looks, pause = 0, _SLEEP
        while requests and not self._all_done(requests):
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(1.1 * pause, longest)
                self.look_around()

    def _all_done(self, requests: list[Any]) -> bool:
        try:
            return self._mpi.Request.Testall(requests)
        except self._mpi.Exception as error:
            raise RuntimeError(
                f"{self.now}: all ranks must make the same calls in the same order, with the same "
                f"codecs and as much to send as others expect, got a message for which MPI says "
                f"{error}."
            ) from None


def _buffer(array: Any) -> Any:
    """What mpi4py takes: the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def _pieces(array: Any) -> list[Any]:
    """What goes in a message each, none for no bytes: MPI counts those in 31 bits."""
    if not array.size:
        return []
    whole = _buffer(array)
    return [whole[i : i + _MOST] for i in range(0, whole.size, _MOST)]


def _modules(transfers: Sequence[Transfer]) -> set[Any]:
    return {arrays.namespace("all_to_all", transfer.send) for transfer in transfers}


def _staged(transfer: Transfer, staged: list[tuple[Any, Any]]) -> Transfer:
    """The same transfer by way of the host, where `staged` notes what is to be copied back."""
    send, receive = devices.fetched(transfer.send), devices.pinned_like(transfer.receive)
    staged.append((receive, transfer.receive))
    to = None if transfer.to is None else np.diff(transfer.to)
    return Transfer(send, to, receive, np.diff(transfer.of))


def _cuda_aware(mpi: Any) -> bool:
    """Whether this MPI takes pointers to GPUs, as far as it tells."""
    for library in (None, mpi.__file__):
        with contextlib.suppress(AttributeError, OSError):
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"  # of Cray's MPICH
