"""Tables of a checkpoint as files that others read: ids and vectors, in Parquet or .npy.

export.json           the tables: files, number of ids, width
TABLE.parquet         id, vector (a list of D numbers), with states state.NAME (a list each)
TABLE.ids.npy         (N,); TABLE.vectors.npy (N, D); with states TABLE.state.NAME.npy

TABLE is the group's name, a dot, and the table's number.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors import safe_open

from cupyrec import __version__
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_files import new_folder, sync, write_file
from cupyrec.checkpoint_shards import (
    catch_up_history,
    count_ids,
    read_rows,
    served,
    served_groups,
)
from cupyrec.data import Schema

__all__ = ["columns_of", "export", "find_table"]

_OPEN = 64  # tables written at a time: a process has few files
_GROUP_BYTES = 8 << 20


class _NPY:
    """A table as one .npy for each part."""

    def __init__(self, folder: Path, name: str, parts: dict[str, tuple], ids: int) -> None:
        self.files = [folder / f"{name}.{part}.npy" for part in parts]
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open(file, "wb")) for file in self.files]
            self._streams = dict(zip(parts, opened, strict=True))
            for part, (dtype, shape) in parts.items():
                header = {"descr": dtype.str, "fortran_order": False, "shape": (ids, *shape)}
                np.lib.format.write_array_header_1_0(self._streams[part], header)
            self._stack = stack.pop_all()

    def write(self, values: dict[str, np.ndarray]) -> None:
        for part, stream in self._streams.items():
            stream.write(np.ascontiguousarray(values[part]).reshape(-1).view(np.uint8))

    def close(self) -> None:
        self._stack.close()


class _Parquet:
    """A table as one file, whose row groups are of 8 MB and more."""

    def __init__(self, folder: Path, name: str, parts: dict[str, tuple], ids: int) -> None:
        self.files, fields = [folder / f"{name}.parquet"], []
        for part, (dtype, shape) in parts.items():
            number = pa.from_numpy_dtype(dtype)
            column = {"ids": "id", "vectors": "vector"}.get(part, part)
            fields.append((column, pa.list_(number, *shape) if shape else number))
        self._kept: list[pa.RecordBatch] = []
        # Floats hardly repeat: a dictionary of them costs time and saves nothing.
        self._writer = parquet.ParquetWriter(self.files[0], pa.schema(fields), use_dictionary=False)

    def write(self, values: dict[str, np.ndarray]) -> None:
        columns = []
        for array in values.values():
            column = pa.array(array.reshape(-1))
            if array.ndim == 2:
                column = pa.FixedSizeListArray.from_arrays(column, array.shape[1])
            columns.append(column)
        self._kept.append(pa.record_batch(columns, schema=self._writer.schema))
        if sum(batch.nbytes for batch in self._kept) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._kept:
            self._writer.write_table(pa.Table.from_batches(self._kept))
        self._kept = []

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()


_WRITERS = {"parquet": _Parquet, "npy": _NPY}


def find_table(known: Iterable[str], name: str, columns: Sequence[str] = ()) -> str:
    """Return the one of these tables with this name, or if no other has it this number.

    `columns` are what the run's schema calls the tables, in the order of their numbers.

    Raises
    ------
    ValueError
        There is none, or more than one.

    Examples
    --------
    >>> find_table(["user.groups.8.0", "item.groups.8.0", "item.groups.8.1"], "1")
    'item.groups.8.1'
    """
    known = list(known)
    fit = [table for table in known if name in (table, table.rpartition(".")[2])]
    if not fit and name in columns:
        return find_table(known, str(columns.index(name)))
    if len(fit) != 1:
        names = list(columns) or known
        some = ", ".join(names[:6]) + ", ..." * (len(names) > 6)
        raise ValueError(
            f"checkpoint: 'table' must name one of {some}, or tell its number, got '{name}'."
        )
    return fit[0]


def columns_of(manifest: dict[str, Any]) -> list[str]:
    """Return what the schema of a run calls its tables; nothing if no run wrote the checkpoint.

    Examples
    --------
    >>> columns_of({"config": {}})
    []
    """
    config = manifest["config"]
    by_run = {"settings", "schema"} <= config.keys()
    return Schema.from_dict(config["schema"]).table_names if by_run else []


def export(
    path: str | os.PathLike,
    out: str | os.PathLike,
    *,
    format: str,
    tables: Iterable[str] = (),
    states: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write ids and vectors of tables, as they are served; return what export.json tells.

    Rows that owe steps to catch-up Adam have made them up in what is written, their state not.
    Memory is bounded, whatever the size.

    Parameters
    ----------
    path : path
    out : path
        A folder that doesn't exist yet.
    format : {"parquet", "npy"}
    tables : iterable of str
        Names, or numbers where these tell, or what a run's schema calls them; all by default.
    states : bool
        Whether the optimizer's state of each row is written, too.
    overwrite : bool
        Whether an export at `out` is replaced, once this one is whole.

    Raises
    ------
    ValueError
        No such format or table; or the checkpoint is damaged.
    FileNotFoundError, FileExistsError, OSError
        There is no checkpoint, there is something at `out`, or the disk is full.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint, nn
    >>> layer = nn.MultiTableEmbedding(num_tables=1, embedding_dim=2)
    >>> layer.import_table(0, np.array([7, 8]), np.ones((2, 2), np.float32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/c", layer)
    ...     told = export(folder + "/c", folder + "/e", format="npy")
    ...     np.load(folder + "/e/groups.2.0.ids.npy")
    array([7, 8])
    """
    if format not in _WRITERS:
        raise ValueError(f"export: 'format' must be one of {list(_WRITERS)}, got '{format}'.")
    path = Path(path)
    manifest = check(path)
    entries = served_groups(manifest)
    counts = [count_ids(path, entry) for entry in entries]
    names = [
        f"{entry['name']}.{table}"
        for entry, ids in zip(entries, counts, strict=True)
        for table in ids
    ]
    columns = columns_of(manifest) if tables else []
    wanted = {find_table(names, name, columns) for name in tables} or set(names)
    told: dict[str, Any] = {"cupyrec": __version__, "format": format, "tables": {}}
    with new_folder(out, "export", overwrite=overwrite) as folder:
        for entry, ids in zip(entries, counts, strict=True):
            ids = {t: n for t, n in ids.items() if f"{entry['name']}.{t}" in wanted}
            for first in range(0, len(ids), _OPEN):
                some = dict(itertools.islice(ids.items(), first, first + _OPEN))
                told["tables"] |= _write(path, folder, entry, some, _WRITERS[format], states)
        write_file(folder / "export.json", json.dumps(told, indent=1).encode() + b"\n")
    return told


def _write(
    path: Path, folder: Path, entry: dict[str, Any], counts: dict[int, int], kind: Any, states: bool
) -> dict[str, Any]:
    """Write some tables of a group, given the number of their ids."""
    parts: dict[str, tuple] = {"ids": (np.dtype(np.int64), ())}
    parts["vectors"] = np.dtype(np.float32), (entry["width"],)
    for name, columns, _, dtype in entry["state"] if states else ():
        parts[f"state.{name}"] = np.dtype(dtype), (columns,)
    with safe_open(path / "dense.safetensors", "numpy") as dense:
        name = f"rates/{entry['name']}"
        rates = {name: dense.get_tensor(name)} if name in dense.keys() else {}
    history = catch_up_history(entry, rates)
    told = {}
    with contextlib.ExitStack() as stack:
        writers = {}
        for table, ids in counts.items():
            name = quote(f"{entry['name']}.{table}", safe="")
            writers[table] = stack.enter_context(contextlib.closing(kind(folder, name, parts, ids)))
        own = np.array(list(counts), np.uint32)
        for rows in read_rows(path, entry, lambda tables, _: np.isin(tables, own)):
            states_of = {f"state.{name}": state for name, state in rows.states.items()}
            values = {"ids": rows.ids, "vectors": served(entry, history, rows).vectors, **states_of}
            order = np.argsort(rows.tables, kind="stable")
            tables, starts = np.unique(rows.tables[order], return_index=True)
            for table, mine in zip(tables.tolist(), np.split(order, starts[1:]), strict=True):
                writers[table].write({part: values[part][mine] for part in parts})
    for table, writer in writers.items():
        for file in writer.files:
            sync(file)
        told[f"{entry['name']}.{table}"] = {
            "ids": counts[table],
            "width": entry["width"],
            "files": [file.name for file in writer.files],
        }
    return told
