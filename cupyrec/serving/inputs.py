"""Tensors of a request to what a model takes: made ready by the client, or a schema's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cupyrec.data import Schema
from cupyrec.data.arrow import ArrowReader, Records
from cupyrec.ragged import Bags
from cupyrec.serving.open_inference import Tensor, column_of, numbers_of

__all__ = ["Inputs"]

_LENGTHS = ".lengths"  # of a bag column, behind its name


class Inputs:
    """What a model takes, in two forms.

    Made ready there are ``dense`` (B, N) of FP32 or FP64, ``ids`` (B, F) of any integers, and for
    bags ``ids`` (V,) with ``lengths`` (B, F). Else there is a tensor of each column of the schema,
    (B,) or (B, 1), converted as data frames are; of bags (B, L), or (V,) with ``NAME.lengths``
    (B,). Labels and weights need not be given.

    Parameters
    ----------
    schema : Schema, optional
        Without it only inputs made ready are taken.
    num_dense, num_tables : int
        -1 of `num_dense` if any number of them is taken.
    has_bags : bool

    Examples
    --------
    >>> from cupyrec.data import Column
    >>> schema = Schema([Column("age", "numeric"), Column("item", "categorical", "hex")])
    >>> inputs = Inputs(schema, 1, 1, False)
    >>> age, item = Tensor("INT32", (2,), [33, None]), Tensor("BYTES", (2,), ["ff", "a"])
    >>> inputs.arrays({"age": age, "item": item})
    (array([[33.],
           [ 0.]], dtype=float32), array([[255],
           [ 10]]))
    """

    def __init__(
        self, schema: Schema | None, num_dense: int, num_tables: int, has_bags: bool
    ) -> None:
        self.num_dense, self.num_tables, self.has_bags = num_dense, num_tables, has_bags
        self._columns: dict[str, Any] = {}
        if schema is not None:
            self._columns = {column.name: column for column in schema.columns}
            self._reader = ArrowReader(schema, labels=False)  # whom Frame has read, too
            self._checked: pa.Schema | None = None

    def metadata(self) -> list[dict[str, Any]]:
        """Return what the protocol tells of the inputs: columns, or without a schema those ready.

        Examples
        --------
        >>> Inputs(None, 2, 0, False).metadata()
        [{'name': 'dense', 'datatype': 'FP32', 'shape': [-1, 2]}]
        """
        if self._columns:
            datatypes = {None: "FP32", "integer": "INT64", "hex": "BYTES", "string": "BYTES"}
            return [
                {"name": column.name, "datatype": datatypes[column.encoding],
                 "shape": [-1, -1] if column.bag else [-1]}
                for column in self._reader.columns
            ]  # fmt: skip
        told = [("dense", "FP32", [-1, self.num_dense], self.num_dense)]
        shape = [-1] if self.has_bags else [-1, self.num_tables]
        told += [("ids", "INT64", shape, self.num_tables)]
        told += [("lengths", "INT64", [-1, self.num_tables], self.has_bags)]
        return [
            {"name": name, "datatype": datatype, "shape": shape}
            for name, datatype, shape, there in told
            if there
        ]

    def arrays(self, inputs: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray | Bags]:
        """Return the (B, N) float32 and (B, F) int64 or bags that tensors stand for.

        Raises
        ------
        ValueError, TypeError
            A tensor is missing, is none of those above, or has another type or shape, or a value
            that its column may not have.
        """
        with np.errstate(over="ignore"):  # what becomes infinite by it is refused then
            if inputs.keys() & self._columns.keys():
                return self._of_columns(inputs)
            return self._ready(inputs)

    def _ready(self, inputs: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray | Bags]:
        needed = ["dense"] * bool(self.num_dense) + ["ids"] * bool(self.num_tables)
        needed += ["lengths"] * self.has_bags
        if inputs.keys() != {*needed}:
            ready, got = ", ".join(needed), _names(inputs)
            if self._columns:
                raise ValueError(f"inputs: must be columns of the schema or {ready}, got {got}.")
            raise ValueError(f"inputs: must be {ready}, got {got}.")
        dense = ids = None
        if self.num_dense:
            dense = _two("dense", numbers_of("dense", inputs["dense"]), self.num_dense)
            if dense.dtype.kind != "f":
                raise TypeError(
                    f"input 'dense': must be FP32 or FP64, got {inputs['dense'].datatype}."
                )
            dense = dense.astype(np.float32, copy=False)
            if not np.isfinite(dense).all():
                raise ValueError(
                    "input 'dense': must be finite numbers of 32 bits, got "
                    f"{np.count_nonzero(~np.isfinite(dense))} that are not."
                )
        if self.num_tables:
            ids = _ids("ids", inputs["ids"])
            if self.has_bags:
                ids = _bags(ids, _ids("lengths", inputs["lengths"]), self.num_tables)
            else:
                ids = _two("ids", ids, self.num_tables)
        rows = len(dense if ids is None else ids)
        if dense is None:
            dense = np.empty((rows, 0), np.float32)
        if ids is None:
            ids = np.empty((rows, 0), np.int64)
        if len(dense) != rows:
            raise ValueError(
                f"inputs: must have as many rows each, got {len(dense)} of 'dense' and {rows} of "
                "'ids'."
            )
        return dense, ids

    def _of_columns(self, inputs: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray | Bags]:
        arrays, others = {}, {*inputs} - self._columns.keys()
        for column in self._reader.columns:
            if column.name not in inputs:
                raise ValueError(
                    f"inputs: must have the column {column.name!r} of the schema, "
                    f"got {_names(inputs)}."
                )
            tensor, lengths = inputs[column.name], None
            if column.bag and column.name + _LENGTHS in others:
                others.remove(column.name + _LENGTHS)
                lengths = inputs[column.name + _LENGTHS]
            array = column_of(column.name, tensor)
            arrays[column.name] = (
                _lists(column.name, array, tensor, lengths)
                if column.bag
                else _scalars(column.name, array, tensor)
            )
        if others:
            raise ValueError(f"inputs: must be columns of the schema, got {_names(others)}.")
        rows = {len(array) for array in arrays.values()}
        if len(rows) > 1:
            raise ValueError(f"inputs: must have as many rows each, got {sorted(rows)}.")
        records = pa.RecordBatch.from_pydict(arrays)
        if records.schema != self._checked:  # most have the same types as those before
            self._reader.check(records.schema, "inputs")
            self._checked = records.schema
        batch = self._reader.batch([self._reader.block(Records("inputs", 0, records))])
        return batch.dense, batch.ids


def _names(inputs: Any) -> str:
    names = sorted(inputs)
    shown = ", ".join(repr(name[:60]) for name in names[:8])
    return shown + ", ..." * (len(names) > 8) if names else "none"


def _two(name: str, array: np.ndarray, width: int) -> np.ndarray:
    if array.ndim != 2 or width not in (-1, array.shape[1]):
        raise ValueError(f"input '{name}': 'shape' must be [B, {width}], got {list(array.shape)}.")
    return array


def _ids(name: str, tensor: Tensor) -> np.ndarray:
    """Integers as int64, of which unsigned ones keep their bits."""
    array = numbers_of(name, tensor)
    if array.dtype.kind == "f":
        raise TypeError(f"input '{name}': must be integers, got {tensor.datatype}.")
    return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)


def _bags(ids: np.ndarray, lengths: np.ndarray, tables: int) -> Bags:
    """Ids side by side as bags of these lengths."""
    lengths = _two("lengths", lengths, tables)
    if ids.ndim != 1:
        raise ValueError(f"input 'ids': 'shape' must be [V], got {list(ids.shape)}.")
    return Bags(ids, _offsets("lengths", lengths.ravel(), len(ids)), tables)


def _offsets(name: str, lengths: np.ndarray, total: int) -> np.ndarray:
    """Where each of some lists begins, and the last one ends."""
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if low < 0 or high > total or int(lengths.sum()) != total:  # each is small: no sum overflows
        raise ValueError(
            f"input {name!r}: must be at least 0 and add up to the {total} that there are, got "
            f"{low} to {high}."
        )
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _scalars(name: str, array: pa.Array, tensor: Tensor) -> pa.Array:
    if len(tensor.shape) == 2 and tensor.shape[1] != 1:
        raise ValueError(
            f"input {name!r}: 'shape' must be [B] or [B, 1], got {list(tensor.shape)}."
        )
    return array


def _lists(name: str, array: pa.Array, tensor: Tensor, lengths: Tensor | None) -> pa.Array:
    if lengths is None:
        if len(tensor.shape) != 2 or not tensor.shape[1]:  # else B might be any number
            raise ValueError(
                f"input {name!r}: 'shape' must be [B, L] with L of at least 1, or there must be "
                f"'{name}{_LENGTHS}', got {list(tensor.shape)}."
            )
        rows, width = tensor.shape
        offsets = np.arange(rows + 1, dtype=np.int64) * width
    else:
        if len(tensor.shape) != 1 or len(lengths.shape) != 1:
            raise ValueError(
                f"input {name!r}: 'shape' must be [V], and that of '{name}{_LENGTHS}' [B], got "
                f"{list(tensor.shape)} and {list(lengths.shape)}."
            )
        offsets = _offsets(name + _LENGTHS, _ids(name + _LENGTHS, lengths), len(array))
    return pa.LargeListArray.from_arrays(offsets, array)
