"""What the machine it runs on gives, as `Hardware` of a CPU: ten seconds of short measurements.

Others at work on the machine slow it down, and what is planned by these numbers with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cupyrec import arrays, control_groups, cpu
from cupyrec.embedding.row_layout import lines_as_memory
from cupyrec.embedding.row_log import RowLog
from cupyrec.hardware import Hardware, Host, Ssd
from cupyrec.ops.embedding_rows import gather_rows

__all__ = ["measure_hardware"]

_BATCH = 4096  # rows of the matrix that is multiplied
_BLOCK = 1 << 20  # bytes copied at a time


def measure_hardware(
    folder: str | os.PathLike | None = None, *, nbytes: int = 512 << 20
) -> Hardware:
    """Return what this machine gives: memory, matmuls, and the SSD of a folder.

    Parameters
    ----------
    folder : path, optional
        Where files of tables would lie; without it there is no ``[ssd]``.
    nbytes : int
        Of memory and of a file to measure with. What fits into a cache is too fast.

    Raises
    ------
    OSError
        There is no such folder, which is seen before anything is measured, or no room in it.

    Notes
    -----
    memory_bandwidth    bytes read and written by a copy, on all threads
    random_lines        rows of 64 bytes gathered from random places
    float32             the matmul of 4,096 rows with a matrix of 1,024 x 1,024
    random_reads        records of 256 bytes by `RowLog`, past the page cache where that can be
    write_bandwidth     what `RowLog` writes, until it lasts

    Examples
    --------
    >>> measure_hardware(nbytes=1 << 20).host.cores >= 1
    True
    """
    if folder is not None and not Path(folder).is_dir():
        found = "a file" if Path(folder).exists() else "nothing"
        raise NotADirectoryError(
            f"measure_hardware: '{folder}' must be a folder, found {found} there."
        )
    host = Host(
        memory=_memory(), memory_bandwidth=_bandwidth(nbytes), random_lines=_lines(nbytes),
        cores=cpu.num_threads(), float32=_flops(min(_BATCH, nbytes >> 12)),
    )  # fmt: skip
    return Hardware(host, ssd=None if folder is None else _ssd(Path(folder), nbytes))


def _fastest(work: Callable[[], object], times: int = 5) -> float:
    """Seconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _memory() -> float:
    """Bytes that this process may have: of the machine, or of its control group if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(min(machine, control_groups.memory()))


def _bandwidth(nbytes: int) -> float:
    source, target = (arrays.pages(nbytes, np.uint8) for _ in range(2))
    source[:], target[:] = 1, 1

    def block(i: int, j: int) -> None:
        target[i:j] = source[i:j]

    return 2 * nbytes / _fastest(lambda: cpu.parallel(block, nbytes, _BLOCK))


def _lines(nbytes: int) -> float:
    lines = arrays.pages((nbytes // 64, 16), np.float32)
    lines[:] = 1
    rows = np.random.default_rng(0).integers(0, len(lines), min(len(lines), 1 << 20))
    order, unseen = np.arange(rows.size), np.empty((0, 16), np.float32)
    out, memory = np.empty((rows.size, 16), np.float32), lines_as_memory(lines)
    return rows.size / _fastest(lambda: gather_rows(memory, rows, order, unseen, out))


def _flops(batch: int) -> float:
    x, w = np.ones((batch, 1024), np.float32), np.ones((1024, 1024), np.float32)
    out = np.empty((batch, 1024), np.float32)
    return 2 * batch * 1024 * 1024 / _fastest(lambda: np.matmul(x, w, out=out))


def _ssd(folder: Path, nbytes: int) -> Ssd:
    words, block = 60, 1 << 16
    count = max(block, nbytes // 256)
    payloads = np.ones((block, words), np.uint32)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cupyrec-measure-") as temporary:
        with RowLog(temporary, words, direct=True) as log:
            start = time.perf_counter()
            for first in range(0, count, block):
                log.write(np.arange(first, min(first + block, count)), payloads[: count - first])
            log.commit({})
            write = log.written_bytes / (time.perf_counter() - start)
            rows = np.random.default_rng(0).integers(0, count, 1 << 15)
            out = np.empty((rows.size, words), np.uint32)
            read = rows.size / _fastest(lambda: log.read(rows, out), times=3)
    return Ssd(bytes=float(shutil.disk_usage(folder).free), random_reads=read,
               write_bandwidth=write)  # fmt: skip
