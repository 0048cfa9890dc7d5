"""The files of a log: whether they are there, and whether they stay as they were."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Paths", "check_unchanged", "log_files", "state_of"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def log_files(where: str, paths: Paths) -> list[Path]:
    """Return one path or several as a list.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        One is no file.
    ValueError
        There are none, or one is a pipe.

    Examples
    --------
    >>> log_files("TSV", [])
    Traceback (most recent call last):
        ...
    ValueError: TSV: 'paths' must name at least one file, got none.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files = [Path(path) for path in paths]
    if not files:
        raise ValueError(f"{where}: 'paths' must name at least one file, got none.")
    for path in files:
        if not path.exists():
            raise FileNotFoundError(f"{path}: must be a file, found nothing there.")
        if path.is_dir():
            raise IsADirectoryError(f"{path}: must be a file, got a folder.")
        if not path.is_file():  # it is read more than once
            raise ValueError(f"{path}: must be a file, got a pipe or a device.")
    return files


def state_of(path: Path) -> tuple[int, int] | None:
    """Return what tells that a file was changed, None if it is none any more.

    Examples
    --------
    >>> state_of(Path("/dev/null"))
    """
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def check_unchanged(states: Mapping[Path, tuple[int, int] | None]) -> None:
    """Raise ValueError if the state of a file is another than that told.

    Examples
    --------
    >>> check_unchanged({Path("/dev/null"): (0, 0)})
    Traceback (most recent call last):
        ...
    ValueError: /dev/null: must stay as it was when the dataset was made, got a file of another size or time of change.
    """  # noqa: E501 - an error sentence
    for path, state in states.items():
        if state_of(path) != state:
            raise ValueError(
                f"{path}: must stay as it was when the dataset was made, got a file of another "
                "size or time of change."
            )
