"""Which columns a text file has, in which order, and what the reader does with each."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cupyrec import errors
from cupyrec.data import fields
from cupyrec.data.lines import Lines
from cupyrec.data.schema import Column, Schema

__all__ = ["Layout", "Layouts", "content", "split"]

_QUOTED = re.compile(rb'"(?:[^"]|"")*"')


class Layout(NamedTuple):
    """The columns of a file; None stands for one that the schema doesn't name.

    `table`, (C, 5), tells `fields.parse` what to do with each.
    """

    names: Sequence[str]
    columns: Sequence[Column | None]
    table: np.ndarray


class Layouts:
    """The layouts of files by one schema.

    Parameters
    ----------
    schema : Schema
    labels : bool
        Whether labels and weights are read. If not, a file may lack them.

    Examples
    --------
    >>> from pathlib import Path
    >>> schema = Schema([Column("item", "categorical", "hex"), Column("click", "label")],
    ...                 delimiter=",", header=True)
    >>> nothing = np.zeros(0, np.uint8), np.zeros(1, np.int64)
    >>> layout = Layouts(schema, labels=True).of(Lines(Path("a"), b"click,day,item", 1, *nothing))
    >>> layout.names, [column and column.kind for column in layout.columns]
    (['click', 'day', 'item'], ['label', None, 'categorical'])
    """

    def __init__(self, schema: Schema, labels: bool) -> None:
        self._schema, self._labels = schema, labels
        self._known: dict[bytes, Layout] = {}  # by first lines
        columns, self._bare = schema.columns, []
        if not labels:  # labels are unknown before weights are
            for lacking in (("label",), ("label", "weight")):
                columns = [column for column in columns if column.kind not in lacking]
                self._bare.append(self._layout([column.name for column in columns], columns))
        self._whole = self._layout([column.name for column in schema.columns], schema.columns)

    def of(self, lines: Lines) -> Layout:
        """Return the layout of the file that lines are of.

        Raises
        ------
        ValueError
            The file's header lacks a column, or has it twice.
        """
        layout = self._known.get(lines.header)
        if layout is None:
            first = split(lines.header, self._schema)
            layout = self._named(first, lines) if self._schema.header else self._wide(len(first))
            self._known[lines.header] = layout
        return layout

    def _wide(self, width: int) -> Layout:
        """That of a file without header: all columns, unless it has just as many as a bare one."""
        return next((bare for bare in self._bare if len(bare.names) == width), self._whole)

    def _named(self, first: list[bytes], lines: Lines) -> Layout:
        names = [(content(name) or name).decode("utf-8", "backslashreplace") for name in first]
        columns = {column.name: column for column in self._schema.columns}
        counts = collections.Counter(names)
        unread = ("ignore",) if self._labels else ("ignore", "label", "weight")
        for name, column in columns.items():
            if column.kind not in unread and counts[name] != 1:
                raise ValueError(
                    f"{lines.path}, line 1, column {name!r}: must be there once, for the schema "
                    f"names it, got {counts[name]} of that name among {len(names)} columns: "
                    f"{errors.few(names)}."
                )
        return self._layout(names, [columns.get(name) for name in names])

    def _layout(self, names: Sequence[str], columns: Sequence[Column | None]) -> Layout:
        schema = self._schema
        dense = _places(column.name for column in schema.columns if column.kind == "numeric")
        tables, tasks = _places(schema.table_names), _places(schema.task_names)
        rows = []
        for column in columns:
            kind = column.kind if column is not None else "ignore"
            row = (fields.IGNORE, 0, 0, -1, -1)
            if kind == "categorical":
                separator = ord(column.separator) if column.bag else -1
                row = (fields.ENCODINGS[column.encoding], tables[column.table], 0, -1, separator)
            elif kind == "numeric":
                bucket = tables.get(column.table, -1)
                logarithm = column.transform == "log"
                row = (fields.NUMERIC, dense[column.name], logarithm, bucket, -1)
            elif kind == "label" and self._labels:
                row = (fields.LABEL, tasks[column.name], 0, -1, -1)
            elif kind == "weight" and self._labels:
                row = (fields.WEIGHT, 0, 0, -1, -1)
            rows.append(row)
        return Layout(names, columns, np.array(rows, np.int64))


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def split(line: bytes, schema: Schema) -> list[bytes]:
    """Return the fields of a line as they stand in it.

    Examples
    --------
    >>> schema = Schema([Column("item", "categorical", "hex")], delimiter=",", quotes=True)
    >>> split(b'a,"b,""c",d', schema)
    [b'a', b'"b,""c"', b'd']
    """
    delimiter = schema.delimiter.encode()
    if not schema.quotes:
        return line.split(delimiter)
    field = re.compile(rb'(?:"(?:[^"]|"")*(?:"|\Z))?[^%b]*' % re.escape(delimiter))
    found, at = [], 0
    while at <= len(line):
        found.append(field.match(line, at).group())
        at += len(found[-1]) + 1
    return found


def content(field: bytes) -> bytes | None:
    """Return what a field says that may stand in quotes, None if it doesn't end with its quote.

    Examples
    --------
    >>> content(b"a"), content(b'"a""b"'), content(b'"a')
    (b'a', b'a"b', None)
    """
    if not field.startswith(b'"'):
        return field
    return field[1:-1].replace(b'""', b'"') if _QUOTED.fullmatch(field) else None
