"""Newer checkpoints take the place of the one that is served: when they are looked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from cupyrec.parallel import OtherRankError
from cupyrec.serving.monitoring import Monitoring

__all__ = ["REFUSED", "Renewal"]

logger = logging.getLogger("cupyrec")

_PAUSE = 9  # times as long as it took to refuse a checkpoint

#: What is wrong with a checkpoint, or with another rank's share of it.
REFUSED = ValueError, TypeError, OSError, MemoryError, OtherRankError


class Renewal:
    """Looks where the server was told for a checkpoint that is newer than the one served.

    Parameters
    ----------
    predictor : Predictor
        Its ``update`` reads in a thread while it answers.
    checkpoint : path
        A checkpoint, or a run's folder.
    monitoring : Monitoring

    Examples
    --------
    See `cupyrec.serving.server.run`.
    """

    def __init__(
        self, predictor: Any, checkpoint: str | os.PathLike[str], monitoring: Monitoring
    ) -> None:
        self._predictor, self._checkpoint, self._monitoring = predictor, checkpoint, monitoring
        self._under_way: asyncio.Future | None = None
        self._version, self._told = predictor.version, ""

    async def reload(self) -> bool:
        """Look once, and serve what is there; return whether it is newer.

        Those who ask while it is looked get the same answer.

        Raises
        ------
        ValueError, TypeError, OSError, MemoryError, OtherRankError
            It is no such checkpoint. The old one is served on.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._reload())
        return await asyncio.shield(self._under_way)

    async def _reload(self) -> bool:
        start, old = time.perf_counter(), self._version
        try:
            newer = await _in_thread(self._predictor.update, self._checkpoint)
        except Exception:
            self._monitoring.reloads.labels("failed").inc()
            raise
        if newer:
            self._monitoring.reloads.labels("done").inc()
            version, path = self._predictor.version, self._predictor.path
            self._version = version
            self._monitoring.version.info({"version": version})
            seconds = time.perf_counter() - start
            logger.info(
                "serving version %s instead of %s, '%s', read in %.1f s",
                version, old, path, seconds,
            )  # fmt: skip
        return newer

    async def reload_and_log(self) -> None:
        """Do the same for no client: what is wrong goes to the log, but once if it stays so."""
        told = ""
        try:
            await self.reload()
        except REFUSED as error:
            told = str(error)
            if told != self._told:
                logger.warning("no newer checkpoint is served: %s", told)
        except Exception as error:  # a fault of ours must not end the watch
            told = repr(error)
            if told != self._told:
                logger.exception("no newer checkpoint is served")
        self._told = told

    async def watch(self, seconds: float) -> None:
        """Look again and again, after as many seconds each; but what is refused may be a terabyte,
        so that it is read for a tenth of the time at most."""
        pause = seconds
        while True:
            await asyncio.sleep(pause)
            start = time.perf_counter()
            await self.reload_and_log()
            took = time.perf_counter() - start
            pause = max(seconds, _PAUSE * took) if self._told else seconds


def _in_thread(work: Callable[[Any], bool], argument: Any) -> asyncio.Future:
    """What `work` comes to in a thread; the end of the process waits for none of asyncio's."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(newer: bool, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(newer)
        else:
            future.set_exception(error)

    def run() -> None:
        newer, failed = False, None
        try:
            newer = work(argument)
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, newer, failed)

    threading.Thread(target=run, name="cupyrec-renewal", daemon=True).start()
    return future
