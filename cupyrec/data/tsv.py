"""Delimited text files, streamed."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyrec import errors
from cupyrec.data import fields
from cupyrec.data.batch import Batch, share_of
from cupyrec.data.lines import Lines, batched, read_lines
from cupyrec.data.schema import Column, Schema

__all__ = ["TSV"]

logger = logging.getLogger("cupyrec")

_RULES = {  # by encoding, else kind
    "label": "the label must be 0 or 1",
    "numeric": "must be a finite number",
    "hex": "must be 1 to 16 hex digits",
    "integer": "must be an integer of 64 bits",
}
_ENCODINGS = {"hex": fields.HEX, "integer": fields.INTEGER, "string": fields.STRING}


class TSV:
    """Rows of delimited text files, plain or compressed (``.gz``, ``.zst``), in order.

    Files are streamed: a batch and its text are in memory. A line ends with ``\\n`` or
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
        What to do at a malformed line: raise, or skip and count it. Which rows a batch has then
        hangs on what lines say, so that every rank reads all of them.

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
        self._rank, self._ranks = 0, 1
        self._layouts = [_layout(schema.columns, schema, labels)]
        if not labels:
            others = [column for column in schema.columns if column.kind != "label"]
            self._layouts.append(_layout(others, schema, labels))

    def of_rank(self, rank: int, ranks: int) -> TSV:
        """Return the dataset for one of several ranks: its rows of each batch, see `Batch.of_rank`.

        It looks for newlines in all lines, but reads those of its rows alone, and so raises for
        those alone.

        Raises
        ------
        ValueError, TypeError
            No such rank.

        Examples
        --------
        >>> import tempfile
        >>> schema = Schema([Column("item", "categorical", "integer")])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "items.tsv")
        ...     _ = path.write_text("1\\n2\\n3\\n4\\n5\\n")
        ...     part = TSV(path, schema, labels=False).of_rank(1, 2)
        ...     [(batch.ids.ravel().tolist(), batch.first) for batch in part.batches(4)]
        [([3, 4], 2), ([5], 0)]
        """
        part = copy.copy(self)
        part._rank, part._ranks = errors.rank("TSV.of_rank", rank, ranks)
        return part

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over; where malformed lines raise, unread.

        Yields
        ------
        Batch
            Arrays of its own; they stay valid.
        """
        batch_size = errors.positive("TSV.batches", "batch_size", batch_size)
        if skip < 0:
            raise ValueError(f"TSV.batches: 'skip' must be at least 0, got {skip}.")
        return (self._strict if self.on_error == "raise" else self._lenient)(batch_size, skip)

    def _strict(self, size: int, skip: int) -> Iterator[Batch]:
        """Each line is a row, so which are a rank's is known before any is read."""
        self.skipped = 0
        blocks = (lines for path in self.paths for lines in read_lines(path))
        for batch in batched(blocks, size, skip=skip):
            total = sum(map(len, batch))
            first, stop = share_of(total, self._rank, self._ranks)
            arrays, row, at = self._allocate(stop - first), 0, 0
            for lines in batch:
                own = lines.part(max(first - at, 0), max(stop - at, 0))
                before, at = row, at + len(lines)
                row, column = self._parse(own, arrays, row)
                if column >= 0:
                    raise ValueError(self._sentence(own.part(row - before), column))
            yield self._batch(arrays, row, first, total)

    def _lenient(self, size: int, skip: int) -> Iterator[Batch]:
        """Malformed lines are no rows, so which are a rank's is known when all are read."""
        arrays, row = self._allocate(size), 0
        self.skipped, passed = 0, 0
        for path in self.paths:
            unread = True
            for lines in read_lines(path):
                while len(lines):
                    before = row
                    row, column = self._parse(lines, arrays, row)
                    unread &= row == before
                    lines = lines.part(row - before)
                    if column >= 0:
                        if not self.skipped:
                            self._first_skipped = self._sentence(lines, column)
                        self.skipped += 1
                        lines = lines.part(1)
                    elif row == size:
                        passed += 1
                        if passed > skip:
                            yield self._batch(arrays, row).of_rank(self._rank, self._ranks)
                            arrays = self._allocate(size)
                        row = 0
            if unread:
                raise ValueError(f"{path}: must have at least one row, got malformed lines alone.")
        if row and passed >= skip:
            yield self._batch(arrays, row).of_rank(self._rank, self._ranks)
        if self.skipped:
            logger.warning(
                "skipped %d malformed lines, the first: %s", self.skipped, self._first_skipped
            )

    def _allocate(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.empty((size, self.num_dense), np.float32),
            np.empty((size, self.num_tables), np.int64),
            np.empty((size, 1), np.float32),
        )

    def _batch(
        self, arrays: tuple[np.ndarray, ...], rows: int, first: int = 0, total: int = -1
    ) -> Batch:
        dense, ids, labels = (array[:rows] for array in arrays)
        return Batch(dense, ids, labels if self.labels else None, first, total)

    def _layout_of(self, lines: Lines) -> _Layout:
        """The columns of a file: the schema's, or all of them but the label."""
        width = lines.header.count(self.schema.delimiter.encode()) + 1
        return self._layouts[-1 if width == len(self._layouts[-1].columns) else 0]

    def _parse(self, lines: Lines, arrays: tuple[np.ndarray, ...], row: int) -> tuple[int, int]:
        """Read lines into rows from `row` on; return the next one, and a column as `fields.parse`
        does, if its line is malformed."""
        delimiter, layout = ord(self.schema.delimiter), self._layout_of(lines)
        return fields.parse(lines.text, 0, delimiter, layout.table, row, *arrays)[1:]

    def _sentence(self, lines: Lines, column: int) -> str:
        """What is wrong with the first of these lines."""
        columns = self._layout_of(lines).columns
        texts = lines.part(0, 1).text.tobytes()[:-1].split(self.schema.delimiter.encode())
        where, width = f"{lines.path}, line {lines.number}, column", len(texts)
        if width != len(columns):
            name = repr(columns[width].name) if width < len(columns) else len(columns) + 1
            return f"{where} {name}: a line must have {len(columns)} columns, got {width}."
        value = texts[column].decode("utf-8", "backslashreplace")
        if len(value) > 60:
            value = value[:60] + "..."
        rule = _RULES[columns[column].encoding or columns[column].kind]
        return f"{where} {columns[column].name!r}: {rule}, got {value!r}."


class _Layout(NamedTuple):
    """Columns of a file, and the (C, 4) table that tells `fields.parse` what to do with each."""

    columns: Sequence[Column]
    table: np.ndarray


def _layout(columns: Sequence[Column], schema: Schema, labels: bool) -> _Layout:
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
    return _Layout(columns, np.array(rows, np.int64))
