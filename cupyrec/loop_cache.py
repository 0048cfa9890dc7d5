"""Where compiled CPU loops are kept, so that of all processes one compiles each.

That is `NUMBA_CACHE_DIR` if it is set, else the user's cache folder, else ``__pycache__``. Ranks
that need a loop at the same time wait for the one that compiles it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

from cupyrec import activity

__all__ = ["LoopCache"]

_PATIENCE = 120.0  # seconds that another process may take to compile a loop
_PAUSE = 0.05  # seconds between looks


@functools.cache
def _sources() -> str:
    """Hash of all sources that hold loops."""
    texts = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    loops = [text for text in texts if b"@cpu." in text or b"exact_loop" in text]
    return hashlib.sha256(b"".join(loops)).hexdigest()


class _CacheFolder(caching.CompileResultCacheImpl):
    """Numba's choice of a folder, but the package's own comes last: files there outlive an
    uninstall, and what is left of the package then hides an editable install."""

    _locator_classes = sorted(
        caching.CompileResultCacheImpl._locator_classes,
        key=lambda locator: locator.__name__.endswith("InTreeCacheLocator"),
    )


class LoopCache(caching.FunctionCache):
    """Numba's cache, but aware that loops inline each other across files, and of other processes.

    Numba looks at the loop's own file alone, and would go on with an old row layout. What is saved
    takes the place of what older sources left. Two processes that save at once would each lose
    what the other saved: whoever is to compile a loop holds a lock, which ends with its process.

    Raises
    ------
    RuntimeError
        No folder is writable.

    Examples
    --------
    See `cupyrec.cpu.loop`, whose cache it is.
    """

    _impl_class = _CacheFolder

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        locator = self._impl.locator
        stamp = (locator.get_disambiguator(), locator.get_source_stamp(), _sources())
        self._loop = f"{function.__module__}.{function.__qualname__}.{sys.implementation.cache_tag}"
        self._stamp = hashlib.sha256(repr((numba.__version__, *stamp)).encode()).hexdigest()[:16]
        self._name = f"{self._loop}-{self._stamp}"
        self._cache_file = caching.IndexDataCacheFile(self.cache_path, self._name, self._stamp)
        self._lock: int | None = None

    def load_overload(self, *signature: Any) -> Any:
        """Return what was compiled for a signature; if nothing was, it is for this process to."""
        loaded = super().load_overload(*signature)
        if loaded is None and self._lock is None:
            self._take_lock()
            loaded = super().load_overload(*signature)  # compiled while we waited
            if loaded is not None:
                self._leave_lock()
        return loaded

    def save_overload(self, *result: Any) -> None:
        """Save what was compiled, and let others go on."""
        super().save_overload(*result)
        for file in Path(self.cache_path).glob(f"{self._loop}-*"):
            if self._stamp not in file.name:
                with contextlib.suppress(OSError):
                    file.unlink()
        self._leave_lock()

    def _take_lock(self) -> None:
        end = time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError):  # no folder or no locks: then every process compiles
            os.makedirs(self.cache_path, exist_ok=True)
            path = os.path.join(self.cache_path, f"{self._name}.lock")
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            while time.monotonic() < end:  # whoever holds it may be stopped
                try:
                    return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    with activity.during("compiling"):  # in that process
                        time.sleep(_PAUSE)

    def _leave_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
