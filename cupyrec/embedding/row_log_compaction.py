"""A thread that frees the disk of records that nobody needs.

It takes the file with the smallest share of records that are needed, copies these to the ends of
other files, and removes it.
"""

from __future__ import annotations

import errno
import functools
import math
import threading
import time
from collections.abc import Callable

import numpy as np

from cupyrec.embedding.row_log_files import LogFile
from cupyrec.embedding.row_log_state import LogState
from cupyrec.embedding.row_log_streams import Stream
from cupyrec.ops.log_records import SLOT_BITS, move

__all__ = ["BEGIN", "BOUND", "Compaction"]

# Bytes of files to needed ones, and more files.
BEGIN, BOUND = (1.35, 3), (1.46, 4)
_FULL = 0.95  # of a file: there is nothing to gain
_DROPPED, _DROPPED_BYTES = 8, 64 << 20  # removed at a time: it takes several waits for the disk
_PATIENCE = 5.0  # seconds that a commit waits
_PIECE = 4 << 20  # bytes


class Compaction:
    """The thread, and what its log's callers have to do with it.

    Parameters
    ----------
    state : LogState

    Examples
    --------
    See `cupyrec.embedding.row_log.RowLog`.
    """

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._error: BaseException | None = None
        self._stopped, self._paused, self._tries = False, 0, 0
        self._ceiling = 0  # bytes of files that writes needn't wait for
        self._thread = threading.Thread(target=self._work, name="cupyrec-compaction", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at the latest after a few megabytes."""
        with self._state.lock:
            self._stopped = True
            self._state.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def pause(self, by: int = 1) -> None:
        """Let no record move from now on, or with -1 take that back."""
        with self._state.change, self._state.lock:
            self._paused += by
            self._state.changed.notify_all()

    def go_on(self) -> None:
        """Let the thread try again what it could not do; raise why, if it can't still.

        What is damaged it doesn't try again: that is raised once.
        """
        changed = self._state.changed
        with changed:
            if self._error is None:
                return
            error, self._error = self._error, None
            if isinstance(error, OSError) and error.errno != errno.EIO:
                error, tries = None, self._tries
                changed.notify_all()
                while self._tries == tries and self._next() is not None:
                    changed.wait()
                error = self._error
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback has this frame

    def keep_up(self) -> None:
        """Wait until files are small enough, or all that can be done is."""
        with self._state.lock:
            self._wait(math.inf)

    def settle(self) -> None:
        """The same after a commit, which leaves less that is needed; but for seconds only.

        Where they are not enough, files may stay as large as they are until the thread gets on.
        """
        with self._state.lock:
            self._ceiling = 0
            self._wait(time.monotonic() + _PATIENCE)
            self._ceiling = self._state.files.disk_bytes

    def _wait(self, end: float) -> None:
        state = self._state
        if not state.exceeds(*BEGIN):
            return
        state.changed.notify_all()
        while state.exceeds(*BOUND) and state.files.disk_bytes > self._ceiling:
            left = end - time.monotonic()
            if left <= 0 or self._error is not None or self._next() is None:
                return
            state.changed.wait(min(left, threading.TIMEOUT_MAX))

    def _next(self) -> Callable[[], None] | None:
        """What there is to do."""
        state, files = self._state, self._state.files
        if self._paused or self._stopped or not state.exceeds(*BEGIN):
            return None
        empty = state.unneeded(held=True)
        freed = sum(file.length for file in empty) * files.record_bytes
        if len(empty) >= _DROPPED or freed >= _DROPPED_BYTES:
            return self._drop
        others = {state.fresh.file, state.moved.file, *empty}
        best, least = None, _FULL
        for file in files:
            if file not in others and not file.damaged:
                needed = int(files.live[file.number] + files.held[file.number])
                if needed / file.length < least:
                    best, least = file, needed / file.length
        if best is not None and state.exceeds(*BEGIN, freed):
            return functools.partial(self._empty, best)
        return self._drop if empty else None

    def _work(self) -> None:
        state = self._state
        while True:
            with state.lock:
                while (work := self._next() if self._error is None else None) is None:
                    if self._stopped:
                        return
                    state.changed.notify_all()
                    state.changed.wait()
            failed = None
            try:
                work()
            except BaseException as error:  # raised by the next call
                failed = error
            with state.lock:
                self._error, self._tries = failed, self._tries + 1
                state.changed.notify_all()
            del failed, work  # and what they hold

    def _drop(self) -> None:
        state = self._state
        with state.change:
            if not self._paused:
                state.drop_unneeded()
                with state.lock:
                    room = 2 * state.files.file_bytes
                    self._ceiling = min(self._ceiling, state.files.disk_bytes + room)

    def _empty(self, victim: LogFile) -> None:
        """Copy what is needed of a file to others."""
        state = self._state
        files, number, reader = state.files, victim.number, victim.reader
        pieces = max(1, _PIECE // files.record_bytes)
        for first in range(0, victim.length, pieces):
            if victim.reader is None or not files.live[number] + files.held[number]:
                return  # a commit may have removed it
            slots = min(pieces, victim.length - first)
            try:
                records = files.read(reader, first, slots)
            except OSError as error:
                victim.damaged = error.errno == errno.EIO
                raise
            with state.change, state.lock:
                if self._paused or self._stopped or victim.reader is None:
                    return
                old = min(max(int(files.committed[number]) - first, 0), slots)
                self._move(victim, first, records[:old], state.moved)
                self._move(victim, first + old, records[old:], state.fresh)

    def _move(self, victim: LogFile, first: int, records: np.ndarray, stream: Stream) -> None:
        state, done, n = self._state, 0, len(records)
        while done < n:
            target, to = stream.room()
            address = victim.number << SLOT_BITS | first + done
            taken, moved = move(state.places, state.count, records[done:], address, target, to)
            stream.took(moved)
            if taken < 0:
                victim.damaged = True
                offset = (first + done - taken - 1) * state.files.record_bytes
                raise state.files.damage(victim.path, offset)
            done += taken
