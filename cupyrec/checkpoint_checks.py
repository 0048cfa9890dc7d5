"""What must hold for a checkpoint: whole files, rows as many as it says, and each key once.

Where each shard has keys of its owner alone, as ranks write them, no key is in two. So shards are
looked at one by one, and ranks share them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec import cpu
from cupyrec.checkpoint_files import check_files, read_manifest
from cupyrec.checkpoint_shards import (
    Keys,
    Wanted,
    check_shapes,
    read_keys,
    rows_file,
    shard_files,
)
from cupyrec.ops.hash_key import hash_key
from cupyrec.ops.partition import owners

__all__ = ["check", "check_share", "check_unique", "share_of"]

_KEYS = 1 << 25  # whose hashes are sorted at once
_BLOCK = 4096  # keys hashed by one thread at a time


def check(path: str | os.PathLike, *, delta: bool = False) -> dict[str, Any]:
    """Check all there is to check about a checkpoint; return its manifest.

    `delta` says whether it may hold only what has changed since another, which is not looked at.

    Raises
    ------
    FileNotFoundError, ValueError
        As `cupyrec.checkpoint.verify`; a file holds other rows than the manifest says; or a key is
        there twice.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/checkpoint", DLRM(2, 3))
    ...     check(folder + "/checkpoint")["model"]
    'DLRM'
    """
    manifest = read_manifest(path, delta=delta)
    placed = check_share(Path(path), manifest, 0, 1)
    for entry, well in zip(manifest["groups"], placed, strict=True):
        if not well:
            check_unique(Path(path), entry)
    return manifest


def check_share(folder: Path, manifest: dict[str, Any], rank: int, ranks: int) -> list[bool]:
    """Check what is a rank's to check: some of the shards, and if it is the first all else.

    Parameters
    ----------
    folder : path
    manifest : dict
        Of the checkpoint there.
    rank, ranks : int

    Returns
    -------
    list of bool
        Of each group: whether these shards have keys of their owners alone. If all shards of all
        ranks do, each key is there once, else `check_unique` must tell.

    Raises
    ------
    FileNotFoundError, ValueError
        As `check`, for a key that is twice in a shard.

    Examples
    --------
    >>> check_share(Path("folder"), {"files": {}, "groups": []}, rank=0, ranks=1)
    []
    """
    own, others = set(), set()
    for entry in manifest["groups"]:
        share = share_of(entry, rank, ranks)
        for number, shard in enumerate(entry["shards"]):
            files = own if number in share else others
            files.update(shard_files(entry, shard["name"]))
    check_files(
        folder,
        {
            name: told
            for name, told in manifest["files"].items()
            if name in own or (rank == 0 and name not in others)
        },
    )
    placed = []
    for entry in manifest["groups"]:
        share = share_of(entry, rank, ranks)
        check_shapes(folder, entry, slice(share.start, share.stop))
        well = all(_are_owners(folder, entry, number) for number in share)
        placed.append(well)
        for shard in entry["shards"][share.start : share.stop] if well else ():
            check_unique(folder, entry | {"shards": [shard]})
    return placed


def share_of(entry: dict[str, Any], rank: int, ranks: int) -> range:
    """Return the numbers of a group's shards that a rank checks: its own of as many as ranks.

    Examples
    --------
    >>> share_of({"shards": [{}, {}, {}]}, rank=1, ranks=2)
    range(1, 3)
    """
    count = len(entry["shards"])
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _are_owners(folder: Path, entry: dict[str, Any], number: int) -> bool:
    """Whether a shard has keys of its owner alone."""
    count = len(entry["shards"])
    shard = entry | {"shards": [entry["shards"][number]]}
    return count == 1 or all(
        (owners(keys.tables, keys.ids, count) == number).all() for keys in read_keys(folder, shard)
    )


@cpu.exact_loop
def _hash(tables, ids, out):
    for i in range(ids.size):
        out[i] = hash_key(tables[i], ids[i])


def _hashes(keys: Keys) -> np.ndarray:
    out = np.empty(len(keys.ids), np.uint64)
    cpu.parallel(lambda i, j: _hash(keys.tables[i:j], keys.ids[i:j], out[i:j]), len(out), _BLOCK)
    return out


def check_unique(folder: Path, entry: dict[str, Any], wanted: Wanted | None = None) -> None:
    """Raise unless each key of a group is in its shards once.

    Hashes of 64 bits are sorted, 33 million at a time: keys whose hashes differ, differ.

    Parameters
    ----------
    folder, entry, wanted
        See `read_rows`.

    Raises
    ------
    ValueError
        A key is there twice; both places are named.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.checkpoint_shards import ShardWriter, divided, shard_name
    >>> from cupyrec.embedding import Rows
    >>> entry = {"name": "g", "width": 1, "state": []}
    >>> rows = Rows(np.zeros(1, np.uint32), np.array([7]), np.ones((1, 1), np.float32), {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(2):
    ...         with ShardWriter(Path(folder), entry, shard_name(i, 2), 1) as writer:
    ...             writer.write(rows)
    ...     check_unique(Path(folder), divided(entry, [1, 1]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: checkpoint: id 7 of table 0 must be there once, got it in row 0 of ...
    """
    passes = -(-sum(shard["rows"] for shard in entry["shards"]) // _KEYS)
    for number in range(passes):
        chosen = [np.empty(0, np.uint64)]
        for keys in read_keys(folder, entry):
            hashes = _hashes(keys)
            if wanted is not None:
                hashes = hashes[wanted(keys.tables, keys.ids)]
            chosen.append(hashes if passes == 1 else hashes[hashes % np.uint64(passes) == number])
        hashes = np.concatenate(chosen)
        del chosen
        hashes.sort()
        twice = hashes[1:][hashes[1:] == hashes[:-1]]
        for first in range(0, len(twice), 1000):
            _refuse_twice(folder, entry, twice[first : first + 1000])


def _refuse_twice(folder: Path, entry: dict[str, Any], hashes: np.ndarray) -> None:
    """Raise for the first key of these hashes that is there twice; two keys may share a hash."""
    seen: dict[tuple[int, int], str] = {}
    for keys in read_keys(folder, entry):
        for i in np.flatnonzero(np.isin(_hashes(keys), hashes)):
            key = int(keys.tables[i]), int(keys.ids[i])
            place = f"row {keys.first + i} of '{rows_file(folder, entry, keys.shard, 'ids')}'"
            if key in seen:
                raise ValueError(
                    f"checkpoint: id {key[1]} of table {key[0]} must be there once, "
                    f"got it in {seen[key]} and in {place}."
                )
            seen[key] = place
