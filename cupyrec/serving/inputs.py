"""Tensors of a request to what a model takes: made ready by the client, or a schema's columns."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cupyrec.data import Schema
from cupyrec.data.arrow import ArrowReader, Records
from cupyrec.ragged import Bags
from cupyrec.serving.open_inference import Tensor, column_of, joined, numbers_of

__all__ = ["Inputs"]

_LENGTHS = ".lengths"  # of a bag column, behind its name


class Inputs:
    """What a model takes, in two forms.

    Made ready there are ``dense`` (B, N) of FP32 or FP64, ``ids`` (B, F) of any integers, and for
    bags ``ids`` (V,) with ``lengths`` (B, F). Else there is a tensor of each column of the schema,
    (B,) or (B, 1), converted as data frames are; of bags (B, L), or (V,) with ``NAME.lengths``
    (B,). Labels and weights need not be given.

    Requests are `measured` first; `arrays` then converts those of one form together, for which many
    small ones take hardly more time than one does.

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
    >>> rows, form = inputs.measured({"age": age, "item": item})
    >>> rows
    2
    >>> inputs.arrays([{"age": age, "item": item}])
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

    def measured(self, inputs: Mapping[str, Tensor]) -> tuple[int, Hashable]:
        """Return how many rows tensors have, and what they have in common with those of their form.

        Only names and shapes are looked at, which takes no longer for many rows.

        Raises
        ------
        ValueError
            A tensor is missing, is none of those above, or has another shape.
        """
        if self._are_columns(inputs):
            return self._measured_columns(inputs)
        return self._measured_ready(inputs)

    def arrays(
        self, requests: Sequence[Mapping[str, Tensor]]
    ) -> tuple[np.ndarray, np.ndarray | Bags]:
        """Return the (B, N) float32 and (B, F) int64 or bags of measured requests of one form.

        Raises
        ------
        ValueError, TypeError
            A tensor has another type, or a value that its column may not have. Of several requests
            the sentence doesn't tell which one has it, nor in which of its rows.
        """
        with np.errstate(over="ignore"):  # what becomes infinite by it is refused then
            if self._are_columns(requests[0]):
                return self._of_columns(requests)
            return self._ready(requests)

    def _are_columns(self, inputs: Mapping[str, Tensor]) -> bool:
        return not self._columns.keys().isdisjoint(inputs)

    def _needed(self) -> list[str]:
        """Names of what is made ready."""
        needed = ["dense"] * bool(self.num_dense) + ["ids"] * bool(self.num_tables)
        return needed + ["lengths"] * self.has_bags

    def _measured_ready(self, inputs: Mapping[str, Tensor]) -> tuple[int, Hashable]:
        needed = self._needed()
        if inputs.keys() != {*needed}:
            ready, got = ", ".join(needed), _names(inputs)
            if self._columns:
                raise ValueError(f"inputs: must be columns of the schema or {ready}, got {got}.")
            raise ValueError(f"inputs: must be {ready}, got {got}.")
        widths = {"dense": self.num_dense, "lengths": self.num_tables}
        widths["ids"] = None if self.has_bags else self.num_tables
        rows = {}
        for name in needed:
            shape, width = inputs[name].shape, widths[name]
            if width is None and len(shape) != 1:
                raise ValueError(f"input '{name}': 'shape' must be [V], got {[*shape]}.")
            if width is not None and (len(shape) != 2 or width not in (-1, shape[1])):
                raise ValueError(f"input '{name}': 'shape' must be [B, {width}], got {[*shape]}.")
            if width is not None:
                rows[name] = shape[0]
        dense, *others = rows.values()
        if others and dense != others[0]:
            raise ValueError(
                f"inputs: must have as many rows each, got {dense} of 'dense' and {others[0]} of "
                "'ids'."
            )
        return dense, tuple(_form(name, inputs[name]) for name in needed)

    def _measured_columns(self, inputs: Mapping[str, Tensor]) -> tuple[int, Hashable]:
        form, rows, others = [], set(), inputs.keys() - self._columns.keys()
        for column in self._reader.columns:
            name = column.name
            if name not in inputs:
                raise ValueError(
                    f"inputs: must have the column {name!r} of the schema, got {_names(inputs)}."
                )
            tensor, counted = inputs[name], inputs[name]
            if not column.bag:
                _check_scalars(name, tensor.shape)
            elif name + _LENGTHS in others:
                others.remove(name + _LENGTHS)
                counted = inputs[name + _LENGTHS]
                _check_lists(name, tensor.shape, counted.shape)
                form.append(_form(name + _LENGTHS, counted))
            else:
                _check_lists(name, tensor.shape)
            rows.add(counted.shape[0])
            form.append(_form(name, tensor))
        if others:
            raise ValueError(f"inputs: must be columns of the schema, got {_names(others)}.")
        if len(rows) > 1:
            raise ValueError(f"inputs: must have as many rows each, got {sorted(rows)}.")
        return rows.pop(), tuple(form)

    def _ready(
        self, requests: Sequence[Mapping[str, Tensor]]
    ) -> tuple[np.ndarray, np.ndarray | Bags]:
        dense = ids = None
        if self.num_dense:
            tensor = _joined("dense", requests)
            dense = numbers_of("dense", tensor)
            if dense.dtype.kind != "f":
                raise TypeError(f"input 'dense': must be FP32 or FP64, got {tensor.datatype}.")
            dense = dense.astype(np.float32, copy=False)
            if not np.isfinite(dense).all():
                raise ValueError(
                    "input 'dense': must be finite numbers of 32 bits, got "
                    f"{np.count_nonzero(~np.isfinite(dense))} that are not."
                )
        if self.num_tables:
            ids = _ids("ids", requests)
            if self.has_bags:
                lengths = _ids("lengths", requests)
                ids = Bags(ids, _offsets("ids", "lengths", lengths, requests), self.num_tables)
        if dense is None:
            dense = np.empty((len(ids), 0), np.float32)
        if ids is None:
            ids = np.empty((len(dense), 0), np.int64)
        return dense, ids

    def _of_columns(
        self, requests: Sequence[Mapping[str, Tensor]]
    ) -> tuple[np.ndarray, np.ndarray | Bags]:
        arrays = {}
        for column in self._reader.columns:
            tensor = _joined(column.name, requests)
            array = column_of(column.name, tensor)
            if column.bag:
                array = _lists(column.name, array, tensor, requests)
            arrays[column.name] = array
        records = pa.RecordBatch.from_pydict(arrays)
        if records.schema != self._checked:  # most have the same types as those before
            self._reader.check(records.schema, "inputs")
            self._checked = records.schema
        batch = self._reader.batch([self._reader.block(Records("inputs", 0, records))])
        return batch.dense, batch.ids


def _form(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """What tensors that can be joined have in common."""
    datatype, shape, data = tensor
    kind = data.dtype if isinstance(data, np.ndarray) else type(data)
    return name, datatype, shape[1:], kind


def _joined(name: str, requests: Sequence[Mapping[str, Tensor]]) -> Tensor:
    return joined(name, [request[name] for request in requests])


def _names(inputs: Any) -> str:
    names = sorted(inputs)
    shown = ", ".join(repr(name[:60]) for name in names[:8])
    return shown + ", ..." * (len(names) > 8) if names else "none"


def _ids(name: str, requests: Sequence[Mapping[str, Tensor]]) -> np.ndarray:
    """Integers as int64, of which unsigned ones keep their bits."""
    tensor = _joined(name, requests)
    array = numbers_of(name, tensor)
    if array.dtype.kind == "f":
        raise TypeError(f"input '{name}': must be integers, got {tensor.datatype}.")
    return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)


def _offsets(
    of: str, name: str, lengths: np.ndarray, requests: Sequence[Mapping[str, Tensor]]
) -> np.ndarray:
    """Where each of some lists begins, and the last one ends; each request has its own elements."""
    lengths = lengths.ravel()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    counts = np.cumsum([math.prod(request[name].shape) for request in requests])
    totals = np.cumsum([request[of].shape[0] for request in requests])
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    # where none is larger than all together, no sum overflows
    if low < 0 or high > totals[-1] or (offsets[counts] != totals).any():
        raise ValueError(
            f"input {name!r}: must be at least 0 and add up to the {totals[-1]} that there are, "
            f"got {low} to {high}."
        )
    return offsets


def _check_scalars(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 2 and shape[1] != 1:
        raise ValueError(f"input {name!r}: 'shape' must be [B] or [B, 1], got {[*shape]}.")


def _check_lists(name: str, shape: tuple[int, ...], lengths: tuple[int, ...] | None = None) -> None:
    if lengths is None:
        if len(shape) != 2 or not shape[1]:  # else B might be any number
            raise ValueError(
                f"input {name!r}: 'shape' must be [B, L] with L of at least 1, or there must be "
                f"'{name}{_LENGTHS}', got {[*shape]}."
            )
    elif len(shape) != 1 or len(lengths) != 1:
        raise ValueError(
            f"input {name!r}: 'shape' must be [V], and that of '{name}{_LENGTHS}' [B], got "
            f"{[*shape]} and {[*lengths]}."
        )


def _lists(
    name: str, array: pa.Array, tensor: Tensor, requests: Sequence[Mapping[str, Tensor]]
) -> pa.Array:
    if len(tensor.shape) == 2:
        rows, width = tensor.shape
        offsets = np.arange(rows + 1, dtype=np.int64) * width
    else:
        lengths = _ids(name + _LENGTHS, requests)
        offsets = _offsets(name, name + _LENGTHS, lengths, requests)
    return pa.LargeListArray.from_arrays(offsets, array)
