"""How two checkpoints differ: table by table, whatever their shards, and in what is dense."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_reshard import split
from cupyrec.checkpoint_shards import divided, read_keys, read_rows, row_bytes
from cupyrec.embedding import Rows
from cupyrec.ops.hash_table import HashTable

__all__ = ["diff"]

_BYTES = 512 << 20  # of rows in memory at a time
_MOST = 1024  # parts that rows are split in
_SETTINGS = ("width", "dtype", "seed", "initial", "state", "history")  # of a group


class _Side(NamedTuple):
    """A group of one of the checkpoints."""

    folder: Path
    entry: dict[str, Any]

    def rows(self) -> Iterator[Rows]:
        return read_rows(self.folder, self.entry)

    def shard(self, number: int) -> _Side:
        return _Side(self.folder, self.entry | {"shards": self.entry["shards"][number:][:1]})

    def parts(self) -> dict[str, tuple]:
        """Parts of a row and what they are made of."""
        state = {
            f"state.{name}": (columns, dtype) for name, columns, _, dtype in self.entry["state"]
        }
        return {"vectors": (self.entry["width"], "float32"), **state}

    def held(self) -> dict[str, np.ndarray]:
        """All rows, by part."""
        count = sum(shard["rows"] for shard in self.entry["shards"])
        held = {
            part: np.empty((count, columns), dtype)
            for part, (columns, dtype) in self.parts().items()
        }
        held |= {"tables": np.empty(count, np.uint32), "ids": np.empty(count, np.int64)}
        first = 0
        for rows in self.rows():
            for part, values in _by_part(rows).items():
                held[part][first : first + len(rows.ids)] = values
            first += len(rows.ids)
        return held


def _by_part(rows: Rows) -> dict[str, np.ndarray]:
    states = {f"state.{name}": state for name, state in rows.states.items()}
    return {"tables": rows.tables, "ids": rows.ids, "vectors": rows.vectors, **states}


class _Tables:
    """What is found out about each table, from rows of many."""

    def __init__(self, group: str) -> None:
        self.group, self.found = group, {}

    def add(self, tables: np.ndarray, what: str, part: str | None = None) -> None:
        """Count rows that are `what`, of these tables; of those that differ, in which part."""
        for table, count in zip(*np.unique(tables, return_counts=True), strict=True):
            counts = self._of(table) if part is None else self._of(table)[what]
            name = part or what
            counts[name] = counts.get(name, 0) + int(count)

    def enlarge(self, tables: np.ndarray, part: str, distances: np.ndarray) -> None:
        """Keep the largest of these distances, of each table."""
        numbers, of = np.unique(tables, return_inverse=True)
        largest = np.zeros(len(numbers))
        np.maximum.at(largest, of, distances)
        for table, value in zip(numbers, largest.tolist(), strict=True):
            known = self._of(table)["largest"]
            known[part] = max(known.get(part, 0.0), value)

    def _of(self, table: int) -> dict[str, Any]:
        new = {"common": 0, "only_a": 0, "only_b": 0, "differ": {}, "largest": {}}
        return self.found.setdefault(f"{self.group}.{table}", new)


def diff(
    a: str | os.PathLike, b: str | os.PathLike, *, scratch: str | os.PathLike | None = None
) -> dict[str, Any]:
    """Return how two checkpoints differ; a vector does if a bit does.

    Configuration, progress and version are not compared.

    Parameters
    ----------
    a, b : path
    scratch : path, optional
        Where tables of more than 512 MB are split, which takes as much room as both have. By
        default the system's folder for temporary files.

    Returns
    -------
    dict
        ``equal``; ``tables``, name -> ids ``common`` or ``only_a``, ``only_b``, and by part of a
        row (``vectors``, ``state.m``) how many ``differ`` and the ``largest`` difference;
        ``dense``, name of a tensor that differs -> largest difference, None if it isn't in both
        with one shape; ``settings`` that differ, of groups and optimizer.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no checkpoint, or it is damaged: see `cupyrec.checkpoint_checks.check`.

    Examples
    --------
    >>> from cupyrec import checkpoint, nn
    >>> layer = nn.MultiTableEmbedding(num_tables=1, embedding_dim=2, seed=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, ids in {"a": [6, 7], "b": [7, 8]}.items():
    ...         layer.import_table(0, np.array(ids), np.ones((2, 2), np.float32))
    ...         checkpoint.save(f"{folder}/{name}", layer)
    ...     told = diff(folder + "/a", folder + "/b")
    >>> told["equal"], told["tables"]["groups.2.0"]["only_b"]
    (False, 1)
    """
    a, b = Path(a), Path(b)
    manifests = check(a), check(b)
    groups = [{entry["name"]: entry for entry in manifest["groups"]} for manifest in manifests]
    settings = [
        name
        for name in ("model", "optimizer", "dropout_seeds")
        if manifests[0][name] != manifests[1][name]
    ]
    tables: dict[str, Any] = {}
    for name in groups[0] | groups[1]:
        ours, theirs = (own.get(name) for own in groups)
        if None in (ours, theirs):
            settings.append(name)
        ours, theirs = ours or divided(theirs, []), theirs or divided(ours, [])  # without rows
        settings += [f"{name}: {key}" for key in _SETTINGS if ours[key] != theirs[key]]
        tables |= _of_group(_Side(a, ours), _Side(b, theirs), scratch)
    dense = _dense(a, b)
    clean = all(
        not (found["only_a"] or found["only_b"] or found["differ"]) for found in tables.values()
    )
    return {
        "equal": clean and not dense and not settings,
        "tables": tables,
        "dense": dense,
        "settings": settings,
    }


def _of_group(a: _Side, b: _Side, scratch: str | os.PathLike | None) -> dict[str, Any]:
    tables = _Tables(a.entry["name"])
    parts = min(_MOST, -(-a.entry["rows"] * row_bytes(a.entry) // _BYTES))
    if parts <= 1:
        _join(tables, a, b)
        return tables.found
    with tempfile.TemporaryDirectory(prefix="cupyrec-diff-", dir=scratch) as folder:
        split_a, split_b = (
            _split(side, Path(folder) / name, parts) for side, name in ((a, "a"), (b, "b"))
        )
        for i in range(parts):
            _join(tables, split_a.shard(i), split_b.shard(i))
    return tables.found


def _split(side: _Side, folder: Path, parts: int) -> _Side:
    """The same rows in so many shards, in a folder."""
    folder.mkdir()
    keys = read_keys(side.folder, side.entry)
    entry, _ = split(folder, side.entry, keys, side.rows, parts)
    return _Side(folder, entry)


def _join(tables: _Tables, a: _Side, b: _Side) -> None:
    """Compare rows of `a`, which are held in memory, with those of `b`, as they are read."""
    held, index = a.held(), HashTable(np)
    index.insert(held["tables"], held["ids"])
    parts = sorted(a.parts().items() & b.parts().items())
    met = np.zeros(len(held["ids"]), bool)
    for rows in b.rows():
        at = index.find(rows.tables, rows.ids)
        known = at >= 0
        met[at[known]] = True
        tables.add(rows.tables[~known], "only_b")
        tables.add(rows.tables[known], "common")
        theirs = _by_part(rows)
        for part, _ in parts:
            _compare(tables, part, rows.tables[known], held[part][at[known]], theirs[part][known])
    tables.add(held["tables"][~met], "only_a")


def _compare(tables: _Tables, part: str, numbers: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Count the rows of which a bit differs; `numbers` are their tables."""
    differ = (x.view(np.uint32) != y.view(np.uint32)).any(axis=1)
    if differ.any():
        tables.add(numbers[differ], "differ", part)
        distances = _distance(x[differ], y[differ]).max(axis=1)
        tables.enlarge(numbers[differ], part, distances)


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|, and infinity where one of them is NaN."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.abs(x.astype(np.float64) - y), nan=np.inf, posinf=np.inf)


def _dense(a: Path, b: Path) -> dict[str, float | None]:
    """Of each tensor that differs the largest difference."""
    found: dict[str, float | None] = {}
    name = "dense.safetensors"
    with safe_open(a / name, "numpy") as ours, safe_open(b / name, "numpy") as theirs:
        both = set(ours.keys()) & set(theirs.keys())
        for key in sorted(set(ours.keys()) | set(theirs.keys())):
            found[key] = None
            if key in both:
                x, y = ours.get_tensor(key), theirs.get_tensor(key)
                if (x.shape, x.dtype) == (y.shape, y.dtype):
                    if x.tobytes() == y.tobytes():
                        del found[key]
                    else:
                        found[key] = float(_distance(x, y).max())
    return found
