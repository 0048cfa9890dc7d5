"""Rows of a checkpoint: each group of tables in shards of plain .npy, a piece in memory at a time.

GROUP.SHARD.*.npy     tables (N,), ids (N,), vectors (N, D), state.NAME (N, columns)

SHARD is 00002-of-00008, say. A key (table, id) is in one shard: that of its owner among as many
ranks, so that a rank finds its rows in few of them. Others load too, but every rank reads all keys.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from cupyrec.checkpoint_files import sync
from cupyrec.embedding import Group, InitialVectors, Rows, StatePart, export_rows
from cupyrec.ops.adam_history import AdamHistory

__all__ = [
    "CANDIDATES", "DELETED", "Keys", "ShardWriter", "Wanted", "catch_up_history", "check_shapes",
    "count_ids", "divided", "group_of", "piece", "read_keys", "read_rows", "row_bytes",
    "rows_file", "served", "served_groups", "shard_files", "shard_name",
]  # fmt: skip

CANDIDATES, DELETED = ".candidates", ".deleted"  # behind a group's name: no rows that are served

Wanted = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (tables, ids) -> (N,) bool

_BYTES = 32 << 20  # of a piece
_ROWS = 1 << 16  # of a piece, too


class Keys(NamedTuple):
    """Keys of rows number `first` on of a shard.

    Attributes
    ----------
    shard : str
    first : int
    tables : (N,) array of uint32
    ids : (N,) array of int64
    """

    shard: str
    first: int
    tables: np.ndarray
    ids: np.ndarray


def shard_name(number: int, count: int) -> str:
    """Return the name of one of `count` shards.

    Examples
    --------
    >>> shard_name(2, 8)
    '00002-of-00008'
    """
    return f"{number:05}-of-{count:05}"


def _columns(entry: dict[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Of a group's entry in the manifest: part -> dtype and shape of a row."""
    return {
        "tables": (np.dtype(np.uint32), ()),
        "ids": (np.dtype(np.int64), ()),
        "vectors": (np.dtype(np.float32), (entry["width"],)),
        **{
            f"state.{name}": (np.dtype(dtype), (columns,))
            for name, columns, _, dtype in entry["state"]
        },
    }


def served_groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of groups of tables, without those of ids that have no rows.

    Examples
    --------
    >>> served_groups({"groups": [{"name": "g"}, {"name": "g.candidates"}]})
    [{'name': 'g'}]
    """
    return [e for e in manifest["groups"] if not e["name"].endswith((CANDIDATES, DELETED))]


def rows_file(folder: Path, entry: dict[str, Any], shard: str, part: str) -> Path:
    """Return the file of a part, such as ``ids``, of one of a group's shards.

    Examples
    --------
    >>> rows_file(Path("folder"), {"name": "a/b"}, "00000-of-00001", "ids").name
    'a%2Fb.00000-of-00001.ids.npy'
    """
    return folder / f"{quote(entry['name'], safe='')}.{shard}.{part}.npy"


def shard_files(entry: dict[str, Any], shard: str) -> list[str]:
    """Return the names of all files of one of a group's shards.

    Examples
    --------
    >>> shard_files({"name": "g", "width": 1, "state": []}, "00000-of-00001")[0]
    'g.00000-of-00001.tables.npy'
    """
    return [rows_file(Path(), entry, shard, part).name for part in _columns(entry)]


def row_bytes(entry: dict[str, Any]) -> int:
    """Return the bytes of a row of a group in its files.

    Examples
    --------
    >>> row_bytes({"width": 4, "state": [["sum", 1, 0.0, "float32"]]})
    32
    """
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in _columns(entry).values())


def piece(entry: dict[str, Any]) -> int:
    """Return how many of a group's rows are in memory at a time.

    Examples
    --------
    >>> piece({"width": 4, "state": []}), piece({"width": 4096, "state": []})
    (65536, 2046)
    """
    return min(_ROWS, max(1, _BYTES // row_bytes(entry)))


def divided(entry: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return a group's entry in the manifest with its shards, which have so many rows.

    Examples
    --------
    >>> divided({"name": "g"}, [3, 4])["shards"][1]
    {'name': '00001-of-00002', 'rows': 4}
    """
    shards = [{"name": shard_name(i, len(rows)), "rows": n} for i, n in enumerate(rows)]
    return entry | {"rows": sum(rows), "shards": shards}


class ShardWriter:
    """The files of one shard of a group.

    Parameters
    ----------
    folder : path
    entry : dict
        The group's in the manifest: its name, width and state.
    shard : str
    rows : int
        How many will be written.

    Attributes
    ----------
    files : dict of str to dict
        Name -> size and crc32, once the files are closed, which `with` does, and on the disk.

    Raises
    ------
    ValueError
        Other than `rows` rows were written.

    Examples
    --------
    >>> import tempfile
    >>> entry = {"name": "g", "width": 1, "state": []}
    >>> ids = np.array([7, 8])
    >>> rows = Rows(np.zeros(2, np.uint32), ids, np.ones((2, 1), np.float32), {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ShardWriter(Path(folder), entry, "00000-of-00001", 2) as writer:
    ...         writer.write(rows)
    ...     [rows.ids for rows in read_rows(Path(folder), divided(entry, [2]))]
    [array([7, 8])]
    """

    def __init__(self, folder: Path, entry: dict[str, Any], shard: str, rows: int) -> None:
        self.files: dict[str, dict[str, int]] = {}
        self._left, self._paths, self._streams = rows, {}, {}
        with contextlib.ExitStack() as stack:
            for part, (dtype, shape) in _columns(entry).items():
                path = self._paths[part] = rows_file(folder, entry, shard, part)
                self._streams[part] = stack.enter_context(open(path, "wb"))
                self.files[path.name] = {"bytes": 0, "crc32": 0}
                header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, *shape)}
                written = io.BytesIO()
                np.lib.format.write_array_header_1_0(written, header)
                self._append(part, written.getvalue())
            self._stack = stack.pop_all()

    def write(self, rows: Rows) -> None:
        """Append rows, with a state for each part of the group's.

        Examples
        --------
        See the class.
        """
        states = {f"state.{name}": state for name, state in rows.states.items()}
        parts = {"tables": rows.tables, "ids": rows.ids, "vectors": rows.vectors, **states}
        for part in self._streams:
            self._append(part, np.ascontiguousarray(parts[part]).reshape(-1).view(np.uint8))
        self._left -= len(rows.ids)

    def _append(self, part: str, content: Any) -> None:
        self._streams[part].write(content)
        told = self.files[self._paths[part].name]
        told["bytes"] += len(content)
        told["crc32"] = zlib.crc32(content, told["crc32"])

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stack.close()
        if kind is None:
            if self._left:
                raise ValueError(f"ShardWriter: {self._left} more rows must be written, got none.")
            for path in self._paths.values():
                sync(path)


class _Reader:
    """Some parts of one shard."""

    def __init__(self, folder: Path, entry: dict[str, Any], shard: dict[str, Any]) -> None:
        self._columns = _columns(entry)
        self._folder, self._entry, self._shard = folder, entry, shard
        self._opened: dict[str, tuple[Any, int]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _open(self, part: str) -> tuple[Any, int]:
        """A file, and where its numbers begin."""
        if part not in self._opened:
            path = rows_file(self._folder, self._entry, self._shard["name"], part)
            stream = self._stack.enter_context(open(path, "rb"))
            dtype, shape = self._columns[part]
            wanted = (self._shard["rows"], *shape), False, dtype
            try:
                got = np.lib.format.read_magic(stream) and np.lib.format.read_array_header_1_0(
                    stream
                )
            except ValueError as error:
                raise ValueError(f"checkpoint: '{path}' must be .npy, got {error!r}.") from None
            if got != wanted:
                raise ValueError(
                    f"checkpoint: '{path}' must have shape {wanted[0]} and dtype {dtype}, "
                    f"got {got[0]} and {got[2]}."
                )
            self._opened[part] = stream, stream.tell()
        return self._opened[part]

    def read(self, part: str, first: int, stop: int) -> np.ndarray:
        """Rows number first to stop - 1 of a part."""
        (stream, start), (dtype, shape) = self._open(part), self._columns[part]
        rows = np.empty((stop - first, *shape), dtype)
        stream.seek(start + first * (rows.nbytes // len(rows)))
        if (got := stream.readinto(rows.reshape(-1).view(np.uint8))) != rows.nbytes:
            raise ValueError(
                f"checkpoint: '{stream.name}' must go on for {rows.nbytes - got} bytes, "
                f"got its end at {stream.tell()}."
            )
        return rows

    def check(self) -> None:
        """Raise unless each part has its rows, and nothing behind them."""
        for part, (dtype, shape) in self._columns.items():
            stream, start = self._open(part)
            end = start + self._shard["rows"] * dtype.itemsize * int(np.prod(shape))
            if (got := stream.seek(0, io.SEEK_END)) != end:
                raise ValueError(f"checkpoint: '{stream.name}' must end at {end}, got {got}.")

    def keys(self) -> Iterator[Keys]:
        rows = self._shard["rows"]
        for first in range(0, rows, piece(self._entry)):
            at = first, min(first + piece(self._entry), rows)
            yield Keys(self._shard["name"], first, self.read("tables", *at), self.read("ids", *at))


def check_shapes(folder: Path, entry: dict[str, Any], share: slice = slice(None)) -> None:
    """Raise unless the files of a group hold as many rows as its entry says, of such numbers.

    Parameters
    ----------
    folder : path
        The checkpoint's.
    entry : dict
        The group's in the manifest.
    share : slice
        Whose files among the shards are looked at.

    Raises
    ------
    ValueError
        A file is not what the manifest says; it is named.

    Examples
    --------
    >>> check_shapes(Path("folder"), {"name": "g", "rows": 0, "shards": []})
    """
    if (total := sum(shard["rows"] for shard in entry["shards"])) != entry["rows"]:
        raise ValueError(
            f"checkpoint: shards of '{entry['name']}' in '{folder}' must have {entry['rows']} "
            f"rows together, got {total}."
        )
    for shard in entry["shards"][share]:
        with _Reader(folder, entry, shard) as reader:
            reader.check()


def read_keys(folder: Path, entry: dict[str, Any]) -> Iterator[Keys]:
    """Yield the keys of a group, a piece at a time.

    Parameters
    ----------
    folder : path
        The checkpoint's.
    entry : dict
        The group's in the manifest.

    Raises
    ------
    ValueError
        A file is not what the manifest says; it is named.

    Examples
    --------
    See `read_rows`.
    """
    for shard in entry["shards"]:
        with _Reader(folder, entry, shard) as reader:
            yield from reader.keys()


def count_ids(folder: Path, entry: dict[str, Any]) -> dict[int, int]:
    """Return how many ids each table of a group has, by number; `folder` is the checkpoint's.

    Examples
    --------
    >>> count_ids(Path("folder"), {"tables": [0, 3], "shards": []})
    {0: 0, 3: 0}
    """
    ids = Counter(dict.fromkeys(entry["tables"] or (), 0))
    for keys in read_keys(folder, entry):
        tables, counts = np.unique(keys.tables, return_counts=True)
        ids.update(dict(zip(tables.tolist(), counts.tolist(), strict=True)))
    return dict(sorted(ids.items()))


def group_of(entry: dict[str, Any], history: AdamHistory | None = None) -> Group:
    """Return a group on the host such as was saved, without rows.

    Examples
    --------
    >>> from cupyrec.embedding import Uniform
    >>> initial = InitialVectors(1, Uniform(), seed=1).to_dict()
    >>> entry = {"width": 1, "seed": 1, "initial": initial, "dtype": "float16", "state": []}
    >>> group_of(entry).dtype
    'float16'
    """
    initial = InitialVectors.from_dict(entry["initial"], entry["width"], entry["seed"])
    group = Group(initial, dtype=entry["dtype"])
    state = (StatePart(*part[:3], getattr(np, part[3])) for part in entry["state"])
    group.set_state(tuple(state), history)
    return group


def read_rows(folder: Path, entry: dict[str, Any], wanted: Wanted | None = None) -> Iterator[Rows]:
    """Yield the rows of a group, a piece at a time, shard after shard.

    Parameters
    ----------
    folder : path
        The checkpoint's.
    entry : dict
        The group's in the manifest.
    wanted : callable, optional
        ``wanted(tables, ids)`` -> (N,) bool: which of the rows. Where a piece has none of them, no
        more than its keys is read.

    Raises
    ------
    ValueError
        A file is not what the manifest says; it is named.

    Examples
    --------
    See `ShardWriter`.
    """
    parts = [name for name, *_ in entry["state"]]
    for shard in entry["shards"]:
        with _Reader(folder, entry, shard) as reader:
            for keys in reader.keys():
                rows = slice(None) if wanted is None else wanted(keys.tables, keys.ids)
                if wanted is not None and not rows.any():
                    continue
                at = keys.first, keys.first + len(keys.ids)
                yield Rows(
                    keys.tables[rows],
                    keys.ids[rows],
                    reader.read("vectors", *at)[rows],
                    {name: reader.read(f"state.{name}", *at)[rows] for name in parts},
                )


def catch_up_history(entry: dict[str, Any], dense: dict[str, np.ndarray]) -> AdamHistory | None:
    """Return what rows of a group catch up by, None if they don't; `dense` is of the checkpoint.

    Examples
    --------
    >>> catch_up_history({"name": "g"}, {}) is None
    True
    """
    if (rates := dense.get(f"rates/{entry['name']}")) is None:
        return None
    return AdamHistory(**entry["history"], rates=rates.tolist())


def served(entry: dict[str, Any], history: AdamHistory | None, rows: Rows) -> Rows:
    """Return rows as they are served: their vectors up to date, without state.

    Examples
    --------
    >>> rows = Rows(np.zeros(1, np.uint32), np.array([7]), np.ones((1, 1), np.float32), {})
    >>> served({}, None, rows).vectors
    array([[1.]], dtype=float32)
    """
    if history is not None:  # vectors are of the step that their row was in last
        former = group_of(entry, history)
        former.store.import_rows(rows)
        rows = export_rows(former, 0, len(rows.ids))
    return rows._replace(states={})
