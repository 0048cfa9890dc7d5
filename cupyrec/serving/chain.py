"""A checkpoint that is to be served, and those that it is based on.

Ranks share the work, without a message: each checks some of the shards, and reads those that may
hold its rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import numpy as safetensors

from cupyrec.checkpoint_checks import check, check_share, share_of
from cupyrec.checkpoint_deltas import Link, links
from cupyrec.checkpoint_files import check_files, manifest_crc32
from cupyrec.checkpoint_fits import parameters
from cupyrec.checkpoint_shards import DELETED, served_groups, shard_files
from cupyrec.ops.partition import owners, shards_of
from cupyrec.parallel import Communicator

__all__ = ["Chain", "near"]


class Chain(NamedTuple):
    """A checkpoint that has been found, and those that it is based on.

    Attributes
    ----------
    path : path
    links : list of Link
        The full one first.
    crc32s : list of int
        Of their manifests.
    """

    path: Path
    links: list[Link]
    crc32s: list[int]

    @property
    def manifest(self) -> dict[str, Any]:
        """That of the checkpoint itself."""
        return self.links[-1].manifest

    @classmethod
    def found(cls, path: Path) -> Chain:
        """Return the chain that ends at a path.

        Raises
        ------
        FileNotFoundError, ValueError
            As `cupyrec.checkpoint_deltas.links`.

        Examples
        --------
        >>> import tempfile
        >>> from cupyrec import checkpoint, nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(folder + "/one", nn.MultiTableEmbedding(1, 4))
        ...     len(Chain.found(Path(folder, "one")).crc32s)
        1
        """
        found = links(path)
        told = [link.manifest["base"]["crc32"] for link in found[1:]]
        return cls(path, found, [*told, manifest_crc32(path)])

    def after(self, crc32: int) -> Chain | None:
        """Return what follows on a checkpoint of the chain, None if that isn't in it.

        Examples
        --------
        >>> Chain(Path("b"), [Link(Path("a"), {}), Link(Path("b"), {})], [1, 2]).after(1).crc32s
        [2]
        """
        if crc32 not in self.crc32s:
            return None
        first = self.crc32s.index(crc32) + 1
        return Chain(self.path, self.links[first:], self.crc32s[first:])

    def checked(self, ranks: Communicator) -> dict[str, np.ndarray]:
        """Check this rank's share of the links' files, and return the dense arrays.

        Of several ranks each must hear whether another one's share is good.

        Raises
        ------
        FileNotFoundError, ValueError
            As `cupyrec.checkpoint_checks.check`; or there are several ranks, and a shard has keys
            of others than its owner, of which each rank would have to read all.

        Examples
        --------
        See `found`.
        """
        for link in self.links:
            if ranks.size == 1:
                check(link.folder, delta=True)
                continue
            placed = check_share(*link, ranks.rank, ranks.size)
            for entry, well in zip(link.manifest["groups"], placed, strict=True):
                if not well:
                    raise ValueError(
                        f"Predictor: shards of '{entry['name']}' in '{link.folder}' must have "
                        "their owners' keys alone, for several ranks to serve them, got others: "
                        "`cupyrec checkpoint reshard` puts each in its place."
                    )
        return self.dense()

    def dense(self) -> dict[str, np.ndarray]:
        """Return the dense arrays, of which the file is checked.

        Raises
        ------
        FileNotFoundError, ValueError
            It is damaged.

        Examples
        --------
        See `found`.
        """
        name = "dense.safetensors"
        check_files(self.path, {name: self.manifest["files"][name]})
        return safetensors.load_file(self.path / name)

    def shape(self, dense: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return what must stay while a model is served, by the manifest and the dense arrays.

        Examples
        --------
        >>> manifest = {"model": "LR", "config": {}, "groups": []}
        >>> Chain(Path("a"), [Link(Path("a"), manifest)], [1]).shape({})["parameters"]
        {}
        """
        groups = served_groups(self.manifest)
        return {
            "model": self.manifest["model"],
            "schema": self.manifest["config"].get("schema"),
            "groups of tables": {e["name"]: [e["width"], e["tables"]] for e in groups},
            "parameters": {name: list(a.shape) for name, a in parameters(dense).items()},
        }

    def made(self) -> dict[str, Any]:
        """Return what must stay for a model to be updated in place.

        Examples
        --------
        >>> Chain(Path("a"), [Link(Path("a"), {"config": {}, "groups": []})], [1]).made()["groups"]
        []
        """
        settings = self.manifest["config"].get("settings", {})
        keys = "name", "dtype", "history", "seed", "initial"
        return {
            "model": settings.get("model"),
            "amp": settings.get("training", {}).get("amp"),
            "exchange": settings.get("exchange"),
            "groups": [{k: e.get(k) for k in keys} for e in served_groups(self.manifest)],
        }


def near(link: Link, name: str, ranks: Communicator, tables: np.ndarray, ids: np.ndarray) -> Link:
    """Return what a link has of a group in shards that may hold a rank's rows, or some keys.

    Of these the files that another rank checks are checked here as well, since they are read before
    it can tell.

    Raises
    ------
    FileNotFoundError, ValueError
        As `cupyrec.checkpoint_files.check_files`.

    Examples
    --------
    >>> nothing = np.empty(0, np.uint32), np.empty(0, np.int64)
    >>> near(Link(Path("c"), {"groups": []}), "g", Communicator(), *nothing).manifest
    {'groups': []}
    """
    groups, told = [], link.manifest.get("files", {})
    for entry in (e for e in link.manifest["groups"] if e["name"] in (name, name + DELETED)):
        count = len(entry["shards"])
        numbers = {*shards_of(ranks.rank, ranks.size, count), *owners(tables, ids, count).tolist()}
        shards = {number: entry["shards"][number] for number in sorted(numbers)}
        for number in numbers - {*share_of(entry, ranks.rank, ranks.size)}:
            names = shard_files(entry, shards[number]["name"])
            check_files(link.folder, {file: told[file] for file in names if file in told})
        groups.append(entry | {"shards": [*shards.values()]})
    return link._replace(manifest=link.manifest | {"groups": groups})
