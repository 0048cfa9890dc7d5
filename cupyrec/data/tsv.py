"""Delimited text files, streamed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cupyrec import errors
from cupyrec.data import fields
from cupyrec.data.batch import Batch
from cupyrec.data.schema import Column, Schema

__all__ = ["TSV"]

logger = logging.getLogger("cupyrec")

_BLOCK = 1 << 20  # bytes asked of a file at a time
_LONGEST_LINE = 1 << 26  # a file without newlines is not read into memory as a whole

_RULES = {  # by encoding, else kind
    "label": "the label must be 0 or 1",
    "numeric": "must be a finite number",
    "hex": "must be 1 to 16 hex digits",
    "integer": "must be an integer of 64 bits",
}
_ENCODINGS = {"hex": fields.HEX, "integer": fields.INTEGER, "string": fields.STRING}


class TSV:
    """Rows of delimited text files, plain or compressed (``.gz``, ``.zst``), in order.

    Files are streamed: a block of text and a batch are in memory. A line ends with ``\\n`` or
    ``\\r\\n``, quotes have no meaning, and an empty field is a missing value. Numbers are read
    as float64, transformed, and rounded to float32.

    Parameters
    ----------
    paths : path or sequence of paths
    schema : Schema
        The columns that every line must have.
    labels : bool
        Whether batches carry labels. If not, the label column's content is not looked at, and a
        file may lack that column: it does if its first line has one column fewer than the schema,
        and then every line of it must.
    on_error : {"raise", "skip"}
        What to do at a malformed line: raise, or skip and count it.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids in a row.
    skipped : int
        Malformed lines passed over in the epoch that was begun last.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        A path is no file.
    ValueError
        A file is empty, or the schema has no label and `labels` is true. While reading: a line is
        malformed, a compressed file damaged, or a file has no rows.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.data import Column
    >>> schema = Schema([Column("click", "label"), Column("price", "numeric", transform="log"),
    ...                  Column("item", "categorical", "hex")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.tsv")
    ...     _ = path.write_text("1\\t0\\tff\\n0\\t\\t\\n")
    ...     for batch in TSV(path, schema).batches(2):
    ...         print(batch.ids.tolist(), batch.labels.tolist())
    [[255], [-9223372036854775808]] [[1.0], [0.0]]
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        schema: Schema,
        *,
        labels: bool = True,
        on_error: str = "raise",
    ) -> None:
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        self.paths = [Path(path) for path in paths]
        if not self.paths:
            raise ValueError("TSV: 'paths' must name at least one file, got none.")
        for path in self.paths:
            if not path.exists():
                raise FileNotFoundError(f"{path}: must be a file, found nothing there.")
            if path.is_dir():
                raise IsADirectoryError(f"{path}: must be a file, got a folder.")
            if path.is_file() and path.stat().st_size == 0:  # others show when they are read
                raise ValueError(f"{path}: must have at least one row, got an empty file.")
        if labels and not any(column.kind == "label" for column in schema.columns):
            raise ValueError(f"{self.paths[0]}: its schema must have a label column, got none.")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"TSV: 'on_error' must be one of raise, skip, got {on_error!r}.")
        self.schema = schema
        self.labels = labels
        self.on_error = on_error
        self.num_dense = schema.num_dense
        self.num_tables = schema.num_tables
        self.skipped = 0
        self._first_skipped = ""

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over.

        Yields
        ------
        Batch
            Arrays of its own; they stay valid.
        """
        batch_size = errors.positive("TSV.batches", "batch_size", batch_size)
        if skip < 0:
            raise ValueError(f"TSV.batches: 'skip' must be at least 0, got {skip}.")
        return self._epoch(batch_size, skip)

    def _epoch(self, size: int, skip: int) -> Iterator[Batch]:
        delimiter = ord(self.schema.delimiter)
        batch, row = self._allocate(size), 0
        self.skipped = 0
        for path in self.paths:
            line, rows = 1, 0
            for buffer, end in _blocks(path):
                if line == 1:
                    columns = self._columns(buffer[: buffer.index(b"\n")])
                    table = _parse_table(columns, self.schema, self.labels)
                data, at = np.frombuffer(buffer, np.uint8, end), 0
                while at < end:
                    first = row
                    at, row, column = fields.parse(data, at, delimiter, table, row, *batch)
                    rows += row - first
                    line += row - first
                    if column >= 0:
                        stop = buffer.index(b"\n", at)
                        self._malformed(path, line, buffer[at:stop], columns, column)
                        at, line = stop + 1, line + 1
                    elif row == size:
                        if skip > 0:
                            skip -= 1
                        else:
                            yield self._batch(batch, size)
                            batch = self._allocate(size)
                        row = 0
            if rows == 0:
                what = "malformed lines alone" if line > 1 else "an empty file"
                raise ValueError(f"{path}: must have at least one row, got {what}.")
        if row and skip <= 0:
            yield self._batch(batch, row)
        if self.skipped:
            logger.warning(
                "skipped %d malformed lines, the first: %s", self.skipped, self._first_skipped
            )

    def _columns(self, first_line: bytearray) -> list[Column]:
        """Return the columns of a file: the schema's, or all of them but the label."""
        columns = list(self.schema.columns)
        width = first_line.count(self.schema.delimiter.encode()) + 1
        if not self.labels and width == len(columns) - 1:
            columns = [column for column in columns if column.kind != "label"]
        return columns

    def _allocate(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.empty((size, self.num_dense), np.float32),
            np.empty((size, self.num_tables), np.int64),
            np.empty((size, 1), np.float32),
        )

    def _batch(self, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], rows: int) -> Batch:
        dense, ids, labels = (array[:rows] for array in arrays)
        return Batch(dense, ids, labels if self.labels else None)

    def _malformed(
        self, path: Path, line: int, text: bytearray, columns: list[Column], column: int
    ) -> None:
        """Raise, or count, a line that could not be read at `column`."""
        if self.on_error == "raise":
            raise ValueError(self._sentence(path, line, text, columns, column))
        if not self.skipped:
            self._first_skipped = self._sentence(path, line, text, columns, column)
        self.skipped += 1

    def _sentence(
        self, path: Path, line: int, text: bytearray, columns: list[Column], column: int
    ) -> str:
        texts = text.split(self.schema.delimiter.encode())
        where, width = f"{path}, line {line}, column", len(texts)
        if width != len(columns):
            name = repr(columns[width].name) if width < len(columns) else len(columns) + 1
            return f"{where} {name}: a line must have {len(columns)} columns, got {width}."
        value = texts[column].decode("utf-8", "backslashreplace")
        if len(value) > 60:
            value = value[:60] + "..."
        rule = _RULES[columns[column].encoding or columns[column].kind]
        return f"{where} {columns[column].name!r}: {rule}, got {value!r}."


def _parse_table(columns: list[Column], schema: Schema, labels: bool) -> np.ndarray:
    """Return the (C, 4) table that tells `fields.parse` what to do with each column."""
    tables, dense = schema.table_names, 0
    rows = []
    for column in columns:
        table = tables.index(column.table) if column.table else -1
        if column.kind == "categorical":
            rows.append((_ENCODINGS[column.encoding], table, 0, -1))
        elif column.kind == "numeric":
            rows.append((fields.NUMERIC, dense, column.transform == "log", table))
            dense += 1
        elif column.kind == "label" and labels:
            rows.append((fields.LABEL, 0, 0, -1))
        else:
            rows.append((fields.IGNORE, 0, 0, -1))
    return np.array(rows, np.int64)


def _blocks(path: Path) -> Iterator[tuple[bytearray, int]]:
    """Yield a file's text as (buffer, size): whole lines that end with a newline alone.

    What is in the buffer is good until the next one is asked for.
    """
    buffer, filled, lines = bytearray(_BLOCK), 0, 0
    with pa.input_stream(path, compression="detect") as stream:
        while got := _read(stream, memoryview(buffer)[filled:], path):
            filled += got
            size = buffer.rfind(b"\n", 0, filled) + 1
            if size:
                yield _without_returns(buffer, size)
                lines += buffer.count(b"\n", 0, size)
                buffer[: filled - size] = buffer[size:filled]
                filled -= size
            elif filled > _LONGEST_LINE:
                raise ValueError(
                    f"{path}, line {lines + 1}: a line must have at most {_LONGEST_LINE} bytes, "
                    f"got more."
                )
            if filled == len(buffer):
                buffer = buffer + bytes(filled)  # not +=: who reads still holds the old one
    if filled:
        yield _without_returns(buffer[:filled] + b"\n", filled + 1)


def _without_returns(buffer: bytearray, size: int) -> tuple[bytearray, int]:
    """Make each ``\\r\\n`` a ``\\n``."""
    if buffer.find(b"\r", 0, size) >= 0:
        buffer = buffer[:size].replace(b"\r\n", b"\n")
        size = len(buffer)
    return buffer, size


def _read(stream: pa.NativeFile, buffer: memoryview, path: Path) -> int:
    """Read into `buffer`; return the number of bytes, 0 at the end of the file."""
    try:
        return stream.readinto(buffer)
    except OSError as error:
        if error.errno is not None:  # the system's, not the codec's
            raise
        raise ValueError(f"{path}: must be a whole {path.suffix} file, got: {error}.") from None
