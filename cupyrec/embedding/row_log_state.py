"""What a row log holds, as its callers and its compaction change it."""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec import arrays, interruption
from cupyrec.embedding.row_log_files import Commit, Files, LogFile
from cupyrec.embedding.row_log_streams import Stream
from cupyrec.ops import log_records
from cupyrec.ops.log_records import CHUNK, CHUNK_BITS, SLOT_BITS, Places
from cupyrec.ops.record_reads import read_records

__all__ = ["LogState"]

_BLOCK = 1 << 16  # rows


class LogState:
    """Rows, where they lie, and what is committed.

    Records that are committed stay needed until the next commit: those that are superseded are
    *held*. Copies that compaction makes keep their sequence numbers. Those of committed records go
    to a stream of their own, so that the slots of any file that are committed are its first ones.

    `lock` guards everything here, for a moment; whoever has it may not wait. `change` excludes a
    commit and steps of the compaction from each other, and is taken before `lock`.

    Parameters
    ----------
    folder : Path
    words : int
    direct : bool

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = LogState(Path(folder), words=8, direct=False)
    ...     state.grow(2)
    ...     _ = state.write(np.arange(2), np.ones((2, 4), np.uint64))
    ...     state.commit({})
    ...     state.count, state.committed.sequence
    (2, 2)
    """

    def __init__(self, folder: Path, words: int, direct: bool) -> None:
        self.lock, self.change = threading.Lock(), threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.files = files = Files(folder, words, direct)
        self.fresh, self.moved = Stream(files, committed=False), Stream(files, committed=True)
        self.committed, self.count, self.sequence = Commit(0, 0, {}), 0, 0
        self._chunks: list[np.ndarray] = []
        none = np.empty(0, np.uint64)
        self.places = Places(none, files.live, files.held, files.committed, files.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        chunks = sum(chunk.nbytes for chunk in self._chunks)
        return chunks + self.files.nbytes + self.fresh.nbytes + self.moved.nbytes

    @property
    def missing(self) -> int:
        """Rows without a record."""
        return self.count - int(self.files.live.sum())

    def close(self) -> None:
        """Let files go; reads under way keep theirs."""
        self.fresh.file = self.moved.file = None
        self.files.close()

    def resize(self, count: int) -> None:
        """Have chunks of addresses for so many rows."""
        chunks = -(-count // (1 << CHUNK_BITS))
        if chunks != len(self._chunks):
            del self._chunks[chunks:]
            while len(self._chunks) < chunks:
                self._chunks.append(arrays.pages(CHUNK, np.uint8))
            addresses = np.array([chunk.ctypes.data for chunk in self._chunks], np.uint64)
            self.places = self.places._replace(chunks=addresses)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Return addresses of rows; `lock` is the caller's, since rows may go at any time else."""
        if rows.size and rows.max() >= self.count:
            raise ValueError(f"RowLog: 'rows' must be less than {self.count}, got {rows.max()}.")
        addresses = np.empty(rows.size, np.int64)
        log_records.find(self.places.chunks, rows, addresses)
        return addresses

    @interruption.held()
    def grow(self, count: int) -> None:
        """Have more rows, which are nowhere yet."""
        with self.lock:
            self.resize(count)
            log_records.reserve(self.places.chunks, self.count, count)
            self.count = count

    @interruption.held()
    def write(self, rows: np.ndarray, payloads: np.ndarray) -> int:
        """Append new versions of some of the first rows; return of how many."""
        with self.lock:
            records, address = self.fresh.room()
            n = min(len(records), rows.size)
            log_records.append(
                self.places, rows[:n], payloads[:n], records, address, self.sequence + 1
            )
            self.fresh.took(n)
            self.sequence += n
        return n

    def read(self, pool: Executor, rows: np.ndarray, payloads: np.ndarray) -> None:
        """Read payloads (N, W) of uint64; `pool` lends the threads."""
        with self.lock:
            addresses = self.find(rows)
            if (addresses == log_records.NOWHERE).any():
                row = rows[addresses == log_records.NOWHERE][0]
                raise ValueError(f"RowLog.read: rows must be written first, got row {row}.")
            for stream in (self.fresh, self.moved):
                stream.copy_to(addresses, payloads)
            descriptors, readers = self.files.readers()
        nbytes, failure = read_records(pool, descriptors, addresses, rows, payloads)
        self.files.read_bytes += nbytes
        if failure is not None:
            number, slot = divmod(failure.address, 1 << SLOT_BITS)
            offset = slot * self.files.record_bytes
            raise self.files.damage(readers[number].path, offset, failure.errno)

    @interruption.held()
    def truncate(self, count: int) -> None:
        """Forget the last rows."""
        while self.count > count:
            first = max(count, self.count - _BLOCK)
            with self.lock:
                log_records.leave(self.places, np.arange(first, self.count))
                self.count = first
                self.resize(first)

    @interruption.held()
    def commit(self, meta: dict[str, Any]) -> None:
        """Make what there is durable."""
        with self.change:
            with self.lock:
                for stream in (self.fresh, self.moved):
                    stream.end_page()
                    stream.flush()
                commit = Commit(self.count, self.sequence, meta)
                unneeded = self.unneeded(held=False)
                needed = [file for file in self.files if file not in unneeded]
            self.files.sync(committed_only=False)
            self.files.write_manifest(commit, [(file, file.length) for file in needed])
            with self.lock:
                self.committed = commit
                for file in needed:
                    slots = file.capacity if file is self.moved.file else file.length
                    self.files.commit_slots(file, slots)
                for file in unneeded:
                    self.files.remove(file)
                self.changed.notify_all()

    def unneeded(self, held: bool) -> list[LogFile]:
        """Files that go on no more, have no row's newest record, and no held one if that counts."""
        files, going_on = self.files, {self.fresh.file, self.moved.file}
        needed = files.live + files.held if held else files.live
        return [file for file in files if not needed[file.number] and file not in going_on]

    def drop_unneeded(self) -> None:
        """Remove files of which nothing is needed any more; whoever calls has `change`."""
        files = self.files
        with self.lock:
            self.moved.end_page()
            self.moved.flush()
            unneeded = self.unneeded(held=True)
        files.sync(committed_only=True)
        kept = [file for file in files if file not in unneeded]
        slots = [min(file.synced, int(files.committed[file.number])) for file in kept]
        files.write_manifest(self.committed, zip(kept, slots, strict=True))
        with self.lock:
            for file in unneeded:
                files.remove(file)
            self.changed.notify_all()

    def exceeds(self, share: float, files_more: int, freed: int = 0) -> bool:
        """Whether files, but for so many bytes, take more than a share of needed ones and files."""
        files = self.files
        bound = share * files.needed_bytes + files_more * files.file_bytes
        return files.disk_bytes - freed > bound
