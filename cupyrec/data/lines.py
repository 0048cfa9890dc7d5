"""Text files as whole lines: a block of them at a time, or as many as a batch has.

Lines are told apart by their newlines alone, which is many times faster than reading what they say:
a rank that reads the lines of its own rows passes over all others so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

__all__ = ["Lines", "batched", "read_lines"]

_BLOCK = 1 << 20  # bytes asked of a file at a time
_LONGEST_LINE = 1 << 26  # a file without newlines is not read into memory as a whole
_NEWLINE = ord("\n")
_BYTE_ORDER_MARK = np.frombuffer(b"\xef\xbb\xbf", np.uint8)  # of UTF-8
_OTHERS = {  # what is no text, by how it begins
    b"PAR1\x15": "a Parquet file",  # its first page's header included
    b"\x1f\x8b\x08": "gzip, whose name must end in .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard, whose name must end in .zst",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """Some lines of a file, one after the other.

    Attributes
    ----------
    path : path
    header : bytes
        The first line of the file, without its newline.
    number : int
        That of the first of these lines, from 1.
    block : array of uint8
        They are in it.
    borders : (L + 1,) array of int64
        Where in the block each begins, and where the last one ends, behind its newline.

    Examples
    --------
    See `read_lines`.
    """

    path: Path
    header: bytes
    number: int
    block: np.ndarray
    borders: np.ndarray

    def __len__(self) -> int:
        return len(self.borders) - 1

    @property
    def text(self) -> np.ndarray:
        """Their bytes, each with a newline at its end."""
        return self.block[self.borders[0] : self.borders[-1]]

    def part(self, start: int, stop: int | None = None) -> Lines:
        """Return some of the lines, as a view: from `start` on and before `stop`, if it is told.

        Examples
        --------
        See `read_lines`.
        """
        stop = len(self) if stop is None else min(stop, len(self))
        start = min(start, stop)
        borders = self.borders[start : stop + 1]
        return dataclasses.replace(self, number=self.number + start, borders=borders)

    def copy(self) -> Lines:
        """Return the same lines in a block of their own.

        Examples
        --------
        See `batched`.
        """
        borders = self.borders - self.borders[0]
        return dataclasses.replace(self, block=self.text.copy(), borders=borders)


def read_lines(path: Path) -> Iterator[Lines]:
    """Yield a file's lines, those of a block at a time; each ends with a newline alone.

    A UTF-8 byte order mark before the first one is passed over. What is in a block is good until
    the next one is asked for.

    Raises
    ------
    ValueError
        The file is empty, Parquet, or compressed though its name doesn't say so, a line longer than
        64 MB, or a compressed file damaged.
    OSError
        It can't be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.tsv")
    ...     _ = path.write_bytes(b"a\\tb\\r\\nc\\nd\\n")
    ...     [(lines, last)] = [(lines, lines.part(1)) for lines in read_lines(path)]
    >>> lines.header, len(lines), lines.text.tobytes()
    (b'a\\tb', 3, b'a\\tb\\nc\\nd\\n')
    >>> last.number, len(last), last.text.tobytes()
    (2, 2, b'c\\nd\\n')
    """
    buffer, filled, header, number = bytearray(_BLOCK), 0, None, 1
    with pa.input_stream(path, compression="detect") as stream:
        while True:
            got = _read(stream, memoryview(buffer)[filled:], path)
            filled += got
            for beginning, told in _OTHERS.items() if header is None else ():
                if buffer.startswith(beginning):
                    raise ValueError(f"{path}: must be text, one row a line, got {told}.")
            if not got and filled:  # the last line has no newline: there is room for one
                buffer[filled] = _NEWLINE
                filled += 1
            if size := buffer.rfind(b"\n", 0, filled) + 1:
                block = _without_returns(buffer, size)
                if header is None and np.array_equal(block[:3], _BYTE_ORDER_MARK):
                    block = block[3:]
                ends = np.flatnonzero(block == _NEWLINE) + 1
                if header is None:
                    header = block[: ends[0] - 1].tobytes()
                yield Lines(path, header, number, block, np.concatenate([[0], ends]))
                number += len(ends)
                buffer[: filled - size] = buffer[size:filled]
                filled -= size
            elif filled > _LONGEST_LINE:
                raise ValueError(
                    f"{path}, line {number}: a line must have at most {_LONGEST_LINE} bytes, "
                    f"got more."
                )
            if not got:
                break
            if filled == len(buffer):
                buffer = buffer + bytes(filled)  # not +=: who reads still holds the old one
    if header is None:
        raise ValueError(f"{path}: must have at least one row, got an empty file.")


def batched(blocks: Iterable[Lines], size: int, *, skip: int = 0) -> Iterator[list[Lines]]:
    """Yield `size` lines at a time, of one block or several; the last may be fewer.

    Parameters
    ----------
    blocks : iterable of Lines
    size : int
    skip : int
        How many times `size` lines are passed over first.

    Yields
    ------
    list of Lines
        Copies.

    Examples
    --------
    >>> text = np.frombuffer(b"a\\nb\\nc\\n", np.uint8)
    >>> block = Lines(Path("a"), b"a", 1, text, np.array([0, 2, 4, 6]))
    >>> for batch in batched([block, block], 2, skip=1):
    ...     print([lines.text.tobytes() for lines in batch])
    [b'c\\n', b'a\\n']
    [b'b\\nc\\n']
    """
    passed, batch, missing = skip * size, [], size
    for lines in blocks:
        at = min(passed, len(lines))
        passed -= at
        while at < len(lines):
            some = lines.part(at, at + missing)
            batch.append(some.copy())
            at, missing = at + len(some), missing - len(some)
            if missing == 0:
                yield batch
                batch, missing = [], size
    if batch:
        yield batch


def _without_returns(buffer: bytearray, size: int) -> np.ndarray:
    """The first bytes of a buffer, where each ``\\r\\n`` becomes a ``\\n``."""
    if buffer.find(b"\r", 0, size) >= 0:
        buffer = buffer[:size].replace(b"\r\n", b"\n")
        size = len(buffer)
    return np.frombuffer(buffer, np.uint8, size)


def _read(stream: pa.NativeFile, buffer: memoryview, path: Path) -> int:
    """Read into `buffer`; return the number of bytes, 0 at the end of the file."""
    try:
        return stream.readinto(buffer)
    except OSError as error:
        if error.errno is not None:  # the system's, not the codec's
            raise
        raise ValueError(f"{path}: must be a whole {path.suffix} file, got: {error}.") from None
