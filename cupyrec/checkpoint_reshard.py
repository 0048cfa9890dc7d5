"""Rows of a checkpoint in another number of shards: each in that of the rank that owns its key."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec import errors
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_files import new_folder, sync, write_manifest
from cupyrec.checkpoint_shards import Keys, ShardWriter, divided, read_keys, read_rows, shard_name
from cupyrec.embedding import Rows
from cupyrec.ops.partition import partition

__all__ = ["reshard", "rewrite", "split"]

_OPEN = 64  # shards written at a time: a process has few files


def split(
    folder: Path,
    entry: dict[str, Any],
    keys: Iterable[Keys | Rows],
    rows: Callable[[], Iterable[Rows]],
    shards: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write rows of a group as shards; return its entry in the manifest, and the files.

    Rows of a shard stay in the order in which they come.

    Parameters
    ----------
    folder : path
    entry : dict
        The group's, by which its files are named and laid out.
    keys : iterable
        The keys of all rows, some at a time.
    rows : callable
        Returns the rows, some at a time; it is called once for every 64 shards.
    shards : int
        From 1 to 1024.

    Raises
    ------
    ValueError, OSError
        As `rows`; the disk is full, say.

    Examples
    --------
    >>> import tempfile
    >>> entry = {"name": "g", "width": 1, "state": []}
    >>> rows = Rows(np.zeros(4, np.uint32), np.arange(4), np.ones((4, 1), np.float32), {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     entry, files = split(Path(folder), entry, [rows], lambda: [rows], shards=2)
    ...     [rows.ids for rows in read_rows(Path(folder), entry)], len(files)
    ([array([0, 1]), array([2, 3])], 6)
    """
    counts = sum(
        (partition(some.tables, some.ids, shards).counts for some in keys),
        np.zeros(shards, np.int64),
    ).tolist()
    files: dict[str, Any] = {}
    for first in range(0, shards, _OPEN):
        numbers = range(first, min(first + _OPEN, shards))
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(ShardWriter(folder, entry, shard_name(i, shards), counts[i]))
                for i in numbers
            ]
            for some in rows():
                order, owned = partition(some.tables, some.ids, shards)
                ends = np.cumsum(owned)
                for i, writer in zip(numbers, writers, strict=True):
                    if owned[i]:
                        writer.write(chosen(some, order[ends[i] - owned[i] : ends[i]]))
        for writer in writers:
            files |= writer.files
    return divided(entry, counts), files


def chosen(rows: Rows, which: np.ndarray) -> Rows:
    """Return some of the rows, by number or mask.

    Examples
    --------
    >>> rows = Rows(np.zeros(2, np.uint32), np.array([7, 8]), np.ones((2, 1), np.float32), {})
    >>> chosen(rows, np.array([1])).ids
    array([8])
    """
    states = {name: state[which] for name, state in rows.states.items()}
    return Rows(*(array[which] for array in rows[:3]), states)


def rewrite(
    path: Path,
    manifest: dict[str, Any],
    out: str | os.PathLike,
    where: str,
    group: Callable[[Path, dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]],
    *,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint anew with other rows; all else stays as it was.

    Parameters
    ----------
    path : path
    manifest : dict
        Of the checkpoint there.
    out : path
        A folder that doesn't exist yet.
    where : str
        Who asks, for errors.
    group : callable
        ``group(folder, entry)`` writes a group's files there and returns what `split` does.
    overwrite : bool
        Whether a checkpoint at `out` is replaced, once this one is whole.

    Examples
    --------
    See `reshard`.
    """
    name = "dense.safetensors"
    with new_folder(out, where, overwrite=overwrite) as folder:
        shutil.copyfile(path / name, folder / name)
        sync(folder / name)
        files, groups = {name: manifest["files"][name]}, []
        for entry in manifest["groups"]:
            written, theirs = group(folder, entry)
            groups.append(written)
            files |= theirs
        kept = {k: v for k, v in manifest.items() if k not in ("format", "cupyrec", "base")}
        write_manifest(folder, kept | {"groups": groups, "files": dict(sorted(files.items()))})


def reshard(
    path: str | os.PathLike, out: str | os.PathLike, shards: int, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write a checkpoint's rows anew in so many shards; return the manifest of the old one.

    A rank of as many then finds all its rows in one shard. Memory is bounded, whatever the size.

    Parameters
    ----------
    path : path
    out : path
        A folder that doesn't exist yet.
    shards : int
        From 1 to 1024.
    overwrite : bool
        Whether a checkpoint at `out` is replaced, once this one is whole.

    Raises
    ------
    ValueError, TypeError
        A number of shards out of range; or the checkpoint is damaged: see
        `cupyrec.checkpoint_checks.check`.
    FileNotFoundError, FileExistsError, OSError
        There is no checkpoint, there is something at `out`, or the disk is full.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/one", DLRM(2, 3))
    ...     _ = reshard(folder + "/one", folder + "/two", shards=2)
    ...     checkpoint.verify(folder + "/two")["groups"][0]["shards"]
    [{'name': '00000-of-00002', 'rows': 0}, {'name': '00001-of-00002', 'rows': 0}]
    """
    path, shards = Path(path), errors.positive("reshard", "shards", shards)
    if shards > 1024:
        raise ValueError(f"reshard: 'shards' must be at most 1024, got {shards}.")
    manifest = check(path)

    def group(folder: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return split(folder, entry, read_keys(path, entry), lambda: read_rows(path, entry), shards)

    rewrite(path, manifest, out, "reshard", group, overwrite=overwrite)
    return manifest
