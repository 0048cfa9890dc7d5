"""What control groups, version 1 or 2, let a process have: cores and memory, as of containers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["cores", "memory"]

_NO_LIMIT = 1 << 60  # bytes, from which on version 1 means none


def cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use; inf without a limit.

    Examples
    --------
    >>> cores() > 0
    True
    """

    def quota(folder: Path, old: bool) -> float:
        if old:
            files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
            quota, period = (int(file.read_text()) for file in files)
        else:
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period if quota > 0 else math.inf  # -1: none

    return min(_limits(root, "cpu", quota), default=math.inf)


def memory(root: Path = Path("/")) -> float:
    """Return how many bytes this process may use; inf without a limit.

    Examples
    --------
    >>> memory() > 0
    True
    """

    def limit(folder: Path, old: bool) -> float:
        text = (folder / ("memory.limit_in_bytes" if old else "memory.max")).read_text()
        return int(text) if int(text) < _NO_LIMIT else math.inf

    return min(_limits(root, "memory", limit), default=math.inf)


def _limits(root: Path, controller: str, limit: Callable[[Path, bool], float]) -> Iterator[float]:
    """Of this process's groups and all above, which bind it too; True stands for version 1."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            old = bool(controllers)
            own = root / "sys/fs/cgroup" / (controller if old else "") / group.strip("/")
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    yield limit(folder, old)
