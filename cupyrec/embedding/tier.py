"""Where tables keep their rows: the argument `tier` of tables, and what it makes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from cupyrec import errors
from cupyrec.embedding.cached_store import CachedStore
from cupyrec.embedding.host_rows import HostRows
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.row_cache import Backing
from cupyrec.embedding.row_folder import RowFolder
from cupyrec.embedding.store import Store
from cupyrec.ops.embedding_rows import FLOAT32

__all__ = ["CachedHost", "CachedSSD", "Memory", "Tier"]


@dataclass(frozen=True)
class Memory:
    """All rows lie in the memory of the device that trains.

    Examples
    --------
    >>> Memory().store("", 4).width
    4
    """

    def store(self, name: str, width: int, xp: ModuleType = np, value: int = FLOAT32) -> Store:
        """Return an empty store of a group; `name` tells it from the others of its tables.

        Examples
        --------
        See the class.
        """
        return MemoryStore(width, xp, value)


@dataclass(frozen=True, kw_only=True)
class CachedHost:
    """All rows lie in the host's memory, those that are asked for most in the device's too.

    Parameters
    ----------
    cache_rows : int, optional
        Rows of the device's cache; else `cache_mb`.
    cache_mb : float, optional
        Its size in 10^6 bytes, without 34 bytes a row of its directory.

    Raises
    ------
    ValueError, TypeError
        Not one of the two is given, or it is no positive number.

    Examples
    --------
    >>> len(CachedHost(cache_mb=64).store("", 4))
    0
    """

    cache_rows: int | None = None
    cache_mb: float | None = None

    def __post_init__(self) -> None:
        _check_size(self, "cache")

    def store(self, name: str, width: int, xp: ModuleType = np, value: int = FLOAT32) -> Store:
        """Return an empty store of a group.

        Examples
        --------
        See the class.
        """
        return CachedStore(width, _InMemory(), lambda row: _rows(self, "cache", row), xp, value)


@dataclass(frozen=True, kw_only=True)
class CachedSSD:
    """All rows lie in files, those that are asked for most in caches.

    Parameters
    ----------
    path : path
        A folder of these tables alone; what was saved there is found again.
    cache_rows, cache_mb
        Of the device's cache: see `CachedHost`.
    host_cache_rows, host_cache_mb : optional
        Of a second cache between a GPU's and the files, in the host's memory.
    direct : bool
        Whether files are read past the system's page cache (O_DIRECT): then memory is what the
        caches take, and reads take as long as the SSD does.
    salvage : bool
        Whether to go on with what is left of damaged files.

    Raises
    ------
    ValueError, TypeError
        Not just one size of a cache is given, or it is no positive number.
    NotADirectoryError
        A file lies at the path.

    Examples
    --------
    >>> import contextlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tier = CachedSSD(path=folder, cache_rows=1000)
    ...     with contextlib.closing(tier.store("", 4)) as store:
    ...         len(store)
    0
    """

    path: str | os.PathLike
    cache_rows: int | None = None
    cache_mb: float | None = None
    host_cache_rows: int | None = None
    host_cache_mb: float | None = None
    direct: bool = False
    salvage: bool = False

    def __post_init__(self) -> None:
        if os.path.isfile(os.fspath(self.path)):
            raise NotADirectoryError(f"CachedSSD: '{self.path}' must be a folder, got a file.")
        _check_size(self, "cache")
        if self.host_cache_rows is not None or self.host_cache_mb is not None:
            _check_size(self, "host_cache")

    def store(self, name: str, width: int, xp: ModuleType = np, value: int = FLOAT32) -> Store:
        """Return the store of a group, with the rows that were saved.

        Raises
        ------
        ValueError
            Files are damaged, or of rows of another width or type.
        BlockingIOError
            Another process has them open.

        Examples
        --------
        See the class.
        """
        host = self.host_cache_rows is not None or self.host_cache_mb is not None
        rows = RowFolder(
            self.path, name, direct=self.direct, salvage=self.salvage,
            host_rows=(lambda row: _rows(self, "host_cache", row)) if host else None,
        )  # fmt: skip
        return CachedStore(width, rows, lambda row: _rows(self, "cache", row), xp, value)


Tier = Memory | CachedHost | CachedSSD


class _InMemory:
    """The backings of `CachedHost`."""

    def existing(self) -> Backing | None:
        return None

    def make(self, words: int) -> Backing:
        return HostRows(words)

    def drop(self, backing: Backing) -> None:
        backing.close()


def _check_size(tier: CachedHost | CachedSSD, which: str) -> None:
    where, names = type(tier).__name__, (f"{which}_rows", f"{which}_mb")
    rows, mb = (getattr(tier, name) for name in names)
    if (rows is None) == (mb is None):
        raise ValueError(f"{where}: one of {' and '.join(names)} must be given, got {rows}, {mb}.")
    if rows is not None:
        errors.positive(where, names[0], rows)
    elif not errors.number(where, names[1], mb) > 0:
        raise ValueError(f"{where}: '{names[1]}' must be above 0, got {mb}.")


def _rows(tier: CachedHost | CachedSSD, which: str, row_bytes: int) -> int:
    rows = getattr(tier, f"{which}_rows")
    return int(getattr(tier, f"{which}_mb") * 1e6 / row_bytes) if rows is None else rows
