"""NumPy files of dense values, sparse ids and labels, mapped into memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyrec import errors
from cupyrec.data.batch import Batch, share_of
from cupyrec.data.log_files import Paths, check_unchanged, log_files, state_of
from cupyrec.data.schema import Column, Schema

__all__ = ["NumPyFiles"]

_PARTS = "dense", "sparse", "labels"


class NumPyFiles:
    """Rows of ``.npy`` files in the layout of Criteo's 1TB log: ``day_0_dense.npy``, ``_sparse``
    and ``_labels``, then ``day_1``'s.

    They are mapped into memory: what is read is what batches have, and of several ranks each reads
    its own rows.

    Parameters
    ----------
    paths : path or sequence of paths
        Prefixes, as ``day_0``, or files, of which those of the same prefix are found. Dense values
        are (N, num_dense) floats, sparse ids (N, num_tables) integers of which uint64 keeps its
        bits, labels (N,) or (N, 1) numbers, 0 or 1.
    schema : Schema, optional
        That these columns must go with: numeric ones without a transform or buckets, integer
        categorical ones, a label. None: names are I1, I2, ... and C1, C2, ...
    labels : bool
        Whether batches carry labels. If not, no file of them is needed.

    Attributes
    ----------
    num_dense, num_tables : int
        Values and ids in a row.
    schema : Schema

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        A path is no file, nor are there files of that prefix.
    TypeError
        An array has another dtype.
    ValueError
        A file is no whole .npy file; an array has another shape, number of rows or of columns.
        While reading: a value is not finite, a label not 0 or 1, or a file has changed since.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for day in "day_0", "day_1":
    ...         np.save(Path(folder, f"{day}_dense.npy"), np.ones((3, 1), np.float32))
    ...         np.save(Path(folder, f"{day}_sparse.npy"), np.arange(3, dtype=np.int32)[:, None])
    ...         np.save(Path(folder, f"{day}_labels.npy"), np.zeros(3))
    ...     data = NumPyFiles([Path(folder, "day_0"), Path(folder, "day_1")])
    ...     [batch.ids.ravel().tolist() for batch in data.batches(4)]
    [[0, 1, 2, 0], [1, 2]]
    """

    def __init__(self, paths: Paths, schema: Schema | None = None, *, labels: bool = True) -> None:
        self._names = _PARTS[: 3 if labels else 2]
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        prefixes = list(dict.fromkeys(map(_prefix, paths)))
        self.paths = log_files("NumPyFiles", [
            f"{prefix}_{name}.npy" for prefix in prefixes for name in self._names
        ])  # fmt: skip
        self._states = {path: state_of(path) for path in self.paths}
        width = len(self._names)
        self._days = [_open(self.paths[at : at + width]) for at in range(0, len(self.paths), width)]
        self.num_dense = self._days[0].arrays[0].shape[1]
        self.num_tables = self._days[0].arrays[1].shape[1]
        for day in self._days:
            for path, array, columns in zip(
                day.paths, day.arrays, (self.num_dense, self.num_tables, 1), strict=False
            ):
                if array.shape[1] != columns:
                    raise ValueError(f"{path}: must have {columns} columns, got {array.shape[1]}.")
        self.schema = self._inferred() if schema is None else schema
        if schema is not None:
            self._check(schema)
        self.task_names = self.schema.task_names
        self.labels = labels
        self._ends = np.cumsum([len(day) for day in self._days])
        self._rank, self._ranks = 0, 1

    def of_rank(self, rank: int, ranks: int) -> NumPyFiles:
        """Return the dataset for one of several ranks: its rows of each batch, see `Batch.of_rank`.

        Raises
        ------
        ValueError, TypeError
            No such rank.
        """
        part = copy.copy(self)
        part._rank, part._ranks = errors.rank("NumPyFiles.of_rank", rank, ranks)
        return part

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over, unread.

        Yields
        ------
        Batch
            Arrays of its own; they stay valid.
        """
        size = errors.positive("NumPyFiles.batches", "batch_size", batch_size)
        skip = errors.count("NumPyFiles.batches", "skip", skip)
        check_unchanged(self._states)
        rows = int(self._ends[-1])
        starts = range(skip * size, rows, size)
        return (self._batch(start, min(start + size, rows)) for start in starts)

    def _batch(self, start: int, stop: int) -> Batch:
        first, last = share_of(stop - start, self._rank, self._ranks)
        parts, at, stop_at = [], start + first, start + last
        for day, end in zip(self._days, self._ends.tolist(), strict=True):
            begin = end - len(day)
            low, high = max(at, begin), min(stop_at, end)
            if low < high:
                parts.append(day.rows(low - begin, high - begin))
        if not parts:
            parts = [self._days[0].rows(0, 0)]
        arrays = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Batch(*arrays, first=first, total=stop - start)

    def _inferred(self) -> Schema:
        numbers = [Column(f"I{i + 1}", "numeric") for i in range(self.num_dense)]
        ids = [Column(f"C{i + 1}", "categorical", "integer") for i in range(self.num_tables)]
        return Schema((Column("label", "label"), *numbers, *ids))

    def _check(self, schema: Schema) -> None:
        """Raise unless the schema says of these columns what they are."""
        where = self.paths[0]
        for column in schema.columns:
            changed = column.transform != "none" or column.buckets or column.bag
            if changed or column.kind == "weight" or column.encoding in ("hex", "string"):
                raise ValueError(
                    f"{where}, column {column.name!r}: of .npy files it must be a label, plain "
                    f"numbers or integer ids, got {column}."
                )
        tasks = len(schema.task_names)
        if tasks != 1:
            raise ValueError(f"{where}: its schema must have one label, got {tasks}.")
        counts = schema.num_dense, schema.num_tables
        if counts != (self.num_dense, self.num_tables):
            raise ValueError(
                f"{where}: must have {counts[0]} values and {counts[1]} ids as the schema has, "
                f"got {self.num_dense} and {self.num_tables}."
            )


class _Day(NamedTuple):
    """Files of one prefix."""

    paths: Sequence[Path]
    arrays: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def rows(self, start: int, stop: int) -> list[np.ndarray]:
        """Copies as a batch has them, of values that have been checked."""
        dense, ids, *labels = (array[start:stop] for array in self.arrays)
        with np.errstate(over="ignore"):  # told of below
            dense = dense.astype(np.float32)
        self._check(0, "must be finite numbers", np.isfinite(dense), start)
        ids = ids.astype(np.int64)  # of uint64 it keeps the bits
        for some in labels:
            self._check(2, "labels must be 0 or 1", (some == 0) | (some == 1), start)
        return [dense, ids, *(some.astype(np.float32) for some in labels)]

    def _check(self, number: int, rule: str, good: np.ndarray, start: int) -> None:
        if not good.all():
            row, column = np.unravel_index(np.argmin(good), good.shape)
            value = self.arrays[number][start + row, column]
            raise ValueError(
                f"{self.paths[number]}, row {start + row}, column {column}: {rule}, got {value}."
            )


def _prefix(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    endings = [f"_{name}.npy" for name in _PARTS if text.endswith(f"_{name}.npy")]
    return text.removesuffix(endings[0]) if endings else text


def _open(paths: Sequence[Path]) -> _Day:
    arrays = []
    for path, kinds, told in zip(
        paths, ("f", "iu", "biuf"), ("floats", "integers", "numbers"), strict=False
    ):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, OverflowError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"{path}: must be a whole .npy file, got: {said}.") from None
        if array.dtype.kind not in kinds:
            raise TypeError(f"{path}: must be {told}, got {array.dtype}.")
        if told == "numbers" and array.ndim == 1:
            array = array[:, None]
        if array.ndim != 2:
            raise ValueError(f"{path}: must have rows and columns, got shape {array.shape}.")
        if not len(array):
            raise ValueError(f"{path}: must have at least one row, got none.")
        if arrays and len(array) != len(arrays[0]):
            raise ValueError(
                f"{path}: must have {len(arrays[0])} rows as {paths[0].name} has, got {len(array)}."
            )
        arrays.append(array)
    return _Day(paths, arrays)
