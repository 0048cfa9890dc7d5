"""Opening a row log as of its last commit, and what can be saved of a damaged one."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.embedding.row_log_files import FORMAT, MANIFEST, Commit, Files, LogFile, read_manifest
from cupyrec.embedding.row_log_state import LogState
from cupyrec.ops import log_records
from cupyrec.ops.log_records import SLOT_BITS
from cupyrec.ops.record_reads import PAGE

__all__ = ["recover"]

logger = logging.getLogger("cupyrec")
_PIECE = 16 << 20  # bytes
_BLOCK = 1 << 16  # rows
_MANY = 1 << 56  # more than there are sequence numbers


def recover(state: LogState, salvage: bool) -> int:
    """Let a new state be what its folder holds; return how many rows are lost.

    It takes 8 bytes a row more while it works.

    Parameters
    ----------
    state : LogState
    salvage : bool
        Whether damaged records are passed over. The numbers of lost rows are then given to the last
        rows. A row whose newest record is damaged may come back as it was earlier.

    Raises
    ------
    ValueError
        Files are damaged, and `salvage` is not given; or the folder is of other words or another
        format.

    Examples
    --------
    See `cupyrec.embedding.row_log.RowLog`.
    """
    files, folder = state.files, state.files.folder
    found = {int(p.stem): p for p in folder.iterdir() if re.fullmatch(r"\d{12}\.rows", p.name)}
    if not found and not (folder / MANIFEST).exists():
        files.write_manifest(state.committed, [])
        return 0
    manifest = read_manifest(folder) or _guess(files, found, salvage)
    for name, must, got in [("format", FORMAT, manifest["format"]),
                            ("words", files.words, manifest["words"])]:  # fmt: skip
        if must != got:
            raise ValueError(f"RowLog: '{name}' must be {got} as in '{folder}', got {must}.")
    scanned = _Scan(state, manifest, salvage)
    for serial, slots in manifest["files"]:
        scanned.take(found.pop(serial, folder / f"{serial:012d}.rows"), slots)
    lost = scanned.finish()
    last = None
    for last in files:
        os.truncate(last.path, last.length * files.record_bytes)
        files.commit_slots(last, last.length)
    if last is not None and last not in scanned.damaged:
        state.fresh.go_on(last)
    for path in found.values():  # written since
        path.unlink()
    if lost.size or scanned.damaged:
        _save(state, scanned.damaged, lost)
        logger.warning(
            "RowLog: %d rows of '%s' are lost, %d are there", lost.size, folder, state.count
        )
    return lost.size


def _guess(files: Files, found: dict[int, Path], salvage: bool) -> dict[str, Any]:
    """What a manifest might tell of these files."""
    path = files.folder / MANIFEST
    if not salvage:
        raise ValueError(
            f"RowLog: '{path}' must be whole, got none or a damaged one; salvage=True takes all "
            "records that there are."
        )
    slots = {s: path.stat().st_size // files.record_bytes for s, path in sorted(found.items())}
    values = {"format": FORMAT, "words": files.words, "files": list(slots.items()), "meta": {}}
    return values | {"count": sum(slots.values()), "sequence": None}


class _Scan:
    """Goes over all records."""

    def __init__(self, state: LogState, manifest: dict[str, Any], salvage: bool) -> None:
        self.state, self.manifest, self.salvage = state, manifest, salvage
        self.damaged: list[LogFile] = []
        self.newest, count = 0, manifest["count"]
        self.sequences = arrays.pages(count, np.uint64)
        state.resize(count)
        log_records.reserve(state.places.chunks, 0, count)

    def take(self, path: Path, slots: int) -> None:
        """Scan a file that must have so many records."""
        files, size = self.state.files, self.state.files.record_bytes
        got = path.stat().st_size if path.exists() else None
        if got is None or got < slots * size:
            what = "no such file" if got is None else f"{got}"
            self.complain(f"RowLog: '{path}' must have {slots * size} bytes, got {what}")
        if got is None:
            return
        file = files.add(path)
        file.length = file.written = file.synced = min(slots, got // size)
        if not self.read(file) or file.length < slots:
            self.damaged.append(file)

    def complain(self, sentence: str) -> None:
        if not self.salvage:
            raise ValueError(f"{sentence}: it is damaged; salvage=True loads what is whole.")
        logger.warning("%s", sentence)

    def read(self, file: LogFile) -> bool:
        """Learn where a file's records are; return whether all are whole."""
        state, whole = self.state, True
        latest = self.manifest["sequence"] or _MANY
        for first, records in _pieces(state.files, file, self.salvage):
            done, whole = 0, whole and records is not None
            while records is not None and done < len(records):
                address = file.number << SLOT_BITS | first + done
                n, newest = log_records.scan(
                    state.places, self.sequences, records[done:], address, latest
                )
                done, self.newest = done + n, max(self.newest, newest)
                if done < len(records):
                    offset = (first + done) * state.files.record_bytes
                    if whole or not self.salvage:  # say it once
                        self.complain(str(state.files.damage(file.path, offset).strerror))
                    whole, done = False, done + 1
        return whole

    def finish(self) -> np.ndarray:
        """Let the state have what was found; return numbers of rows that were not."""
        state, count = self.state, self.manifest["count"]
        if self.manifest["sequence"] is None:  # nothing says how many rows there were
            seen = np.flatnonzero(self.sequences)
            count = int(seen[-1]) + 1 if seen.size else 0
            state.resize(count)
        lost = np.empty(0, np.int64)
        if int(state.files.live.sum()) < count:
            lost = np.flatnonzero(self.sequences[:count] == 0)
            self.complain(
                f"RowLog: '{state.files.folder}' must have a record of each row, got none of "
                f"{lost.size}, row {lost[0]} first"
            )
        state.count, state.sequence = count, self.manifest["sequence"] or self.newest
        state.committed = Commit(count, state.sequence, self.manifest["meta"])
        return lost


def _pieces(files: Files, file: LogFile, skip: bool) -> Iterator[tuple[int, np.ndarray | None]]:
    """Slots and records of a file, some megabytes at a time.

    Where they can't be read, in ever smaller pieces, None: about a page at last.
    """
    most, least = (max(1, size // files.record_bytes) for size in (_PIECE, PAGE))
    first, slots = 0, most
    while first < file.length:
        n = min(slots, file.length - first)
        try:
            records = files.read(file.reader, first, n)
        except OSError as error:
            if not skip:
                raise
            if n > least:
                slots = n // 2
                continue
            logger.warning("RowLog: '%s' can't be read: %s", file.path, error.strerror)
            records = None
        yield first, records
        first, slots = first + n, min(2 * slots, most)


def _save(state: LogState, damaged: list[LogFile], lost: np.ndarray) -> None:
    """Write again what damaged files have, and give the numbers of lost rows to the last rows."""
    files, words = state.files, state.files.words // 2
    for file in damaged:
        for first, records in _pieces(files, file, skip=True):
            if records is None:
                continue
            rows, payloads = np.empty(len(records), np.int64), np.empty((len(records), words), "u8")
            address = file.number << SLOT_BITS | first
            n = log_records.live_records(
                state.places.chunks, state.count, records, address, rows, payloads
            )
            if n < 0:
                raise files.damage(file.path, (first - n - 1) * files.record_bytes)
            _write(state, rows[:n], payloads[:n])
    kept = state.count - lost.size
    holes, last = lost[lost < kept], np.setdiff1d(np.arange(kept, state.count), lost)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for at in range(0, holes.size, _BLOCK):
            payloads = np.empty((holes[at : at + _BLOCK].size, words), np.uint64)
            state.read(pool, last[at : at + _BLOCK], payloads)
            _write(state, holes[at : at + _BLOCK], payloads)
    state.truncate(kept)


def _write(state: LogState, rows: np.ndarray, payloads: np.ndarray) -> None:
    done = 0
    while done < rows.size:
        done += state.write(rows[done:], payloads[done:])
