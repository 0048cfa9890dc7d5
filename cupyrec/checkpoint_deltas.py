"""Checkpoints that hold only what has changed since another one: a chain, from a full one on.

Beside the rows of GROUP, those that training has looked up since, stands GROUP.deleted: keys whose
rows were deleted since. The manifest's ``base`` names the checkpoint before, by its path from here
and the crc32 of its manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_files import manifest_crc32, read_manifest
from cupyrec.checkpoint_reshard import chosen, rewrite, split
from cupyrec.checkpoint_shards import (
    CANDIDATES,
    DELETED,
    Keys,
    Wanted,
    read_keys,
    read_rows,
    served,
)
from cupyrec.embedding import LIFE, Rows, Shard
from cupyrec.embedding.life import looked_up_once
from cupyrec.nn import Module
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.partition import owners

__all__ = [
    "Link", "base_of", "changes", "compact", "deleted_entry", "deleted_rows", "links",
    "named_shards", "note_saved", "rows_since", "take_rows",
]  # fmt: skip


class Link(NamedTuple):
    """A checkpoint of a chain.

    Attributes
    ----------
    folder : path
    manifest : dict
    """

    folder: Path
    manifest: dict[str, Any]

    def entry(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a group, None if there is none.

        Examples
        --------
        >>> Link(Path("c"), {"groups": [{"name": "g"}]}).entry("g")
        {'name': 'g'}
        """
        return next((e for e in self.manifest["groups"] if e["name"] == name), None)

    def clock(self, name: str) -> int | None:
        """Return the steps of a group so far, None if there is none.

        Examples
        --------
        >>> Link(Path("c"), {"groups": [{"name": "g", "clock": 7}]}).clock("g")
        7
        """
        entry, optimizer = self.entry(name), self.manifest.get("optimizer")
        if entry is None:
            return None
        return entry.get("clock", 0 if optimizer is None else optimizer["t"])  # from 0.4 on

    def rows(self, name: str, wanted: Wanted | None = None) -> Iterator[Rows]:
        """Yield a group's rows; if no account was kept of their ids, it begins here.

        Examples
        --------
        >>> list(Link(Path("c"), {"groups": []}).rows("g"))
        []
        """
        entry = self.entry(name)
        for rows in () if entry is None else read_rows(self.folder, entry, wanted):
            begun = {LIFE.name: looked_up_once(len(rows.ids), self.clock(name))}
            yield rows._replace(states=begun | rows.states)


def named_shards(model: Module) -> Iterator[tuple[str, Shard]]:
    """Yield what of a model's groups is saved: rows, and counts of ids without rows, with names.

    Examples
    --------
    >>> from cupyrec import nn
    >>> from cupyrec.embedding import Life
    >>> layer = nn.MultiTableEmbedding(1, 4, life=Life(admit_after=2))
    >>> [name for name, _ in named_shards(layer)]
    ['groups.4', 'groups.4.candidates']
    """
    for name, group in model.named_groups():
        yield name, group
        if group.candidates is not None:
            yield name + CANDIDATES, group.candidates


def links(path: str | os.PathLike) -> list[Link]:
    """Return the chain that ends with a checkpoint: the full one first.

    Raises
    ------
    FileNotFoundError
        One of them is not there.
    ValueError
        A manifest is damaged, another checkpoint stands where the base did, or the chain has no
        end.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint, nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/one", nn.MultiTableEmbedding(1, 4))
    ...     len(links(folder + "/one"))
    1
    """
    chain, folder = [], Path(path)
    if folder.is_symlink():
        folder = folder.resolve()  # its base is where it is itself
    while True:
        manifest = read_manifest(folder, delta=True)
        if chain:
            told, got = chain[0].manifest["base"], manifest_crc32(folder)
            if got != told["crc32"]:
                raise ValueError(
                    f"checkpoint: '{folder}' must be what '{chain[0].folder}' is based on, with "
                    f"crc32 {told['crc32']}, got crc32 {got}."
                )
        chain.insert(0, Link(folder, manifest))
        if "base" not in manifest:
            return chain
        if len({link.folder for link in chain}) < len(chain):  # its crc32 was made to fit
            raise ValueError(f"checkpoint: '{folder}' must not be based on itself.")
        beside = folder.parent.resolve() / folder.name  # links on the way would turn `..` aside
        folder = Path(os.path.normpath(beside / manifest["base"]["name"]))


def base_of(path: Path, base: Path, model: Module) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return what the manifest of a delta at `path` tells of its base, and each group's step then.

    Raises
    ------
    ValueError
        The model was last saved as, or loaded from, another checkpoint; or no account is kept of
        its ids' lives.

    Examples
    --------
    See `cupyrec.checkpoint.save`.
    """
    link, crc32 = Link(base, read_manifest(base, delta=True)), manifest_crc32(base)
    for name, shard in named_shards(model):
        if shard.life is None:
            raise ValueError(
                f"checkpoint.save: tables of '{name}' must be made with life=Life(), which tells "
                "rows that have changed, to be saved on a base."
            )
        if getattr(shard, "dense_updates", False):
            raise ValueError(
                f"checkpoint.save: tables of '{name}' must be without dense_updates, which change "
                "all rows, to be saved on a base."
            )
        if shard.saved_as != crc32:
            raise ValueError(
                f"checkpoint.save: '{base}' must be the checkpoint that the model was last saved "
                "as, or loaded from with the optimizer, got another."
            )
    if link.manifest["optimizer"] is None:
        raise ValueError(f"checkpoint.save: '{base}' must have an optimizer's state, got none.")
    relative = os.path.relpath(base.resolve(), path.resolve().parent)
    steps = {name: link.clock(name) for name, _ in named_shards(model)}
    return {"name": os.path.join("..", relative), "crc32": crc32}, steps


def rows_since(shard: Shard, step: int | None) -> Iterator[Rows]:
    """Yield rows that training has looked up after a step, some at a time; all if it is None.

    Examples
    --------
    >>> from cupyrec.embedding import InitialVectors, Life, Uniform, Group
    >>> list(rows_since(Group(InitialVectors(1, Uniform(), seed=1), life=Life()), 5))
    []
    """
    for rows in shard.store.export():
        new = rows.states[LIFE.name][:, 0] > (-1 if step is None else step)
        if new.any():
            yield chosen(rows, new)


def deleted_rows(shard: Shard, rank: int = 0, ranks: int = 1) -> Rows:
    """Return a rank's keys that were deleted since the last checkpoint, each once, without vectors.

    All ranks may have been told to delete the same.

    Examples
    --------
    >>> from cupyrec.embedding import InitialVectors, Life, Uniform, Group
    >>> deleted_rows(Group(InitialVectors(1, Uniform(), seed=1), life=Life())).vectors.shape
    (0, 0)
    """
    keys = [(np.empty(0, np.uint32), np.empty(0, np.int64)), *shard.deleted]
    tables, ids = (np.concatenate(parts) for parts in zip(*keys, strict=True))
    own = owners(tables, ids, ranks) == rank
    tables, ids = tables[own], ids[own]
    order = np.lexsort((ids, tables))
    tables, ids = tables[order], ids[order]
    first = np.ones(len(ids), bool)
    first[1:] = (ids[1:] != ids[:-1]) | (tables[1:] != tables[:-1])
    tables, ids = tables[first], ids[first]
    return Rows(tables, ids, np.empty((len(ids), 0), np.float32), {})


def deleted_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry, in the manifest, of keys deleted from a group.

    Examples
    --------
    >>> deleted_entry({"name": "g", "width": 4, "state": [["sum", 4, 0.0, "float32"]]})
    {'name': 'g.deleted', 'width': 0, 'state': []}
    """
    return entry | {"name": entry["name"] + DELETED, "width": 0, "state": []}


def note_saved(model: Module, crc32: int | None) -> None:
    """Note that what changes from now on has changed since this checkpoint, or since none.

    Examples
    --------
    >>> from cupyrec import nn
    >>> note_saved(nn.MultiTableEmbedding(1, 4), 5)
    """
    for _, shard in named_shards(model):
        shard.based_on(crc32)


def changes(
    link: Link,
    name: str,
    wanted: Wanted | None,
    history: AdamHistory | None,
    with_state: bool,
) -> Iterator[tuple[Rows | None, Rows | None]]:
    """Yield what a checkpoint of a chain says of a group: keys to delete, then rows to import.

    Parameters
    ----------
    link : Link
    name : str
        Of the group.
    wanted : callable, optional
        See `read_rows`.
    history : AdamHistory, optional
        By which rows without state are brought up to date.
    with_state : bool

    Examples
    --------
    >>> list(changes(Link(Path("c"), {"groups": []}), "g", None, None, with_state=False))
    []
    """
    entry, deleted = link.entry(name), link.entry(name + DELETED)
    for some in () if deleted is None else read_rows(link.folder, deleted, wanted):
        yield some, None
    for rows in link.rows(name, wanted):
        life = {LIFE.name: rows.states[LIFE.name]}  # no optimizer's
        given = rows if with_state else served(entry, history, rows)._replace(states=life)
        yield rows if "base" in link.manifest else None, given


def take_rows(shard: Shard, forgotten: Rows | None, rows: Rows | None) -> None:
    """Delete keys from a shard, and import rows.

    Examples
    --------
    See `cupyrec.checkpoint.load`.
    """
    if forgotten is not None:
        keys = forgotten.tables, forgotten.ids
        shard.store.delete(*(arrays.copy_to(shard.xp, each) for each in keys))
    if rows is not None:
        shard.store.import_rows(rows)


def compact(
    path: str | os.PathLike, out: str | os.PathLike, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write what a chain of checkpoints says as one that holds all rows; return its manifest.

    Memory holds the keys of the deltas, 24 bytes each; a full checkpoint is copied.

    Parameters
    ----------
    path : path
        The last of the chain.
    out : path
        A folder that doesn't exist yet.
    overwrite : bool
        Whether a checkpoint at `out` is replaced, once this one is whole.

    Raises
    ------
    ValueError, FileNotFoundError, FileExistsError, OSError
        A checkpoint of the chain is damaged, is not there, or is another; there is something at
        `out`, or one that `path` is based on; or the disk is full.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint, nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/one", nn.MultiTableEmbedding(1, 4))
    ...     compact(folder + "/one", folder + "/two")["groups"][0]["rows"]
    0
    """
    chain = links(path)
    last = chain[-1]
    if Path(out).resolve() in [link.folder.resolve() for link in chain[:-1]]:
        raise ValueError(f"compact: 'out' must not be what '{path}' is based on, got '{out}'.")
    for link in chain:
        check(link.folder, delta=True)
    names = [e["name"] for e in last.manifest["groups"] if not e["name"].endswith(DELETED)]
    entries = [last.entry(name) for name in names]

    def group(folder: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return split(
            folder, entry,
            _newest(chain, entry["name"], lambda link, own: read_keys(link.folder, own)),
            lambda: _newest(chain, entry["name"], lambda link, own: link.rows(own["name"])),
            len(entry["shards"]),
        )  # fmt: skip

    manifest = {k: v for k, v in last.manifest.items() if k != "base"} | {"groups": entries}
    rewrite(last.folder, manifest, out, "compact", group, overwrite=overwrite)
    return read_manifest(out)


def _newest(chain: list[Link], name: str, read: Any) -> Iterator[Any]:
    """Yield what the newest checkpoint that has it says of each key: rows, or keys alone."""
    seen = HashTable()
    for number, link in reversed(list(enumerate(chain))):
        entry, deleted = link.entry(name), link.entry(name + DELETED)
        for some in () if entry is None else read(link, entry):
            yield _some(some, seen.find(some.tables, some.ids) < 0)
        for own in (entry, deleted) if number else ():
            for keys in () if own is None else read_keys(link.folder, own):
                new = seen.find(keys.tables, keys.ids) < 0
                seen.insert(keys.tables[new], keys.ids[new])


def _some(some: Keys | Rows, which: np.ndarray) -> Keys | Rows:
    if isinstance(some, Rows):
        return chosen(some, which)
    return some._replace(tables=some.tables[which], ids=some.ids[which])
