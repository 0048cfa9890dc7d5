"""Arrow's columns to rows: record batches become the arrays of a batch, in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cupyrec import errors
from cupyrec.data import columns, fields
from cupyrec.data.batch import Batch
from cupyrec.data.schema import Column, Schema
from cupyrec.data.text_ids import text_ids
from cupyrec.ragged import Bags

__all__ = ["ArrowReader", "Block", "Records", "batched", "is_text"]

#: Types that the loops read as they are; others are cast first.
_TYPES = {
    pa.int32().id: columns.INT32, pa.int64().id: columns.INT64,
    pa.float32().id: columns.FLOAT32, pa.float64().id: columns.FLOAT64,
}  # fmt: skip
_TEXTS = {
    pa.string().id, pa.large_string().id, pa.string_view().id,
    pa.binary().id, pa.large_binary().id, pa.binary_view().id,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Records:
    """Some rows of a file or table.

    Attributes
    ----------
    where : str
        What sentences call it.
    number : int
        That of the first of these rows, from 0.
    columns : pyarrow.RecordBatch

    Examples
    --------
    See `batched`.
    """

    where: str
    number: int
    columns: pa.RecordBatch


@dataclasses.dataclass(frozen=True)
class Block:
    """Records that `ArrowReader.block` has looked at, of which a batch has some rows.

    Attributes
    ----------
    records : Records
    values : dict
        By the number of a column what the loops read; it keeps what the table's addresses point to.
    table : (C, 9) int64
        What tells `columns.write` of the columns.
    start, stop : int
        The first row, and the one behind the last.

    Examples
    --------
    See `batched`.
    """

    records: Records
    values: dict[int, _Values]
    table: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def batched(blocks: Iterable[Block], sizes: Iterable[int]) -> Iterator[list[Block]]:
    """Yield as many rows at a time as `sizes` say, of one block or several.

    Examples
    --------
    >>> reader = ArrowReader(Schema([Column("x", "numeric")]), labels=False)
    >>> block = reader.block(Records("a.parquet", 0, pa.record_batch({"x": [1, 2, 3]})))
    >>> for some in batched([block, block], [2, 3]):
    ...     print([(part.start, part.stop) for part in some])
    [(0, 2)]
    [(2, 3), (0, 2)]
    """
    blocks, at, block = iter(blocks), 0, None
    for size in sizes:
        some = []
        while size:
            if block is None or at == block.stop:
                block = next(blocks)
                at = block.start
            stop = min(at + size, block.stop)
            if stop > at:
                some.append(dataclasses.replace(block, start=at, stop=stop))
            size, at = size - (stop - at), stop
        yield some


class ArrowReader:
    """Makes batches of record batches, by a schema.

    Columns are told apart by their names; others are not looked at.

    Parameters
    ----------
    schema : Schema
    labels : bool
        Whether batches carry labels, and weights if the schema has them.

    Attributes
    ----------
    columns : tuple of Column
        Those that are read.

    Examples
    --------
    >>> reader = ArrowReader(Schema([Column("item", "categorical", "hex")]), labels=False)
    >>> table = pa.record_batch({"price": [7, 8], "item": ["ff", None]})
    >>> reader.check(table.schema, "table")
    >>> reader.batch([reader.block(Records("table", 0, table))]).ids.tolist()
    [[255], [-9223372036854775808]]
    """

    def __init__(self, schema: Schema, labels: bool) -> None:
        ignored = ("ignore",) if labels else ("ignore", "label", "weight")
        self.columns = tuple(c for c in schema.columns if c.kind not in ignored)
        self._schema = schema
        self._known: _Known = {}
        self._tasks = len(schema.task_names) if labels else 0
        dense, tasks = iter(range(schema.num_dense)), iter(range(self._tasks))
        tables = {name: place for place, name in enumerate(schema.table_names)}
        rows = []
        for column in self.columns:
            table = tables.get(column.table, -1)
            if column.kind == "categorical":
                rows.append((columns.LIST if column.bag else columns.ID, table, 0, -1))
            elif column.kind == "numeric":
                rows.append((columns.NUMBER, next(dense), column.transform == "log", table))
            elif column.kind == "label":
                rows.append((columns.LABEL, next(tasks), 0, -1))
            else:
                rows.append((columns.WEIGHT, 0, 0, -1))
        self._layout = np.zeros((len(rows), 9), np.int64)
        self._layout[:, :4] = rows

    def check(self, given: pa.Schema, where: str) -> None:
        """Raise unless these columns are those that are to be read.

        Raises
        ------
        ValueError
            One is missing, or there twice.
        TypeError
            One has a type that doesn't go with its kind.
        """
        for column in self.columns:
            told = f"{where}, column {column.name!r}"
            indices = given.get_all_field_indices(column.name)
            if len(indices) != 1:
                raise ValueError(
                    f"{told}: must be there once, for the schema names it, got {len(indices)} of "
                    f"that name among {len(given)} columns: {errors.few(given.names)}."
                )
            type_ = given.field(indices[0]).type
            if rule := _broken(column, type_):
                raise TypeError(f"{told}: {rule}, got {type_}.")

    def block(self, records: Records) -> Block:
        """Look at columns once for all batches that have some of their rows.

        Raises
        ------
        ValueError
            A text is not one that its column may have.
        """
        table, values = self._layout.copy(), {}
        for number, column in enumerate(self.columns):
            array = records.columns.column(column.name)
            values[number] = _values(array, column, records, self._known)
            table[number, columns.TYPE :] = values[number].told()
        return Block(records, values, table, 0, records.columns.num_rows)

    def batch(self, some: Sequence[Block], first: int = 0, total: int = -1) -> Batch:
        """Return rows as a batch.

        Raises
        ------
        ValueError
            A value is not one that its column may have.
        """
        size = sum(map(len, some))
        dense = np.empty((size, self._schema.num_dense), np.float32)
        ids = np.empty((size, self._schema.num_tables), np.int64)
        labels = np.empty((size, self._tasks), np.float32)
        weights = np.empty((size, self._tasks * self._schema.has_weights), np.float32)
        row, bags = 0, [] if some else [_no_bags(ids.shape[1])]
        for block in some:
            end = row + len(block)
            arrays = (array[row:end] for array in (dense, ids, labels, weights))
            at, column = columns.write(block.table, block.start, *arrays)
            if column >= 0:
                raise ValueError(_sentence(block.records, self.columns[column], at))
            if self._schema.has_bags:
                bags.append(self._bags(block, ids[row:end]))
            row = end
        return Batch(
            dense,
            Bags.joined(bags) if self._schema.has_bags else ids,
            labels if self._tasks else None,
            first,
            total,
            weights if weights.shape[1] else None,
        )

    def _bags(self, block: Block, ids: np.ndarray) -> Bags:
        """Bags of rows whose ids of scalar columns are written."""
        rows, tables = ids.shape
        lengths, lists = np.ones((rows, tables), np.int64), np.zeros((tables, 3), np.int64)
        part = slice(block.start, block.stop)
        for number, values in block.values.items():
            if values.lengths is not None:
                place = self._layout[number, columns.PLACE]
                lengths[:, place] = values.lengths[part]
                arrays = values.ids, values.starts[part], values.lengths[part]
                lists[place] = [array.ctypes.data for array in arrays]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        flat = np.empty(offsets[-1], np.int64)
        columns.fill(ids, lists, flat)
        return Bags(flat, offsets, tables)


#: By column, the last dictionary and its ids: the next rows most often have the same.
_Known = dict[str, tuple[pa.Array, np.ndarray]]


class _Values(NamedTuple):
    """What the loops read of a column: an array of a type that they know, ids, an array of places
    among ids, or lists of ids."""

    array: pa.Array | None = None
    ids: np.ndarray | None = None
    starts: np.ndarray | None = None
    lengths: np.ndarray | None = None

    def told(self) -> tuple[int, int, int, int, int]:
        """Type, address of the values, that of their validity bits or 0, first of these bits,
        address of the ids among which the values are places or 0."""
        ids = 0 if self.ids is None else self.ids.ctypes.data
        if self.array is None:
            return columns.INT64, ids, 0, 0, 0
        bits, values = self.array.buffers()
        width, first = self.array.type.bit_width // 8, self.array.offset
        address = values.address + first * width if values is not None else 0
        holes = bits.address if bits is not None and self.array.null_count else 0
        return _TYPES[self.array.type.id], address, holes, first, ids


def _values(array: pa.Array, column: Column, records: Records, known: _Known) -> _Values:
    """A column as the loops read it."""
    if column.kind != "categorical":
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.type.id not in _TYPES:
            array = array.cast(pa.float64(), safe=False)  # as a field of text is read
        return _Values(array)
    if not column.bag:
        return _ids(array, column, records, known)
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.null()))
    if pa.types.is_fixed_size_list(array.type):
        starts = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    else:
        starts = array.offsets.to_numpy().astype(np.int64)
    elements = array.values.slice(starts[0], starts[-1] - starts[0])
    lengths = np.diff(starts)
    if array.null_count:
        lengths[~array.is_valid().to_numpy(zero_copy_only=False)] = 0
    starts = starts[:-1] - starts[0]
    ids = _all_ids(elements, column, records, known, starts)
    return _Values(ids=ids, starts=starts, lengths=lengths)


def _ids(
    array: pa.Array,
    column: Column,
    records: Records,
    known: _Known,
    starts: np.ndarray | None = None,
) -> _Values:
    """A categorical column; of the elements of lists it is told where each of these starts."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        words = _without_views(array.dictionary)
        if not len(words):  # all are missing
            return _Values(ids=np.full(len(array), fields.MISSING))
        if column.name not in known or not _same(known[column.name][0], words):
            try:
                known[column.name] = words, _all_ids(words, column, records, known)
            except ValueError:  # of a word that these rows need not have
                return _ids(words.take(array.indices), column, records, known, starts)
        places = array.indices
        return _Values(places if places.type.id in _TYPES else places.cast(pa.int64()),
                       known[column.name][1])  # fmt: skip
    if kind.id in _TYPES:
        return _Values(array)
    if pa.types.is_uint64(kind):
        return _Values(array.view(pa.int64()))
    if not is_text(kind):
        return _Values(array.cast(pa.int64()))
    array = _without_views(array)
    large = array.type.id in (pa.large_string().id, pa.large_binary().id)
    bits, offsets, data = array.buffers()
    ids = np.empty(len(array), np.int64)
    if len(array):
        offsets = np.frombuffer(offsets, np.int64 if large else np.int32)
        offsets = offsets[array.offset : array.offset + len(array) + 1]
        data = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        holes = bits is not None and array.null_count
        bits = np.frombuffer(bits, np.uint8) if holes else np.empty(0, np.uint8)
        bad = text_ids(data, offsets, bits, array.offset, fields.ENCODINGS[column.encoding], ids)
        if bad >= 0:
            row = bad if starts is None else np.searchsorted(starts, bad, "right") - 1
            raise ValueError(
                f"{records.where}, row {records.number + row}, column {column.name!r}: "
                f"{fields.RULES[column.encoding]}, got {fields.shown(array[bad].as_py())}."
            )
    return _Values(ids=ids)


def _same(a: pa.Array, b: pa.Array) -> bool:
    """Whether two arrays have the same bytes, which is told sooner than by each of their values."""
    if a.type.id != b.type.id or (len(a), a.offset) != (len(b), b.offset):
        return False
    pairs = zip(a.buffers(), b.buffers(), strict=True)
    return all(x is y if x is None or y is None else x.equals(y) for x, y in pairs)


def _all_ids(array: pa.Array, column: Column, *more: Any) -> np.ndarray:
    """The same as ids, (N,) int64."""
    values = _ids(array, column, *more)
    if values.array is None:
        return values.ids
    table, out = np.zeros((1, 9), np.int64), np.empty((len(array), 1), np.int64)
    table[0, columns.TYPE :] = values.told()
    none = np.empty((len(array), 0), np.float32)
    columns.write(table, 0, none, out, none, none)
    return out[:, 0]


def _sentence(records: Records, column: Column, at: int) -> str:
    value = records.columns.column(column.name)[at].as_py()
    told = "a null" if value is None else repr(value)
    where = f"{records.where}, row {records.number + at}, column {column.name!r}"
    return f"{where}: {fields.RULES[column.kind]}, got {told}."


def _no_bags(tables: int) -> Bags:
    return Bags(np.empty(0, np.int64), np.zeros(1, np.int64), tables)


def _without_views(array: pa.Array) -> pa.Array:
    view = pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type)
    return array.cast(pa.large_binary()) if view else array


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is strings or bytes, of any lengths.

    Examples
    --------
    >>> is_text(pa.string()), is_text(pa.int8())
    (True, False)
    """
    return kind.id in _TEXTS


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def _broken(column: Column, kind: pa.DataType) -> str | None:
    """The rule that a column of this type breaks."""
    t = pa.types
    if column.bag and not t.is_null(kind):
        if not _is_list(kind):
            return "must be a list, as its 'bag' is true"
        kind = kind.value_type
    if t.is_dictionary(kind):
        kind = kind.value_type
    whole = t.is_integer(kind) or t.is_boolean(kind) or t.is_null(kind)
    if column.kind != "categorical":
        number = whole or t.is_floating(kind) or t.is_decimal(kind)
        return None if number else f"must be numbers, as its 'kind' is {column.kind}"
    if is_text(kind) or t.is_null(kind) or (whole and column.encoding == "integer"):
        return None
    if _is_list(kind) and not column.bag:
        return "must not be a list, as its 'bag' is not true"
    told = "integers or text" if column.encoding == "integer" else "text"
    return f"must be {told}, as its 'encoding' is {column.encoding}"
