"""Delimited text files, streamed."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from cupyrec import cpu, errors
from cupyrec.data import fields
from cupyrec.data.batch import Batch, share_of
from cupyrec.data.in_order import in_order
from cupyrec.data.layout import Layouts, content, split
from cupyrec.data.lines import Lines, batched, read_lines
from cupyrec.data.log_files import Paths, check_unchanged, log_files, state_of
from cupyrec.data.rebatched import rebatched
from cupyrec.data.rows import Rows, Shape
from cupyrec.data.schema import Column, Schema

__all__ = ["TSV"]

logger = logging.getLogger("cupyrec")

_FEW = 256  # rows are read in the time that it takes to hand them to a thread
_MOST_THREADS = 4  # one more finds the lines, and has to keep up


class TSV:
    """Rows of delimited text files, plain or compressed (``.gz``, ``.zst``), in order.

    Files are streamed: some batches and their text are in memory, one or two more than there are
    threads. Up to four, or `cupyrec.num_threads`, read at once, which changes no batch. A line ends
    with ``\\n`` or ``\\r\\n``, and an empty field is a missing value or an empty bag. Numbers are
    read as float64, transformed, and rounded to float32.

    Parameters
    ----------
    paths : path or sequence of paths
    schema : Schema
        The columns that every line must have, and how files are written.
    labels : bool
        Whether batches carry labels, and weights if the schema has them. If not, what those columns
        say is not looked at, and a file may lack the labels, or the labels and the weight: without
        header it does if its first line has so many columns fewer than the schema, and then every
        line of it must.
    on_error : {"raise", "skip"}
        What to do at a malformed line: raise, or skip and count it. Which rows a batch has then
        hangs on what lines say, so that every rank reads all of them.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids, or bags, in a row.
    task_names : list of str
        Names of the labels.
    skipped : int
        Malformed lines passed over in the epoch that was begun last.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        A path is no file.
    ValueError
        A file is a pipe or has no rows, its header lacks a column of the schema or has it twice, or
        the schema has no label and `labels` is true. While reading: a line is malformed, a
        compressed file damaged, a file has changed since, or has malformed lines alone.

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
        paths: Paths,
        schema: Schema,
        *,
        labels: bool = True,
        on_error: str = "raise",
    ) -> None:
        self.paths = log_files("TSV", paths)
        if labels and not any(column.kind == "label" for column in schema.columns):
            raise ValueError(f"{self.paths[0]}: its schema must have a label column, got none.")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"TSV: 'on_error' must be one of raise, skip, got {on_error!r}.")
        self.schema = schema
        self.labels = labels
        self.on_error = on_error
        self.num_dense = schema.num_dense
        self.num_tables = schema.num_tables
        self.task_names = schema.task_names
        self.skipped = 0
        self._first_skipped = ""
        self._rank, self._ranks = 0, 1
        self._shape, self._layouts = Shape(schema), Layouts(schema, labels)
        self._states = {path: state_of(path) for path in self.paths}
        for path in self.paths:  # what no row need be read for is told at once
            self._layouts.of(next(self._blocks(path)))

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

        Raises
        ------
        ValueError, TypeError
            An argument is not such, or a file is another one than when the dataset was made.
        """
        batch_size = errors.positive("TSV.batches", "batch_size", batch_size)
        skip = errors.count("TSV.batches", "skip", skip)
        check_unchanged(self._states)
        return (self._strict if self.on_error == "raise" else self._lenient)(batch_size, skip)

    def _strict(self, size: int, skip: int) -> Iterator[Batch]:
        """Each line is a row, so which are a rank's is known before any is read."""
        self.skipped = 0
        blocks = itertools.chain.from_iterable(map(self._blocks, self.paths))
        parts = map(self._part, batched(blocks, size, skip=skip))
        threads = self._threads if size >= _FEW * self._ranks else 1
        yield from in_order(self._read, parts, threads)

    def _part(self, batch: list[Lines]) -> tuple[list[Lines], int, int]:
        """The rank's lines of a batch, the number of the first one, and how many all have."""
        total, at, own = sum(map(len, batch)), 0, []
        first, stop = share_of(total, self._rank, self._ranks)
        for lines in batch:
            own.append(lines.part(max(first - at, 0), max(stop - at, 0)))
            at += len(lines)
        return own, first, total

    def _read(self, part: tuple[list[Lines], int, int]) -> Batch:
        own, first, total = part
        rows = Rows(self._shape, own)
        for lines in own:
            before = rows.filled
            column = rows.read(lines, self._layouts.of(lines))
            if column >= 0:
                raise ValueError(self._sentence(lines.part(rows.filled - before), column))
        return rows.batch(self.labels, first, total)

    def _lenient(self, size: int, skip: int) -> Iterator[Batch]:
        """Malformed lines are no rows, so which are a rank's is known when all are read."""
        self.skipped = 0
        for batch in itertools.islice(rebatched(self._good_rows(), size), skip, None):
            yield batch.of_rank(self._rank, self._ranks)
        if self.skipped:
            logger.warning(
                "skipped %d malformed lines, the first: %s", self.skipped, self._first_skipped
            )

    def _good_rows(self) -> Iterator[Batch]:
        for path in self.paths:
            blocks, found = (lines.copy() for lines in self._blocks(path)), 0
            for batch, skipped, sentence in in_order(self._read_good, blocks, self._threads):
                if not self.skipped:
                    self._first_skipped = sentence
                self.skipped, found = self.skipped + skipped, found + len(batch)
                yield batch
            if not found:
                raise ValueError(f"{path}: must have at least one row, got malformed lines alone.")

    def _read_good(self, lines: Lines) -> tuple[Batch, int, str]:
        """The rows of some lines, how many of them are malformed, and what is wrong with the first
        of those."""
        rows, skipped, sentence = Rows(self._shape, [lines]), 0, ""
        while len(lines):
            before = rows.filled
            column = rows.read(lines, self._layouts.of(lines))
            lines = lines.part(rows.filled - before)
            if column >= 0:
                sentence = sentence or self._sentence(lines, column)
                skipped, lines = skipped + 1, lines.part(1)
        return rows.batch(self.labels), skipped, sentence

    def _blocks(self, path: Path) -> Iterator[Lines]:
        """The lines of a file that are rows."""
        check_unchanged({path: self._states[path]})  # since those before it were read
        empty = True
        for lines in read_lines(path):
            if self.schema.header and lines.number == 1:
                lines = lines.part(1)
            if len(lines):
                yield lines
                empty = False
        if empty:
            raise ValueError(f"{path}: must have at least one row, got a header alone.")

    @property
    def _threads(self) -> int:
        """How many read at once: more would have nothing to do, for one finds the lines."""
        return min(cpu.num_threads(), _MOST_THREADS)

    def _sentence(self, lines: Lines, column: int) -> str:
        """What is wrong with the first of these lines."""
        names, columns, _ = self._layouts.of(lines)
        texts = split(lines.part(0, 1).text.tobytes()[:-1], self.schema)
        values = [content(text) for text in texts] if self.schema.quotes else texts
        where, width = f"{lines.path}, line {lines.number}, column", len(texts)
        if None in values[: column + 1]:
            column = values.index(None)
            rule, value = "a field that begins with a quote must end with one", texts[column]
        elif width != len(names):
            name = repr(names[width]) if width < len(names) else len(names) + 1
            told = f"{where} {name}: a line must have {len(names)} columns, got {width}."
            if width == 1 and lines.number == 1:  # no bad line, but a schema of other files
                told += (
                    f" The schema's delimiter is {self.schema.delimiter!a}; `cupyrec data inspect "
                    f"'{lines.path}' --out schema.toml` writes a schema by the file."
                )
            return told
        else:
            rule, value = _rule(columns[column]), values[column]
        return f"{where} {names[column]!r}: {rule}, got {fields.shown(value)}."


def _rule(column: Column) -> str:
    rule = fields.RULES[column.encoding or column.kind]
    return f"each id {rule}" if column.bag else rule
