"""The folder of a group's rows on an SSD: one log of rows, a new one where rows change in size.

PATH/NAME/rows-00001, -00002, …    each a `RowLog`; the newest that was saved counts
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cupyrec.embedding.host_cache import HostCache
from cupyrec.embedding.row_cache import Backing
from cupyrec.embedding.row_log import RowLog
from cupyrec.embedding.row_log_files import lock_folder, saved_words

__all__ = ["RowFolder"]

_PREFIX = "rows-"


class RowFolder:
    """The backings of a store on an SSD.

    Parameters
    ----------
    path, name : path
        Of the tables; of the group among them.
    direct, salvage : bool
        See `RowLog`.
    host_rows : callable, optional
        ``host_rows(bytes a row)`` tells how many rows a cache in the host's memory is to have.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = RowFolder(folder, "group")
    ...     rows.existing() is None
    ...     log = rows.make(8)
    ...     log.commit({"width": 4})
    ...     log.close()
    ...     RowFolder(folder, "group").existing().meta
    True
    {'width': 4}
    """

    def __init__(
        self,
        path: str | os.PathLike,
        name: str,
        *,
        direct: bool = False,
        salvage: bool = False,
        host_rows: Callable[[int], int] | None = None,
    ) -> None:
        self._folder, self._host_rows = Path(path, name), host_rows
        self._options = {"direct": direct, "salvage": salvage}

    def existing(self) -> Backing | None:
        """Return the newest log that was saved; others go.

        Raises
        ------
        ValueError
            Files are damaged.
        BlockingIOError
            Someone is at work on one of the logs, which may not have been saved yet.

        Examples
        --------
        See the class.
        """
        found = None
        for _, folder in sorted(self._logs().items(), reverse=True):
            if found is None and (words := saved_words(folder)) is not None:
                found = self._opened(folder, words)
            else:
                lock = lock_folder(folder)
                try:
                    _remove(folder)
                finally:
                    os.close(lock)
        return found

    def make(self, words: int) -> Backing:
        """Return an empty log of payloads of so many words, in a folder of its own.

        Examples
        --------
        See the class.
        """
        number = max(self._logs(), default=0) + 1
        return self._opened(self._folder / f"{_PREFIX}{number:05}", words)

    def drop(self, backing: Backing) -> None:
        """Let a log go, with its files.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = RowFolder(folder, "group")
        ...     rows.drop(rows.make(8))
        ...     rows.existing() is None
        True
        """
        log = backing.backing if isinstance(backing, HostCache) else backing
        log.close()
        _remove(log.folder)

    def _logs(self) -> dict[int, Path]:
        """Folders of logs by number; what others have put there is left alone."""
        named = [(f.name.removeprefix(_PREFIX), f) for f in self._folder.glob(_PREFIX + "*")]
        return {int(number): folder for number, folder in named if number.isdecimal()}

    def _opened(self, folder: Path, words: int) -> Backing:
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = RowLog(folder, words, **self._options)
        if self._host_rows is None:
            return log
        return HostCache(log, words, max(1, self._host_rows(4 * words)))


def _remove(folder: Path) -> None:
    """Remove a log, its manifest last: rows without one are taken for damage."""
    for file in folder.glob("*.rows"):
        file.unlink()
    shutil.rmtree(folder)
