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
from cupyrec.serving.predictor import Predictor

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
        self._said, self._closed = time.monotonic(), threading.Event()
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
        shape = [len(dense), dense.shape[1], ids.shape[1], isinstance(ids, Bags)]
        with self._together("answer", shape=shape):
            return self._predictor.probabilities(dense, ids)

    def update(self, checkpoint: str | os.PathLike) -> bool:
        """Do what `Predictor.update` does, on all ranks; all go on with the old one if one fails.

        Raises
        ------
        OtherRankError
            It failed on another rank.
        """
        path = find_checkpoint(checkpoint).resolve()
        with self._updating:
            with self._together("read", path=str(path)):
                reading = _Reading(self._predictor, path)
            told = self._tell(reading)
            while not all(one["done"] for one in told):
                time.sleep(_LOOK)
                told = self._tell(reading)
            try:
                staged = reading.result()
                for rank, one in enumerate(told):
                    if one["error"] is not None:
                        raise OtherRankError(f"serve: rank {rank} must get on, got {one['error']}")
            except BaseException:
                with self._together("drop"):
                    raise
            if staged is None:
                return False
            with self._together("take"):
                self._predictor.take(staged)
            return True

    def close(self) -> None:
        """Let all ranks go home."""
        self._closed.set()
        with self._together("stop"):
            self._predictor.close()

    def _tell(self, reading: _Reading) -> list[dict[str, Any]]:
        with self._together("tell"):
            return self._ranks.all_gather_json("reading", reading.told())

    @contextlib.contextmanager
    def _together(self, do: str, **more: Any) -> Iterator[None]:
        """Say what is next, and do it; if that fails here the ranks are out of step: all end."""
        with self._lock:
            self._ranks.broadcast_json("command", {"do": do} | more)
            try:
                yield
            except Exception as error:
                if do != "drop":
                    failed(error)
                raise
            finally:
                self._said = time.monotonic()

    def _rest(self) -> None:
        while not self._closed.wait(_REST / 2):
            if time.monotonic() - self._said > _REST and not self._lock.locked():
                with self._together("rest"):
                    pass


class _Reading:
    """A checkpoint that a thread reads."""

    def __init__(self, predictor: Predictor, path: Path) -> None:
        self._staged: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(predictor, path), daemon=True)
        self._thread.start()

    def _read(self, predictor: Predictor, path: Path) -> None:
        try:
            self._staged = predictor.read(path)
        except Exception as error:  # told to rank 0, which raises it
            self._error = error

    def told(self) -> dict[str, Any]:
        error = self._error and f"{type(self._error).__name__}: {self._error}"
        return {"done": not self._thread.is_alive(), "error": error}

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._staged


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
            case {"do": "answer", "shape": shape}:
                predictor.take_part(*shape)
            case {"do": "read", "path": path}:
                reading = _Reading(predictor, Path(path))
            case {"do": "tell"}:
                ranks.all_gather_json("reading", reading.told())
            case {"do": "take"}:
                predictor.take(reading.result())
                reading = None
            case {"do": "drop"}:
                reading = None
            case {"do": "stop"}:
                return predictor.close()
