"""One model served by several ranks: rank 0 answers, each looks rows up in its shard of the tables.

A look-up is an exchange in which all ranks take part. So rank 0 says what is next, and the others
sleep until it does:

    answer   forward passes: rank 0 has rows, the others have none
    read     read your shard of another checkpoint, in a thread, while you answer
    tell     say how far that is
    take     serve what you have read, from now on
    drop     forget it
    rest     nothing: rank 0 is still there
    stop     go home
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec.checkpoint_files import find_checkpoint
from cupyrec.parallel import Communicator, OtherRankError, failed
from cupyrec.ragged import Bags
from cupyrec.serving.predictor import Predictor, check_agreed

__all__ = ["Front", "follow"]

_REST = 1.0  # seconds of silence after which rank 0 says that it is there
_LOOK = 0.05  # seconds between questions how far all are


class Front:
    """The `Predictor` of rank 0, which all ranks stand behind; the others `follow`.

    Parameters
    ----------
    predictor : Predictor
        Of rank 0, loaded together with the others'.
    ranks : Communicator

    Examples
    --------
    See docs/serving.md.
    """

    def __init__(self, predictor: Predictor, ranks: Communicator) -> None:
        self._predictor, self._ranks = predictor, ranks
        self._lock, self._updating = threading.Lock(), threading.Lock()
        self._said, self._closing, self._stopped = time.monotonic(), threading.Event(), False
        threading.Thread(target=self._rest, name="cupyrec-rest", daemon=True).start()

    def __getattr__(self, name: str) -> Any:  # of what is served: names, sizes, version
        return getattr(self._predictor, name)

    def probabilities(self, dense: np.ndarray, ids: Any) -> tuple[np.ndarray, str]:
        """Return what `Predictor.probabilities` does.

        Raises
        ------
        ValueError, TypeError
            Shapes and dtypes that don't agree.
        """
        self._predictor.check(dense, ids)
        shape = dense.shape[1], ids.shape[1], isinstance(ids, Bags)
        with self._together("answer", of=[self._predictor.passes(len(dense)), *shape]):
            return self._predictor.probabilities(dense, ids)

    def update(self, checkpoint: str | os.PathLike) -> bool:
        """Do what `Predictor.update` does, on all ranks; all go on with the old one if one fails.

        Raises
        ------
        OtherRankError
            It failed on another rank.
        ValueError
            Ranks have not read the same version; or as `Predictor.update`.
        InterruptedError
            It is closed meanwhile.

        Examples
        --------
        See the class.
        """
        path = find_checkpoint(checkpoint).resolve()
        with self._updating:
            with self._together("read", path=str(path)):
                reading = _Reading(self._predictor, path)
            try:
                staged = self._read_by_all(reading, path)
            except BaseException:
                with self._together("drop"):
                    reading.drop()
                raise
            with self._together("take"):
                return self._predictor.take(staged)

    def close(self) -> None:
        """Let all ranks go home; what is read meanwhile is dropped."""
        self._closing.set()
        with self._updating, self._together("stop"):
            self._predictor.close()
            self._stopped = True

    def _read_by_all(self, reading: _Reading, path: Path) -> Any:
        """What this rank has read, once all have, and the same."""
        told = self._tell(reading)
        while not all(one["done"] for one in told):
            if self._closing.wait(_LOOK):
                raise _ending()
            told = self._tell(reading)
        staged = reading.result()
        for rank, one in enumerate(told):
            if one["error"] is not None:
                raise OtherRankError(f"serve: rank {rank} must get on, got {one['error']}")
        check_agreed(path, [one["version"] for one in told])
        return staged

    def _tell(self, reading: _Reading) -> list[dict[str, Any]]:
        with self._together("tell"):
            return self._ranks.all_gather_json("reading", reading.told())

    @contextlib.contextmanager
    def _together(self, do: str, **more: Any) -> Iterator[None]:
        """Say what is next, and do it; if that fails here the ranks are out of step: all end."""
        with self._lock:
            if self._stopped:
                raise _ending()
            self._ranks.broadcast_json("command", {"do": do} | more)
            try:
                yield
            except Exception as error:
                failed(error)
                raise
            finally:
                self._said = time.monotonic()

    def _rest(self) -> None:
        while not self._closing.wait(_REST / 2):
            if time.monotonic() - self._said > _REST and not self._lock.locked():
                with contextlib.suppress(InterruptedError), self._together("rest"):
                    pass


def _ending() -> InterruptedError:
    return InterruptedError("serve: the server must go on, got one that is about to end.")


class _Reading:
    """A checkpoint that a thread reads."""

    def __init__(self, predictor: Predictor, path: Path) -> None:
        self._predictor, self._path = predictor, path
        self._staged: Any = None
        self._error: Exception | None = None
        self._lock, self._done, self._dropped = threading.Lock(), False, False
        threading.Thread(target=self._read, name="cupyrec-reading", daemon=True).start()

    def _read(self) -> None:
        staged = None
        try:
            staged = self._predictor.read(self._path)
        except Exception as error:  # told to rank 0, which raises it
            self._error = error
        with self._lock:
            self._staged, self._done = staged, True
            if self._dropped:
                self._predictor.drop(staged)

    def told(self) -> dict[str, Any]:
        if not self._done:
            return {"done": False, "error": None, "version": None}
        if self._error is not None:
            error = f"{type(self._error).__name__}: {self._error}"
            return {"done": True, "error": error, "version": None}
        version = self._predictor.version_of(self._staged)
        return {"done": True, "error": None, "version": version}

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._staged

    def drop(self) -> None:
        """Let go what was read, or will have been."""
        with self._lock:
            self._dropped = True
            if self._done:
                self._predictor.drop(self._staged)


def follow(predictor: Predictor, ranks: Communicator) -> None:
    """Do what rank 0 says, until it says stop.

    Parameters
    ----------
    predictor : Predictor
        Of this rank, loaded together with the others'.
    ranks : Communicator

    Examples
    --------
    See docs/serving.md.
    """
    reading = None
    while True:
        match ranks.broadcast_json("command"):
            case {"do": "answer", "of": of}:
                predictor.take_part(*of)
            case {"do": "read", "path": path}:
                reading = _Reading(predictor, Path(path))
            case {"do": "tell"}:
                ranks.all_gather_json("reading", reading.told())
            case {"do": "take"}:
                predictor.take(reading.result())
                reading = None
            case {"do": "drop"}:
                reading.drop()
                reading = None
            case {"do": "stop"}:
                return predictor.close()
