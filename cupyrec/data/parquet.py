"""Parquet files, streamed; each of several ranks decodes its own row groups."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from cupyrec import errors
from cupyrec.data.arrow import ArrowReader, Records, batched, is_text
from cupyrec.data.batch import Batch, share_of
from cupyrec.data.log_files import Paths, check_unchanged, log_files, state_of
from cupyrec.data.prefetch import prefetch
from cupyrec.data.rank_slices import RankSlices
from cupyrec.data.schema import Schema

__all__ = ["Parquet", "whole_file"]

_ROWS = 1 << 16  # decoded at a time, as by pyarrow itself
_AHEAD = 1  # how often, while others become batches
_BUFFER = 1 << 20  # bytes of a column chunk that are read at a time
_TEXT_BYTES = 4  # what a plain text takes at least: a column of fewer a row is dictionaries
_UNBALANCED = 1.25  # times the mean of ranks' rows, from where on each takes rows of every batch


class Parquet:
    """Rows of Parquet files, in order, their columns by name.

    Files are streamed: some 65,536 rows at a time are decoded, by all cores and in a thread that is
    ahead of whoever asks for batches. Only the columns of the schema are read; each file may have
    them in an order of its own, and others beside them.

    A numeric column may be integers, floats, bools or decimals; a categorical one text, or with the
    encoding "integer" integers or bools, of which uint64 keeps its bits; a bag lists of those.
    All may be dictionary-encoded. A null is a missing value, a null list an empty bag; labels and
    weights must be there.

    Parameters
    ----------
    paths : path or sequence of paths
    schema : Schema
    labels : bool
        Whether batches carry labels, and weights if the schema has them. If not, files may lack
        these columns.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids, or bags, in a row.
    task_names : list of str
        Names of the labels.
    consecutive : bool
        Whether the rows of rank 0 come before those of rank 1, and so on: see `of_rank`.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        A path is no file.
    ValueError
        A file is no whole Parquet file, has no rows, or lacks a column; the schema has no label and
        `labels` is true. While reading: a value is not one that its column may have, or a file has
        changed since.
    TypeError
        A column's type doesn't go with its kind in the schema.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.data import Column
    >>> schema = Schema([Column("click", "label"), Column("item", "categorical", "integer")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.parquet")
    ...     parquet.write_table(pa.table({"item": [7, None, 9], "click": [1, 0, 0]}), path)
    ...     for batch in Parquet(path, schema).batches(2):
    ...         print(batch.ids.tolist(), batch.labels.tolist())
    [[7], [-9223372036854775808]] [[1.0], [0.0]]
    [[9]] [[0.0]]
    """

    def __init__(
        self,
        paths: Paths,
        schema: Schema,
        *,
        labels: bool = True,
    ) -> None:
        self.paths = log_files("Parquet", paths)
        if labels and not schema.task_names:
            raise ValueError(f"{self.paths[0]}: its schema must have a label column, got none.")
        self.schema = schema
        self.labels = labels
        self.num_dense = schema.num_dense
        self.num_tables = schema.num_tables
        self.task_names = schema.task_names
        self.consecutive = False
        self._reader = ArrowReader(schema, labels)
        self._states = {path: state_of(path) for path in self.paths}
        self._groups, self._coded = zip(
            *(_look_at(path, self._reader) for path in self.paths), strict=True
        )
        self._rank = 0
        rows = sum(groups.sum() for groups in self._groups)
        self._borders = np.array([0, rows])  # between the rows of ranks

    def of_rank(self, rank: int, ranks: int) -> Parquet | RankSlices:
        """Return the dataset for one of several ranks, which decodes its rows alone.

        These are consecutive row groups of all files, and about as many rows as those of any other
        rank; each step has the same share of them. So which rows a step has hangs on the number of
        ranks. Where a rank would have more than 1.25 times the mean, as where there are fewer row
        groups than ranks, all of them decode everything, see `RankSlices`.

        Raises
        ------
        ValueError, TypeError
            No such rank.
        """
        rank, ranks = errors.rank("Parquet.of_rank", rank, ranks)
        part = copy.copy(self)
        ends = np.cumsum(np.concatenate(self._groups))
        wanted = ends[-1] * np.arange(ranks + 1) / ranks
        ends = np.append(0, ends)
        nearest = np.abs(ends - wanted[:, None]).argmin(axis=1)
        part._rank, part._borders, part.consecutive = rank, ends[nearest], True
        if np.diff(part._borders).max() > _UNBALANCED * ends[-1] / ranks:
            whole = copy.copy(self)
            whole._rank, whole._borders, whole.consecutive = 0, ends[[0, -1]], False
            return RankSlices(whole, rank, ranks)
        return part

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Of several ranks each yields its share of as many batches, of about `batch_size` rows of all
        ranks together.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over, row groups of which are not read.

        Yields
        ------
        Batch
            Arrays of its own; they stay valid.
        """
        size = errors.positive("Parquet.batches", "batch_size", batch_size)
        skip = errors.count("Parquet.batches", "skip", skip)
        check_unchanged(self._states)
        return self._batches(size, skip)

    def _batches(self, size: int, skip: int) -> Iterator[Batch]:
        total, own = int(self._borders[-1]), np.diff(self._borders).tolist()
        steps = range(skip, -(-total // size))
        if not steps:
            return

        def shares(step: int) -> list[tuple[int, int]]:
            """Of each rank, the first of its rows in a step and the one behind the last."""
            if len(own) == 1:
                return [(step * size, min((step + 1) * size, total))]
            return [share_of(rows, step, -(-total // size)) for rows in own]

        first = int(self._borders[self._rank])
        start, stop = first + shares(skip)[self._rank][0], int(self._borders[self._rank + 1])
        sizes = ([stop - start for start, stop in shares(step)] for step in steps)
        blocks = prefetch(self._blocks(start, stop), _AHEAD)
        with contextlib.closing(blocks):
            some = batched(map(self._reader.block, blocks), (
                stop - start for start, stop in (shares(step)[self._rank] for step in steps)
            ))  # fmt: skip
            for rows, lengths in zip(some, sizes, strict=True):
                yield self._reader.batch(rows, sum(lengths[: self._rank]), sum(lengths))

    def _blocks(self, start: int, stop: int) -> Iterator[Records]:
        """Rows from `start` on and before `stop`, of all files, as they are decoded."""
        names = [column.name for column in self._reader.columns]
        border = 0
        for path, groups, coded in zip(self.paths, self._groups, self._coded, strict=True):
            ends = border + np.cumsum(groups)
            wanted = np.flatnonzero((ends > start) & (ends - groups < stop))
            before, border = border, int(ends[-1])
            if len(wanted):
                at = int(ends[wanted[0]] - groups[wanted[0]])
                check_unchanged({path: self._states[path]})  # since those before it were read
                for columns in _decoded(path, wanted.tolist(), names, coded):
                    skipped, rows = max(start - at, 0), columns.num_rows
                    if skipped < rows:
                        part = columns.slice(skipped, stop - at - skipped)
                        yield Records(str(path), at - before + skipped, part)
                    at += rows
                if at != ends[wanted[-1]]:  # pages behind a file's end are no error to Arrow
                    raise ValueError(f"{path}: must be a whole Parquet file, got fewer rows.")


def _look_at(path: Path, reader: ArrowReader) -> tuple[np.ndarray, list[str]]:
    """Rows of each of a file's row groups, and names of its columns of text that are best read as
    dictionaries, once its columns are seen to be those of the schema."""
    with whole_file(path), parquet.ParquetFile(path) as file:
        told, given = file.metadata, file.schema_arrow
        if not told.num_rows:
            raise ValueError(f"{path}: must have at least one row, got none.")
        reader.check(given, str(path))
        groups = [told.row_group(number) for number in range(told.num_row_groups)]
        texts = {c.name for c in reader.columns if not c.bag and is_text(given.field(c.name).type)}
        size = collections.Counter()
        for group in groups:
            for chunk in map(group.column, range(group.num_columns)):
                size[chunk.path_in_schema] += chunk.total_uncompressed_size
        coded = [name for name in texts if size[name] < _TEXT_BYTES * told.num_rows]
    return np.array([group.num_rows for group in groups], np.int64), coded


def _decoded(
    path: Path, groups: list[int], names: list[str], coded: list[str]
) -> Iterator[pa.RecordBatch]:
    # Neither mapped into memory, for a bus error ends whoever reads what was cut off of a mapped
    # file, nor buffered before, which reads all row groups into memory at once.
    with (
        whole_file(path),
        parquet.ParquetFile(
            path, buffer_size=_BUFFER, pre_buffer=False, read_dictionary=coded
        ) as file,
    ):
        yield from file.iter_batches(_ROWS, row_groups=groups, columns=names)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[None]:
    """Say of a file that can't be decoded within this that it is no whole Parquet file.

    Examples
    --------
    >>> with whole_file(Path("a.parquet")):
    ...     raise pa.ArrowInvalid("no magic bytes")
    Traceback (most recent call last):
        ...
    ValueError: a.parquet: must be a whole Parquet file, got: no magic bytes.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        if getattr(error, "errno", None) is not None:  # the system's
            raise
        told = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path}: must be a whole Parquet file, got: {told}.") from None
