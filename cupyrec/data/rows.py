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

__all__ = ["Rows"]


class Rows:
    """Room for the rows of some lines, which `read` fills.

    Parameters
    ----------
    schema : Schema
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

    def __init__(self, schema: Schema, texts: Sequence[Lines]) -> None:
        self._schema, self.filled = schema, 0
        count, tables, tasks = sum(map(len, texts)), schema.num_tables, len(schema.task_names)
        self._dense = np.empty((count, schema.num_dense), np.float32)
        self._ids = np.empty((count, tables), np.int64)
        self._labels = np.empty((count, tasks), np.float32)
        self._weights = np.empty((count, tasks if schema.has_weights else 0), np.float32)
        # Of bags: one id more than separators, of which no other column's count does harm.
        bags = [column for column in schema.columns if column.bag]
        room = count * len(bags)
        for separator in {ord(column.separator) for column in bags}:
            room += sum(np.count_nonzero(lines.text == separator) for lines in texts)
        self._lengths = np.ones((count if bags else 0, tables), np.int64)
        self._bagged, self._used = np.empty(room, np.int64), 0

    def read(self, lines: Lines, layout: Layout) -> int:
        """Read lines of a file; return -1, or the number of the column where the first malformed
        one failed: the rows before it are there then.

        Examples
        --------
        See `cupyrec.data.TSV`.
        """
        self.filled, self._used, column = fields.parse(
            lines.text, ord(self._schema.delimiter), self._schema.quotes, layout.table,
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
        names = "_dense", "_ids", "_labels", "_weights"
        dense, ids, targets, weights = (getattr(self, name)[: self.filled] for name in names)
        if self._schema.has_bags:
            is_bag = np.isin(
                self._schema.table_names, [c.table for c in self._schema.columns if c.bag]
            )
            ids = Bags(*_bags(ids, self._lengths, self._bagged, is_bag), self._schema.num_tables)
        if not labels:
            return Batch(dense, ids, None, first, total)
        return Batch(dense, ids, targets, first, total, weights if weights.shape[1] else None)


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
