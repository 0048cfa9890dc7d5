"""Appending records to the files of a row log, through a buffer."""

from __future__ import annotations

import os

import numpy as np

from cupyrec.embedding.row_log_files import Files, LogFile
from cupyrec.ops.log_records import SLOT_BITS, copy_buffered, void
from cupyrec.ops.record_reads import PAGE

__all__ = ["Stream"]

_BUFFER = 4 << 20  # bytes


class Stream:
    """The file that records are appended to now, and the last of them, not yet written to it.

    A write that fails leaves all as it was, and is made again by the next call.

    Parameters
    ----------
    files : Files
    committed : bool
        Whether its records are copies of committed ones.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stream = Stream(Files(Path(folder), words=8, direct=False), committed=False)
    ...     records, address = stream.room()
    ...     void(records[:2])
    ...     stream.took(2)
    ...     stream.flush()
    ...     len(records), records.shape[1], address, stream.file.path.stat().st_size
    (21845, 6, 0, 96)
    """

    def __init__(self, files: Files, committed: bool) -> None:
        self._files, self._committed = files, committed
        words = files.record_bytes // 8
        self._buffer = np.empty((max(1, _BUFFER // files.record_bytes), words), np.uint64)
        self._used = 0
        self._ended = 0  # slots, as `end_page` left them
        self.file: LogFile | None = None

    nbytes = property(lambda self: self._buffer.nbytes)

    def go_on(self, file: LogFile) -> None:
        """Append to a file that is there."""
        file.open_writer()
        file.capacity = max(file.length, self._files.capacity)
        self.file, self._ended = file, file.length

    def room(self) -> tuple[np.ndarray, int]:
        """Return where records can be put, at least one, and the address of the first of them."""
        if self.file is not None and self.file.length >= self.file.capacity:
            self.flush()
            self.file.close_writer()
            self.file = None
        if self._used == len(self._buffer):
            self.flush()
        if self.file is None:
            self.file, self._ended = self._files.create(), 0
            if self._committed:
                self._files.commit_slots(self.file, self.file.capacity)
        file = self.file
        free = min(len(self._buffer) - self._used, file.capacity - file.length)
        address = file.number << SLOT_BITS | file.length
        return self._buffer[self._used : self._used + free], address

    def took(self, records: int) -> None:
        """So many were put there."""
        self._used += records
        if self.file is not None:
            self.file.length += records

    def copy_to(self, addresses: np.ndarray, payloads: np.ndarray) -> None:
        """Copy payloads (N, W) of uint64 that are in the buffer; their addresses become -1."""
        if self._used and self.file is not None:
            first = self.file.number << SLOT_BITS | self.file.written
            copy_buffered(addresses, self._buffer[: self._used], first, payloads)

    def flush(self) -> None:
        """Write what is in the buffer."""
        if not self._used or self.file is None:
            return
        file, size = self.file, self._files.record_bytes
        memory = self._buffer[: self._used].reshape(-1).view(np.uint8)
        done, start = 0, file.written * size
        while done < memory.size:
            try:
                done += os.pwrite(file.writer, memory[done:], start + done)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"RowLog: '{file.path}' must take {memory.size - done} bytes more, got "
                    f"{error.strerror}",
                ) from error
        self._files.written_bytes += memory.size
        file.written += self._used
        self._used = 0

    def end_page(self) -> None:
        """Begin a page with the next record: what a commit holds is never written to again.

        A page that the power fails on as it is written may lose what it had before.
        """
        file, size = self.file, self._files.record_bytes
        if file is None or file.length == self._ended:
            return
        page_end = -(-file.length * size // PAGE) * PAGE
        target = min(-(-page_end // size), file.capacity)
        while file.length < target:
            records, _ = self.room()
            records = records[: target - file.length]
            void(records)
            self.took(len(records))
        self._ended = file.length
