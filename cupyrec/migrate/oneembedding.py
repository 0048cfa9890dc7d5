"""Tables of OneFlow's OneEmbedding: a snapshot of the persistent table that each rank has.

A rank's folder, called RANK-RANKS where all lie in one:

KEY_SIZE, VALUE_SIZE, PHYSICAL_BLOCK_SIZE, NUM_LOGICAL_BLOCKS_PER_CHUNK    numbers, as text
keys/key-000000000000                of a chunk: the keys of its rows
values/value-000000000000            its rows, as many a block as fit, in blocks of whole pages
snapshots/NAME/LIST                  names of the snapshot's index files, one a line
snapshots/NAME/index-000000000000    of a chunk: numbers of the rows that count, uint64

Numbers are little-endian; those of rows go on from chunk to chunk. A row is a vector, then the
optimizer's state. Each update of a key appends another row: which of them counts the index says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyrec import errors
from cupyrec.embedding.transfer import check_vectors

__all__ = ["read_snapshot"]

_WHERE = "oneembedding"
_KEYS = ("int64", "uint64", "int32", "uint32")
_STATES = ((), ("momentum",), ("sum",), ("m", "v"))  # numbers that mean the same there
_INDEX = np.dtype("<u8")
_NUMBERS = 1 << 20  # of an index at a time


class _Layout(NamedTuple):
    """How the numbers of a rank's folder lie in its files."""

    key: np.dtype
    value: int  # bytes a row
    block: int  # bytes a block
    rows: int  # a chunk

    @property
    def a_block(self) -> int:
        """Rows a block."""
        return self.block // self.value


def read_snapshot(
    path: str | os.PathLike,
    width: int,
    most: int = 65536,
    *,
    snapshot: str,
    key_type: str = "int64",
    storage_dim: int | None = None,
    states: Sequence[str] = (),
) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """Yield ids, vectors and states of a snapshot, rank after rank, in the order of the files.

    Files that lack a row which the snapshot counts are refused before anything is yielded. Memory
    is bounded but for a byte a row of one chunk, 4 GB as OneEmbedding sets them.

    Parameters
    ----------
    path : path
        A rank's folder, or that in which all ranks have theirs.
    width : int
        D, numbers of a vector: ``embedding_dim`` there.
    most : int
        Rows at a time.
    snapshot : str
        Its name.
    key_type : {"int64", "uint64", "int32", "uint32"}
    storage_dim : int, optional
        Numbers of a row in the files; those of vector and `states` by default.
    states : sequence of str
        What the row holds behind its vector, D numbers each, if that is wanted: ``sum`` of Adagrad,
        ``m`` and ``v`` of Adam, ``momentum``. Not FTRL's, which has another unit there.

    Yields
    ------
    ids : (N,) array of int64
    vectors : (N, D) array of float32
    states : dict of str to (N, D) array of float32

    Raises
    ------
    ValueError
        No such folder or snapshot, rows of another size, a file that is too short, a row that is
        counted twice, or a number that is not finite.
    FileNotFoundError
        A file is missing.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     next(read_snapshot(folder, 16, snapshot="last"), None)
    Traceback (most recent call last):
        ...
    ValueError: oneembedding: '...' must be a rank's folder or hold all ranks', got neither.
    """
    errors.positive(_WHERE, "width", width)
    if (states := tuple(states)) not in _STATES:
        raise ValueError(
            f"{_WHERE}: 'states' must be none, momentum, sum, or m and v, got {states}."
        )
    if key_type not in _KEYS:
        raise ValueError(f"{_WHERE}: 'key_type' must be one of {_KEYS}, got {key_type!r}.")
    used = width * (1 + len(states))
    columns = used if storage_dim is None else storage_dim
    errors.count(_WHERE, "storage_dim", columns, least=used)
    chunks = []
    for folder in _folders(Path(path)):
        layout = _layout(folder, np.dtype(key_type).newbyteorder("<"), 4 * columns)
        for number, index in _indices(folder, snapshot, layout):
            chunks.append(_Chunk(folder, number, index, layout))
    for chunk in chunks:
        for ids, values in chunk.pieces(columns, used, most):
            vectors, *rest = map(np.ascontiguousarray, np.split(values, len(states) + 1, axis=1))
            yield ids, vectors, dict(zip(states, rest, strict=True))


def _folders(path: Path) -> list[Path]:
    """The folders of ranks."""
    if (path / "KEY_SIZE").exists():
        return [path]
    names = [re.fullmatch(r"(\d+)-(\d+)", part.name) for part in path.iterdir()]
    found = {(int(n[1]), int(n[2])): path / n[0] for n in names if n}
    ranks = max((of for _, of in found), default=0)
    if not found:
        raise ValueError(
            f"{_WHERE}: '{path}' must be a rank's folder or hold all ranks', got neither."
        )
    if sorted(found) != [(rank, ranks) for rank in range(ranks)]:
        raise ValueError(
            f"{_WHERE}: '{path}' must hold a folder for each of {ranks} ranks, "
            f"got {sorted(part.name for part in found.values())}."
        )
    return [found[key] for key in sorted(found)]


def _layout(folder: Path, key: np.dtype, value: int) -> _Layout:
    def number(name: str) -> int:
        text = (folder / name).read_text("utf-8").strip()
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{_WHERE}: '{folder / name}' must be a number, got {text[:20]!r}.")
        return int(text)

    for name, size in (("KEY_SIZE", key.itemsize), ("VALUE_SIZE", value)):
        if (got := number(name)) != size:
            raise ValueError(
                f"{_WHERE}: '{folder / name}' must be {size} for such keys and rows, got {got}."
            )
    page = number("PHYSICAL_BLOCK_SIZE")
    block = -(-value // page) * page
    return _Layout(key, value, block, block // value * number("NUM_LOGICAL_BLOCKS_PER_CHUNK"))


def _indices(folder: Path, snapshot: str, layout: _Layout) -> Iterator[tuple[int, Path]]:
    """Numbers of the chunks in which a snapshot has rows, with their index files."""
    listed = folder / "snapshots" / snapshot / "LIST"
    if not listed.is_file():
        known = sorted(part.parent.name for part in folder.glob("snapshots/*/LIST"))
        raise ValueError(f"{_WHERE}: 'snapshot' must be one of {known}, got '{snapshot}'.")
    lines = listed.read_text("utf-8").splitlines()
    names = [re.fullmatch(r"index-(\d{12})", line) for line in lines]
    if None in names or len(set(lines)) < len(lines):
        raise ValueError(f"{_WHERE}: '{listed}' must name index files, each once, got {lines[:4]}.")
    for name in names:
        yield int(name[1]), listed.with_name(name[0])


class _Chunk:
    """The rows of one chunk that count."""

    def __init__(self, folder: Path, number: int, index: Path, layout: _Layout) -> None:
        self._index, self._layout, self._first = index, layout, number * layout.rows
        self._key_file = folder / "keys" / f"key-{number:012}"
        self._value_file = folder / "values" / f"value-{number:012}"
        entries, rest = divmod(index.stat().st_size, _INDEX.itemsize)
        if rest:
            raise ValueError(f"{_WHERE}: '{index}' must have 8 bytes a row, got {rest} more.")
        self._entries = entries
        self._blocks = self._value_file.stat().st_size // layout.block
        held = {
            self._key_file: self._key_file.stat().st_size // layout.key.itemsize,
            self._value_file: self._blocks * layout.a_block,
        }
        last = max((int(rows.max()) for rows in self._rows()), default=-1)
        for file, rows in held.items():
            if last >= rows:
                raise ValueError(
                    f"{_WHERE}: '{file}' must hold row {last + self._first}, which '{index}' "
                    f"counts, got rows {self._first} to {self._first + rows - 1}."
                )
        self._end = last + 1

    def _rows(self) -> Iterator[np.ndarray]:
        """Numbers within the chunk of the rows that count, a piece at a time."""
        for first in range(0, self._entries, _NUMBERS):
            at = first * _INDEX.itemsize
            rows = np.fromfile(self._index, _INDEX, _NUMBERS, offset=at)
            chunk = range(self._first, self._first + self._layout.rows)
            for number in (int(rows.min()), int(rows.max())):
                if number not in chunk:
                    raise ValueError(
                        f"{_WHERE}: '{self._index}' must count rows {chunk[0]} to {chunk[-1]}, "
                        f"got {number}."
                    )
            yield (rows - np.uint64(self._first)).astype(np.int64)

    def pieces(self, columns: int, used: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids, and the first `used` of each row's `columns` numbers."""
        counts = np.zeros(self._end, bool)
        for rows in self._rows():
            counts[rows] = True
        if (once := np.count_nonzero(counts)) < self._entries:
            raise ValueError(
                f"{_WHERE}: '{self._index}' must count a row once, "
                f"got {self._entries - once} twice or more."
            )
        if not self._end:
            return
        a_block, strides = self._layout.a_block, (self._layout.block, self._layout.value, 4)
        keys = np.memmap(self._key_file, self._layout.key, "r", shape=(self._end,))
        values = np.ndarray(
            (self._blocks, a_block, columns), "<f4", np.memmap(self._value_file, mode="r"),
            strides=strides,
        )  # fmt: skip
        for first in range(0, self._end, most):
            rows = np.flatnonzero(counts[first : first + most]) + first
            if rows.size:
                chosen = values[rows // a_block, rows % a_block, :used].astype(np.float32)
                check_vectors(f"{_WHERE}: '{self._value_file}'", chosen, "float32")
                yield keys[rows].astype(np.int64), chosen
