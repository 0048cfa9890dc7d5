"""The folder of a row log: its manifest, its lock and its files of records.

manifest.json   format, words, rows, sequence, meta, how many records of which files; crc32 of these
NUMBER.rows     records one after another: see `cupyrec.ops.log_records`
LOCK            locked by the process that has the folder open

What the manifest doesn't tell of was written since the last commit, and is removed on opening.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import resource
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyrec import errors
from cupyrec.ops import log_records
from cupyrec.ops.log_records import FILES, HEADER, SLOT_BITS
from cupyrec.ops.record_reads import PAGE, aligned

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Commit",
    "Files",
    "LogFile",
    "lock_folder",
    "read_manifest",
    "saved_words",
]

logger = logging.getLogger("cupyrec")
MANIFEST, FORMAT = "manifest.json", 1
_LEAST, _MOST = 1 << 20, 1 << 30  # bytes of a file
_PIECE = 4 << 20  # bytes
PARTS = 128  # files of a large table, about


class Commit(NamedTuple):
    """What a commit holds, its records apart.

    Attributes
    ----------
    count : int
        Rows.
    sequence : int
        The largest sequence number of its records.
    meta : dict
        The caller's values.

    Examples
    --------
    >>> Commit(0, 0, {}).count
    0
    """

    count: int
    sequence: int
    meta: dict[str, Any]


class _Reader:
    """An open file that closes with the last reference to it, so that reads under way go on."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path, self.descriptor = path, -1
        self.descriptor = os.open(path, os.O_RDONLY | flags)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class LogFile:
    """A file of records.

    Attributes
    ----------
    number, serial : int
        What addresses call it, which another may be called later on; what its name is made of.
    length, written, synced : int
        Slots that are taken, that are in the file, and that surely are on the disk.
    capacity : int
        Slots it may have.
    damaged : bool
        Compaction found a damaged record in it, and leaves it alone.
    doubtful : bool
        What is not synced may have been given up by the system.

    Examples
    --------
    See `Files`.
    """

    def __init__(self, path: Path, number: int, capacity: int, flags: int) -> None:
        self.path, self.number, self.capacity = path, number, capacity
        self.serial = int(path.stem)
        self.length = self.written = self.synced = 0
        self.damaged = self.doubtful = False
        self.bits = np.empty(0, np.uint64)
        self.writer = -1
        self.reader: _Reader | None = _Reader(path, flags)

    def open_writer(self) -> None:
        """Make the file ready for `os.pwrite`."""
        self.writer = os.open(self.path, os.O_WRONLY)

    def close_writer(self) -> None:
        """Nothing more will be written."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Let it go; whoever has the reader may still read."""
        self.close_writer()
        self.reader = None

    __del__ = close_writer


class Files:
    """All files of records, and of each what `cupyrec.ops.log_records.Places` tells.

    Parameters
    ----------
    folder : Path
    words : int
        uint32 a payload.
    direct : bool
        Whether reads go past the page cache.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = Files(Path(folder), words=8, direct=False)
    ...     file = files.create()
    ...     file.path.name, file.capacity, files.disk_bytes, len(list(files))
    ('000000000001.rows', 21845, 0, 1)
    """

    def __init__(self, folder: Path, words: int, direct: bool) -> None:
        self.folder, self.words = folder, words
        self.record_bytes = 8 * HEADER + 4 * words
        self.flags = _direct_flags(folder) if direct else 0
        self.live, self.held, self.committed = (np.zeros(FILES, np.int64) for _ in range(3))
        self.bits = np.zeros(FILES, np.uint64)
        self.descriptors = np.full(FILES, -1, np.int32)
        self.read_bytes = self.written_bytes = 0
        self._files: dict[int, LogFile] = {}
        self._serial, self._number = 0, -1  # of the last file
        self._entries_changed = False

    def __iter__(self) -> Iterator[LogFile]:
        return iter(sorted(self._files.values(), key=lambda file: file.serial))

    def __getitem__(self, number: int) -> LogFile:
        return self._files[number]

    @property
    def needed_bytes(self) -> int:
        """Bytes of records that are some row's newest, or part of the last commit."""
        return int(self.live.sum() + self.held.sum()) * self.record_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files, with what is still to be written to them."""
        return sum(file.length for file in self._files.values()) * self.record_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        fixed = (self.live, self.held, self.committed, self.bits, self.descriptors)
        return sum(a.nbytes for a in fixed) + sum(f.bits.nbytes for f in self._files.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of a file that is begun now: small tables have small ones."""
        return min(max(self.needed_bytes // PARTS, _LEAST), _MOST)

    @property
    def capacity(self) -> int:
        """Slots of such a file."""
        return min(max(1, self.file_bytes // self.record_bytes), 1 << SLOT_BITS)

    def readers(self) -> tuple[np.ndarray, dict[int, _Reader]]:
        """Return descriptors by file number, which stay open as long as one has the readers."""
        return self.descriptors, {number: file.reader for number, file in self._files.items()}

    def create(self) -> LogFile:
        """Begin a file."""
        path = self.folder / f"{self._serial + 1:012d}.rows"
        with errors.naming(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        file = self.add(path)
        file.open_writer()
        self._entries_changed = True
        return file

    def add(self, path: Path) -> LogFile:
        """Take up a file that is there, as one without records."""
        number = (self._number + 1) % FILES  # not that of a file just removed: see `versions`
        while number in self._files:
            number = (number + 1) % FILES
        file = LogFile(path, number, self.capacity, self.flags)
        _let_more_be_open(file.reader.descriptor)
        self._number = number
        self._serial = max(self._serial, file.serial)
        self._files[number] = file
        self.live[number] = self.held[number] = self.committed[number] = self.bits[number] = 0
        self.descriptors = self.descriptors.copy()  # reads under way have the old ones
        self.descriptors[number] = file.reader.descriptor
        return file

    def remove(self, file: LogFile) -> None:
        """Remove a file that the manifest doesn't tell of; reads under way go on."""
        with errors.naming(file.path):
            file.path.unlink(missing_ok=True)
        del self._files[file.number]
        self.live[file.number] = self.held[file.number] = 0
        file.close()

    def close(self) -> None:
        """Let all files go."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def commit_slots(self, file: LogFile, slots: int) -> None:
        """From now on the records in so many slots are committed, and none of them is held."""
        number = file.number
        if self.held[number] or slots > 64 * file.bits.size:
            file.bits = np.zeros(-(-slots // 64), np.uint64)
        self.bits[number] = file.bits.ctypes.data
        self.committed[number], self.held[number] = slots, 0

    def read(self, reader: _Reader, first: int, slots: int) -> np.ndarray:
        """Read records (slots, 2 + W) of a file as uint64, from slot `first` on."""
        size = self.record_bytes
        start = first * size // PAGE * PAGE
        stop = -(-(first + slots) * size // PAGE) * PAGE
        memory, done = aligned(stop - start), 0
        least = (first + slots) * size - start
        with errors.naming(reader.path):
            while True:  # from a page on, as `read_records`
                n = os.preadv(reader.descriptor, [memory[done:]], start + done)
                if done + n >= least or n < PAGE:
                    break
                done += n // PAGE * PAGE
        done += n
        self.read_bytes += done
        if done < least:
            raise self.damage(reader.path, (start + done) // size * size)
        records = memory[first * size - start :][: slots * size]
        return records.view(np.uint64).reshape(slots, size // 8)

    def damage(self, path: Path, offset: int, number: int = 0) -> OSError:
        """Return the error that says so; `number` is what the system says, if it does."""
        got = os.strerror(number) if number else "something else"
        rule = f"must have at offset {offset} the record that was written there"
        return OSError(number or errno.EIO, f"RowLog: '{path}' {rule}, got {got}")

    def sync(self, committed_only: bool) -> None:
        """Wait until what was written is on the disk; of what isn't committed only if asked."""
        for file in self:
            slots = file.written
            if committed_only:
                slots = min(slots, int(self.committed[file.number]))
            if slots > file.synced:
                with errors.naming(file.path):
                    self._sync(file)
                file.synced = slots
        if self._entries_changed:
            sync(self.folder)
            self._entries_changed = False

    def _sync(self, file: LogFile) -> None:
        """Wait for the disk; where that failed before, write again what was not there for sure.

        The system counts as written what it once failed to write.
        """
        if file.doubtful:
            size, descriptor = self.record_bytes, os.open(file.path, os.O_RDWR)
            try:
                for first in range(file.synced, file.written, slots := max(1, _PIECE // size)):
                    records = np.empty((min(slots, file.written - first), size // 8), np.uint64)
                    os.preadv(descriptor, [records], first * size)
                    if (bad := log_records.first_damaged(records)) < len(records):
                        raise self.damage(file.path, (first + bad) * size)
                    if (got := os.pwrite(descriptor, records, first * size)) < records.nbytes:
                        raise OSError(
                            errno.ENOSPC,
                            f"RowLog: '{file.path}' must take {records.nbytes} bytes, got {got}",
                        )
            finally:
                os.close(descriptor)
        file.doubtful = True
        os.fdatasync(file.reader.descriptor)
        file.doubtful = False
        if self.flags:
            os.posix_fadvise(file.reader.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def write_manifest(self, commit: Commit, files: Iterable[tuple[LogFile, int]]) -> None:
        """Let a commit with so many records of each file be what the folder holds."""
        values = {
            "format": FORMAT, "words": self.words, **commit._asdict(),
            "files": [[file.serial, slots] for file, slots in files if slots],
        }  # fmt: skip
        text = json.dumps(values)
        text = f'{{"crc32": {zlib.crc32(text.encode())}, "log": {text}}}\n'
        path, new = self.folder / MANIFEST, self.folder / f"{MANIFEST}.new"
        with errors.naming(path):
            with open(new, "w") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            new.replace(path)
            sync(self.folder)


def _let_more_be_open(descriptor: int) -> None:
    """Let the process open as many files as it may, once the last one tells that it opens many.

    A table has a few hundred, and where nobody has asked for more a process gets 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptor > soft // 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def sync(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk.

    Examples
    --------
    >>> sync(Path("."))
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with errors.naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """Make a folder, and keep others out of it until the descriptor that this returns is closed.

    Raises
    ------
    BlockingIOError
        It is open already, here or in another process.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.close(lock_folder(Path(folder, "log")))
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"RowLog: '{folder}' must be open once, got another log at work there",
        ) from None
    return descriptor


def _direct_flags(folder: Path) -> int:
    """O_DIRECT if the file system takes it, else 0."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / "LOCK", os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [aligned(PAGE)], 0)
            return os.O_DIRECT
        finally:
            os.close(descriptor)
    logger.warning(
        "RowLog: the file system of '%s' refuses O_DIRECT: reads go through the page cache", folder
    )
    return 0


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what the manifest of a folder tells; None if there is none, or it is damaged.

    Examples
    --------
    >>> read_manifest(Path("nowhere")) is None
    True
    """
    try:
        values = json.loads((folder / MANIFEST).read_text("utf-8"))
        crc = zlib.crc32(json.dumps(values["log"]).encode())
        return values["log"] if crc == values["crc32"] else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def saved_words(folder: Path) -> int | None:
    """Return the words of the payloads of a folder's last commit, None if none had any `meta`.

    Raises
    ------
    ValueError
        The manifest is damaged, or missing beside records.

    Examples
    --------
    >>> saved_words(Path("nowhere")) is None
    True
    """
    log = read_manifest(folder)
    if log is None and any([*folder.glob(MANIFEST), *folder.glob("*.rows")]):
        raise ValueError(f"RowLog: '{folder / MANIFEST}' must be whole, got none or a damaged one.")
    return log["words"] if log and log["meta"] else None
