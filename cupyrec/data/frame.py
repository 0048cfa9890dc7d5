"""Data frames and Arrow tables as a dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from cupyrec import errors
from cupyrec.data.arrow import ArrowReader, Records
from cupyrec.data.batch import Batch, share_of
from cupyrec.data.schema import Schema

__all__ = ["Frame"]

_ROWS = 1 << 16  # read at a time where a table has longer chunks


class Frame:
    """Rows of a data frame or table that lie in memory; columns by name, as in `Parquet`.

    Parameters
    ----------
    data : pandas.DataFrame, polars.DataFrame, pyarrow.Table, duckdb relation, ...
        Anything with Arrow's ``__arrow_c_stream__``; mostly nothing is copied. NaN is a missing
        value in pandas, whose integers become floats by it: ids with missing ones must be of its
        type "Int64", or text.
    schema : Schema
    labels : bool
        Whether batches carry labels, and weights if the schema has them.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids, or bags, in a row.
    task_names : list of str
        Names of the labels.

    Raises
    ------
    TypeError
        The data are no such, or a column's type doesn't go with its kind in the schema.
    ValueError
        A column is missing, or the schema has no label and `labels` is true. While reading: a value
        is not one that its column may have.

    Examples
    --------
    >>> from cupyrec.data import Column
    >>> table = pa.table({"item": ["ff", None, "a"], "click": [1, 0, 0]})
    >>> schema = Schema([Column("click", "label"), Column("item", "categorical", "hex")])
    >>> [batch.ids.ravel().tolist() for batch in Frame(table, schema).batches(2)]
    [[255, -9223372036854775808], [10]]
    """

    def __init__(self, data: Any, schema: Schema, *, labels: bool = True) -> None:
        if not hasattr(data, "__arrow_c_stream__"):
            raise TypeError(
                "Frame: 'data' must have __arrow_c_stream__, as pyarrow tables and the data frames "
                f"of pandas (from 2.2 on) and Polars have, got {type(data).__name__}."
            )
        if labels and not schema.task_names:
            raise ValueError("Frame: its schema must have a label column, got none.")
        try:
            self._table = pa.table(data)
        except (pa.ArrowException, ValueError, TypeError) as error:  # ours and the frame's own
            several = isinstance(error, pa.ArrowException)  # of which the second names the column
            told = ("; ".join(map(str, error.args)) if several else str(error)).rstrip(".")
            raise TypeError(f"Frame: 'data' must go into an Arrow table, got: {told}.") from None
        self._reader = ArrowReader(schema, labels)
        self._reader.check(self._table.schema, "Frame")
        self._table = self._table.select([column.name for column in self._reader.columns])
        self.schema = schema
        self.num_dense = schema.num_dense
        self.num_tables = schema.num_tables
        self.task_names = schema.task_names
        self._rank, self._ranks = 0, 1

    def of_rank(self, rank: int, ranks: int) -> Frame:
        """Return the dataset for one of several ranks: its rows of each batch, see `Batch.of_rank`.

        Raises
        ------
        ValueError, TypeError
            No such rank.

        Examples
        --------
        >>> from cupyrec.data import Column
        >>> schema = Schema([Column("item", "categorical", "integer")])
        >>> part = Frame(pa.table({"item": range(7)}), schema, labels=False).of_rank(1, 2)
        >>> [(batch.ids.ravel().tolist(), batch.first) for batch in part.batches(4)]
        [([2, 3], 2), ([5, 6], 1)]
        """
        part = copy.copy(self)
        part._rank, part._ranks = errors.rank("Frame.of_rank", rank, ranks)
        return part

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
            Arrays of its own.
        """
        size = errors.positive("Frame.batches", "batch_size", batch_size)
        skip = errors.count("Frame.batches", "skip", skip)
        starts = range(skip * size, len(self._table), size)
        return (self._batch(start, min(start + size, len(self._table))) for start in starts)

    def _batch(self, start: int, stop: int) -> Batch:
        first, last = share_of(stop - start, self._rank, self._ranks)
        at, some = start + first, []
        for columns in self._table.slice(at, last - first).to_batches(max_chunksize=_ROWS):
            some.append(self._reader.block(Records("Frame", at, columns)))
            at += columns.num_rows
        return self._reader.batch(some, first, stop - start)
