"""Vectors from elsewhere in a table of a checkpoint: files as an export has them, or a reader's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from cupyrec import errors
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_export import columns_of, find_table
from cupyrec.checkpoint_reshard import rewrite, split
from cupyrec.checkpoint_shards import (
    Keys,
    count_ids,
    group_of,
    piece,
    read_keys,
    read_rows,
    served_groups,
)
from cupyrec.embedding import LIFE, Group, Rows, widened
from cupyrec.embedding.life import looked_up_once
from cupyrec.embedding.transfer import check_vectors

__all__ = ["Pieces", "import_table"]

Pieces = Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]  # ids, vectors, states

_IDS, _VECTORS = ".ids.npy", ".vectors.npy"


def import_table(
    file: str | os.PathLike,
    path: str | os.PathLike,
    out: str | os.PathLike,
    table: str,
    *,
    read: Callable[[Path, int, int], Pieces] | None = None,
    ids: range | None = None,
    offset: int = 0,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write a checkpoint anew in which ids of a table have vectors from a file.

    They have the state of new rows, unless the reader brings one; what they had before is
    forgotten, as by `import_table` of `cupyrec.nn.MultiTableEmbedding`. Memory is bounded but for
    8 bytes an id of the file.

    Parameters
    ----------
    file : path
        TABLE.parquet with columns ``id`` (int64, uint64, int32 or uint32) and ``vector`` (lists of
        D float32); or TABLE.ids.npy (N,) beside TABLE.vectors.npy (N, D).
    path, out : path
        The checkpoint, and a folder that doesn't exist yet.
    table : str
        Its name, or its number where that tells.
    read : callable, optional
        What reads `file` instead, such as `cupyrec.migrate.hugectr.read_sparse_model`:
        ``read(file, width, most)`` yields ids (N,), vectors (N, D) and states {name: (N, columns)},
        N being at most `most`. It is called several times.
    ids : range, optional
        Which ids of the file are taken, of step 1; all by default.
    offset : int
        What is taken off them: how others keep ids of several tables apart.
    overwrite : bool
        Whether a checkpoint at `out` is replaced, once this one is whole.

    Returns
    -------
    dict
        How many ids were ``imported``, and how many of them ``replaced`` what there was.

    Raises
    ------
    ValueError, TypeError
        No such table; shapes, dtypes or states that don't fit, a number that is not finite, an id
        twice; or the checkpoint is damaged.
    FileNotFoundError, FileExistsError, OSError
        There is no checkpoint or file, there is something at `out`, or the disk is full.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint, nn
    >>> layer = nn.MultiTableEmbedding(num_tables=1, embedding_dim=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(folder + "/x.ids.npy", np.array([7, 8]))
    ...     np.save(folder + "/x.vectors.npy", np.ones((2, 2), np.float32))
    ...     checkpoint.save(folder + "/a", layer)
    ...     import_table(folder + "/x.ids.npy", folder + "/a", folder + "/b", table="0")
    ...     _ = checkpoint.load(folder + "/b", layer)
    {'imported': 2, 'replaced': 0}
    >>> layer.export_table(0)[0]
    array([7, 8])
    """
    path, file = Path(path), Path(file)
    manifest = check(path)
    tables = {
        f"{entry['name']}.{number}": (entry, number)
        for entry in served_groups(manifest)
        for number in count_ids(path, entry)
    }
    target, number = tables[find_table(tables, table, columns_of(manifest))]
    new = _New(file, target, number, read or _from_export, ids, offset)
    replaced = 0

    def others(tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return ~((tables == number) & new.has(ids))

    def group(folder: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        nonlocal replaced
        if entry is not target:
            keys = read_keys(path, entry)
            return split(folder, entry, keys, lambda: read_rows(path, entry), len(entry["shards"]))
        kept = (_chosen(keys, others) for keys in read_keys(path, entry))
        written = split(
            folder, entry, itertools.chain(kept, new.rows()),
            lambda: itertools.chain(read_rows(path, entry, others), new.rows()),
            len(entry["shards"]),
        )  # fmt: skip
        replaced = entry["rows"] + len(new.ids) - written[0]["rows"]
        return written

    rewrite(path, manifest, out, "import", group, overwrite=overwrite)
    return {"imported": len(new.ids), "replaced": replaced}


def _chosen(keys: Keys, wanted: Any) -> Keys:
    mask = wanted(keys.tables, keys.ids)
    return keys._replace(tables=keys.tables[mask], ids=keys.ids[mask])


class _New:
    """Rows of a file, checked, for a table of a group."""

    def __init__(
        self, file: Path, entry: dict[str, Any], number: int, read: Any, wanted: Any, offset: int
    ) -> None:
        self._file, self._entry, self._number, self._read = file, entry, number, read
        self._wanted, self._offset = wanted, offset
        self._group: Group = group_of(entry)
        parts = [np.empty(0, np.int64)]
        for ids, vectors, _ in self._pieces():
            check_vectors(f"import: '{file}'", vectors, entry["dtype"])
            parts.append(ids)
        self.ids = np.sort(np.concatenate(parts))
        twice = self.ids[1:][self.ids[1:] == self.ids[:-1]]
        if twice.size:
            raise ValueError(
                f"import: '{file}' must have an id once, got {twice[0]} twice or more."
            )

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Whether each of these ids is among the new ones."""
        if not self.ids.size:
            return np.zeros(ids.shape, bool)
        at = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
        return self.ids[at] == ids

    def rows(self) -> Iterator[Rows]:
        """Yield the rows as a store would hold them."""
        for ids, vectors, states in self._pieces():
            self._group.clear()
            tables = np.full(ids.shape, self._number, np.uint32)
            if any(name == LIFE.name for name, *_ in self._entry["state"]):
                life = looked_up_once(len(ids), self._entry["clock"] + 1)  # in the step to come
                states = states | {LIFE.name: life}
            self._group.store.import_rows(Rows(tables, ids, vectors, states))
            yield self._group.store.export_rows(0, len(ids))

    def _pieces(self) -> Pieces:
        where, width = f"import: '{self._file}'", self._entry["width"]
        for ids, vectors, states in self._read(self._file, width, piece(self._entry)):
            errors.dtype(where, "vectors", vectors, np.float32)
            errors.axes(where, ids=(ids, "N"), vectors=(vectors, f"N {width}"))
            self._check_states(where, states)
            ids = widened(np, ids)
            if self._wanted is not None:
                rows = (ids >= self._wanted.start) & (ids < self._wanted.stop)
                ids, vectors = ids[rows], vectors[rows]
                states = {name: state[rows] for name, state in states.items()}
            yield ids - np.int64(self._offset), vectors, states

    def _check_states(self, where: str, states: dict[str, np.ndarray]) -> None:
        if not states:
            return
        wanted = {
            name: (columns, dtype)
            for name, columns, _, dtype in self._entry["state"] if name != LIFE.name
        }  # fmt: skip
        got = {name: (state.shape[1], state.dtype.name) for name, state in states.items()}
        if got != wanted:
            raise ValueError(
                f"{where}: must bring the states of the checkpoint's rows, by columns and dtype "
                f"{wanted}, got {got}."
            )


def _from_export(file: Path, width: int, most: int) -> Pieces:
    read = _from_parquet if file.suffix == ".parquet" else _from_npy
    for ids, vectors in read(file, most):
        yield ids, vectors, {}


def _from_npy(file: Path, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not file.name.endswith(_IDS):
        raise ValueError(f"import: 'file' must end in .parquet or {_IDS}, got '{file}'.")
    other = file.with_name(file.name.removesuffix(_IDS) + _VECTORS)
    ids, vectors = (np.load(name, mmap_mode="r") for name in (file, other))
    errors.axes(f"import: '{file}'", ids=(ids, "N"), vectors=(vectors, "N D"))
    for first in range(0, len(ids), most):
        yield np.array(ids[first : first + most]), np.array(vectors[first : first + most])


def _from_parquet(file: Path, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    try:
        yield from _batches(file, most)
    except pa.ArrowInvalid as error:
        raise ValueError(f"import: '{file}' must be Parquet, got: {error}.") from None


def _batches(file: Path, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with parquet.ParquetFile(file) as source:
        for name in ("id", "vector"):
            if name not in source.schema_arrow.names:
                raise ValueError(
                    f"import: '{file}' must have columns id and vector, "
                    f"got {source.schema_arrow.names}."
                )
        for batch in source.iter_batches(most, columns=["id", "vector"]):
            ids, lists = batch.column("id"), batch.column("vector")
            if not isinstance(lists, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
                raise ValueError(f"import: '{file}' must have vectors in lists, got {lists.type}.")
            numbers = lists.flatten()
            if ids.null_count or lists.null_count or numbers.null_count:
                raise ValueError(f"import: '{file}' must have no nulls, got some.")
            lengths = compute.unique(compute.list_value_length(lists))
            if len(lengths) > 1:
                raise ValueError(
                    f"import: '{file}' must have vectors of one width, got {lengths.to_pylist()}."
                )
            values = numbers.to_numpy(zero_copy_only=False)
            yield ids.to_numpy(), values.reshape(len(ids), -1)
