"""Rows while they are read: the arrays that text is turned into, until they are a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyrec import cpu
from cupyrec.data import fields
from cupyrec.data.batch import Batch
from cupyrec.data.layout import Layout
from cupyrec.data.lines import Lines
from cupyrec.data.schema import Schema
from cupyrec.ragged import Bags

__all__ = ["Rows", "Shape"]


class Shape:
    """What a schema says of rows, once for all: a batch may have few of them.

    Parameters
    ----------
    schema : Schema

    Examples
    --------
    See `cupyrec.data.TSV`.
    """

    def __init__(self, schema: Schema) -> None:
        self.delimiter, self.quotes = ord(schema.delimiter), schema.quotes
        self.dense, self.tables = schema.num_dense, schema.num_tables
        self.tasks = len(schema.task_names)
        self.weights = self.tasks if schema.has_weights else 0
        bags = [column for column in schema.columns if column.bag]
        self.bags, self.separators = len(bags), {ord(column.separator) for column in bags}
        self.is_bag = np.isin(schema.table_names, [column.table for column in bags])


class Rows:
    """Room for the rows of some lines, which `read` fills.

    Parameters
    ----------
    shape : Shape
    texts : sequence of Lines
        All that will be read.

    Attributes
    ----------
    filled : int
        How many rows there are.

    Examples
    --------
    See `cupyrec.data.TSV`.
    """

    def __init__(self, shape: Shape, texts: Sequence[Lines]) -> None:
        self._shape, self.filled = shape, 0
        count = sum(map(len, texts))
        self._dense = np.empty((count, shape.dense), np.float32)
        self._ids = np.empty((count, shape.tables), np.int64)
        self._labels = np.empty((count, shape.tasks), np.float32)
        self._weights = np.empty((count, shape.weights), np.float32)
        # Of bags: one id more than separators, of which no other column's count does harm.
        room = count * shape.bags
        for separator in shape.separators:
            room += sum(np.count_nonzero(lines.text == separator) for lines in texts)
        self._lengths = np.ones((count if shape.bags else 0, shape.tables), np.int64)
        self._bagged, self._used = np.empty(room, np.int64), 0

    def read(self, lines: Lines, layout: Layout) -> int:
        """Read lines of a file; return -1, or the number of the column where the first malformed
        one failed: the rows before it are there then.

        Examples
        --------
        See `cupyrec.data.TSV`.
        """
        self.filled, self._used, column = fields.parse(
            lines.text, self._shape.delimiter, self._shape.quotes, layout.table,
            self.filled, self._used, self._dense, self._ids, self._labels, self._weights,
            self._lengths, self._bagged,
        )  # fmt: skip
        return column

    def batch(self, labels: bool, first: int = 0, total: int = -1) -> Batch:
        """Return the rows that there are; see `Batch`.

        Examples
        --------
        See `cupyrec.data.TSV`.
        """
        columns = self._dense, self._ids, self._labels, self._weights
        dense, ids, targets, weights = (column[: self.filled] for column in columns)
        if self._shape.bags:
            told = _bags(ids, self._lengths, self._bagged, self._shape.is_bag)
            ids = Bags(*told, self._shape.tables)
        if not labels:
            return Batch(dense, ids, None, first, total)
        return Batch(dense, ids, targets, first, total, weights if self._shape.weights else None)


@cpu.exact_loop
def _bags(ids, lengths, bagged, is_bag):
    """Put the ids of all fields, (B, T), side by side in the order of tables; of bags `ids` says
    where they begin. Return them, and where each bag begins, (B * T + 1,)."""
    rows, tables = ids.shape
    offsets = np.zeros(rows * tables + 1, np.int64)
    for row in range(rows):
        for table in range(tables):
            bag = row * tables + table
            offsets[bag + 1] = offsets[bag] + lengths[row, table]
    out = np.empty(offsets[-1], np.int64)
    for row in range(rows):
        for table in range(tables):
            at, first = offsets[row * tables + table], ids[row, table]
            if is_bag[table]:
                for i in range(lengths[row, table]):
                    out[at + i] = bagged[first + i]
            else:
                out[at] = first
    return out, offsets
