"""Rows on an SSD, by their numbers: a log of fixed-size records in append-only files.

Memory holds 5 bytes a row: where its newest record lies. `RowLog` checks what it is given; what it
stands on are row_log_state.py (what is there, and what of it is committed), row_log_files.py (the
folder), row_log_streams.py (appending), row_log_compaction.py and row_log_recovery.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cupyrec import errors, interruption
from cupyrec.embedding.row_log_compaction import Compaction
from cupyrec.embedding.row_log_files import lock_folder
from cupyrec.embedding.row_log_recovery import recover
from cupyrec.embedding.row_log_state import LogState
from cupyrec.ops import log_records
from cupyrec.ops.log_records import SLOT_BITS
from cupyrec.ops.record_reads import READERS

__all__ = ["RowLog"]

_BLOCK = 1 << 16  # rows
_PIECE = 16 << 20  # bytes


class RowLog:
    """Payloads of rows 0 .. len - 1 in a folder of append-only files, as of the last commit.

    After a crash, of the process or of the machine, the folder is opened with just the rows and
    payloads of the last commit that was completed. What was written since is forgotten, by `close`
    too. A thread copies what is needed out of files that are mostly superseded, and removes them:
    files take at most 1.46 times the bytes of records that are needed, and those of four files
    more. Needed are the newest records and those of the last commit. Writes wait where they must;
    what a commit makes needless of a large table is removed while others write.

    Every record has a checksum, which is compared whenever it is read.

    One thread may write while others read. Ctrl-C waits for the end of a call: one that comes as a
    lock is taken would leave it taken.

    Parameters
    ----------
    folder : path
        Made if it doesn't exist.
    words : int
        uint32 a payload; a multiple of 4.
    direct : bool
        Whether reads go past the page cache, which then is left to others.
    salvage : bool
        Whether to open a damaged folder with what is whole. Numbers of lost rows are given to the
        last rows, and a row whose newest record is damaged may come back as it was earlier. A
        commit makes this last.

    Attributes
    ----------
    meta : dict
        What the last commit was given.
    lost : int
        Rows that were lost on opening.

    Raises
    ------
    ValueError
        `words` is not a multiple of 4, or not that of the folder; or files are damaged.
    BlockingIOError
        The folder is open already.
    OSError
        What the file system says.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RowLog(folder, words=4) as log:
    ...         log.write(np.arange(3), np.arange(12, dtype=np.uint32).reshape(3, 4))
    ...         log.commit({"step": 7})
    ...         log.write(np.array([1]), np.zeros((1, 4), np.uint32))
    ...     with RowLog(folder, words=4) as log:
    ...         out = np.empty((2, 4), np.uint32)
    ...         log.read(np.array([2, 1]), out)
    ...         len(log), log.meta, out
    (3, {'step': 7}, array([[ 8,  9, 10, 11],
           [ 4,  5,  6,  7]], dtype=uint32))
    """

    in_memory = False

    def __init__(
        self, folder: str | os.PathLike, words: int, direct: bool = False, salvage: bool = False
    ) -> None:
        words = errors.positive("RowLog", "words", words)
        if words % 4:
            raise ValueError(f"RowLog: 'words' must be a multiple of 4, got {words}.")
        self.folder, self.words = Path(folder), words
        with contextlib.ExitStack() as undo:
            lock = lock_folder(self.folder)
            undo.callback(os.close, lock)
            self._state = LogState(self.folder, words, direct)
            self.lost = recover(self._state, salvage)
            undo.pop_all()
        self._compaction = Compaction(self._state)
        self._pool = concurrent.futures.ThreadPoolExecutor(READERS, "cupyrec-read")
        self._writing = threading.Lock()
        self._close = weakref.finalize(self, _end, self._state, self._compaction, self._pool, lock)

    def __len__(self) -> int:
        return self._state.count

    meta = property(lambda self: self._state.committed.meta)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files, with what is still to be written to them."""
        with self._state.lock:
            return self._state.files.disk_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        with self._state.lock:
            return self._state.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes read from files since opening, compaction included."""
        return self._state.files.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written to files since opening, compaction included."""
        return self._state.files.written_bytes

    @interruption.held()
    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read payloads.

        Parameters
        ----------
        rows : (N,) array of int64
        out : (N, words) array of uint32
            C-contiguous; written to.

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes, or rows that are not there.
        OSError
            A record is damaged: with its file and offset.
        """
        self._check("read", rows, "out", out)
        self._state.read(self._pool, rows, out.view(np.uint64))

    @interruption.held()
    def write(self, rows: np.ndarray, payloads: np.ndarray) -> None:
        """Write new versions of rows, or new rows.

        Parameters
        ----------
        rows : (N,) array of int64
            Of new ones some may be left out, and must be written before they are read or committed.
        payloads : (N, words) array of uint32
            C-contiguous.

        Raises
        ------
        ValueError, TypeError
            Shapes or dtypes.
        OSError
            The disk is full, say. New rows are not there then, others may have either payload; once
            the cause is removed, the same call succeeds.
        """
        state = self._state
        self._check("write", rows, "payloads", payloads)
        with self._writing:
            self._compaction.go_on()
            before, payloads = len(self), payloads.view(np.uint64)
            count = max(before, int(rows.max(initial=-1)) + 1)
            try:
                if count > before:
                    state.grow(count)
                done = 0
                while done < rows.size:
                    done += state.write(rows[done : done + _BLOCK], payloads[done : done + _BLOCK])
                    self._compaction.keep_up()
            except BaseException:
                state.truncate(before)
                raise

    @interruption.held()
    def truncate(self, count: int) -> None:
        """Forget rows from number `count` on; ValueError if there are fewer."""
        self._check_open("truncate")
        errors.count("RowLog.truncate", "count", count)
        with self._writing:
            self._compaction.go_on()
            if count > len(self):
                raise ValueError(
                    f"RowLog.truncate: 'count' must be at most {len(self)}, got {count}."
                )
            self._state.truncate(count)
            self._compaction.keep_up()

    @interruption.held()
    def commit(self, meta: dict[str, Any]) -> None:
        """Make all rows durable, and `meta` with them: JSON values.

        Raises
        ------
        ValueError
            A row was never written.
        TypeError
            `meta` is something else.
        OSError
            The commit before holds still; once the cause is removed, the same call succeeds.
        """
        self._check_open("commit")
        meta = json.loads(json.dumps(meta))
        with self._writing:
            self._compaction.go_on()
            if missing := self._state.missing:
                raise ValueError(
                    f"RowLog.commit: all of {len(self)} rows must be written, got {missing} not."
                )
            self._state.commit(meta)
            self._compaction.settle()

    def versions(self, rows: np.ndarray) -> np.ndarray:
        """Return where rows' newest records lie, (N,) of uint64.

        A row that is written gets another number, and so may one that is not.
        """
        self._check("versions", rows)
        with self._state.lock:
            return self._state.find(rows).view(np.uint64)

    def records(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all rows in the order of the files, about 16 MB at a time.

        Yields
        ------
        rows : (N,) array of int64
        payloads : (N, words) array of uint32

        Raises
        ------
        RuntimeError
            Rows were written or truncated meanwhile.
        OSError
            A record is damaged.
        """
        self._check_open("records")
        state, files = self._state, self._state.files
        with contextlib.ExitStack() as undo:
            with interruption.held():
                self._compaction.pause()
                undo.callback(self._compaction.pause, -1)
            with state.lock:
                state.fresh.flush()
                state.moved.flush()
                begun = state.sequence, state.count
                held = [(file, file.reader) for file in files]
            slots = max(1, _PIECE // files.record_bytes)
            for file, reader in held:
                for first in range(0, file.length, slots):
                    source = files.read(reader, first, min(slots, file.length - first))
                    rows = np.empty(len(source), np.int64)
                    payloads = np.empty((len(source), self.words // 2), np.uint64)
                    address = file.number << SLOT_BITS | first
                    with state.lock:
                        if (state.sequence, state.count) != begun:
                            raise RuntimeError(
                                "RowLog.records: no row must be written meanwhile, got a write."
                            )
                        n = log_records.live_records(
                            state.places.chunks, state.count, source, address, rows, payloads
                        )
                    if n < 0:
                        raise files.damage(reader.path, (first - n - 1) * files.record_bytes)
                    if n:
                        yield rows[:n], payloads[:n].view(np.uint32)

    @interruption.held()
    def close(self) -> None:
        """Let the folder go; what was written since the last commit is forgotten."""
        self._close()

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, where: str) -> None:
        if not self._close.alive:
            raise ValueError(f"RowLog.{where}: '{self.folder}' must be open, got a closed log.")

    def _check(self, where: str, rows: np.ndarray, name: str = "", payloads: Any = None) -> None:
        self._check_open(where)
        where = f"RowLog.{where}"
        errors.dtype(where, "rows", rows, np.int64)
        errors.axes(where, rows=(rows, "N"))
        if payloads is not None:
            errors.dtype(where, name, payloads, np.uint32)
            errors.axes(where, rows=(rows, "N"), **{name: (payloads, f"N {self.words}")})
            if not payloads.flags.c_contiguous:
                raise ValueError(f"{where}: '{name}' must be C-contiguous, got strides.")
        if rows.size and rows.min() < 0:
            raise ValueError(f"{where}: 'rows' must be at least 0, got {rows.min()}.")


def _end(
    state: LogState, compaction: Compaction, pool: concurrent.futures.Executor, lock: int
) -> None:
    compaction.stop()
    pool.shutdown()
    with state.lock:
        state.close()
    os.close(lock)
