"""When newer checkpoints are looked for, and what becomes of those that are none."""

import asyncio
import contextlib
import itertools
import logging
import threading
import time

import pytest

from cupyrec.serving.monitoring import Monitoring
from cupyrec.serving.renewal import Renewal


class Updated:
    """Serves the number of the last update that came of something."""

    def __init__(self, *outcomes):
        self.outcomes, self.version, self.path = list(outcomes), "v0", "run"
        self.may, self.asked = threading.Semaphore(0), 0

    def update(self, checkpoint):
        assert checkpoint == "run"
        assert self.may.acquire(timeout=30)
        self.asked += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome:
            self.version = f"v{self.asked}"
        return outcome


def counted(monitoring):
    lines = monitoring.exposition()[1].decode().splitlines()
    return {
        line.split('"')[1]: float(line.split()[-1])
        for line in lines
        if line.startswith("cupyrec_reloads_total")
    }


def test_those_who_ask_meanwhile_get_the_same_answer(caplog):
    caplog.set_level(logging.INFO, "cupyrec")
    predictor, monitoring = Updated(True, False), Monitoring()

    async def ask():
        renewal = Renewal(predictor, "run", monitoring)
        asked = [asyncio.create_task(renewal.reload()) for _ in range(5)]
        await asyncio.sleep(0.05)
        asked[1].cancel()  # of a client that is gone: the others wait on
        predictor.may.release()
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(ask())
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    assert answers == [True] * 4
    assert (predictor.asked, predictor.version) == (1, "v1")
    assert counted(monitoring) == {"done": 1}
    assert 'version="v1"' in monitoring.exposition()[1].decode()
    assert "serving version v1 instead of v0, 'run', read in" in caplog.text


def test_what_is_no_checkpoint_is_told_to_who_asks():
    predictor, monitoring = Updated(ValueError("checkpoint: bad."), True), Monitoring()
    predictor.may.release(2)

    async def ask():
        renewal = Renewal(predictor, "run", monitoring)
        with pytest.raises(ValueError, match="checkpoint: bad."):
            await renewal.reload()
        return await renewal.reload()

    assert asyncio.run(ask())
    assert counted(monitoring) == {"failed": 1, "done": 1}


def test_watching_tells_what_is_wrong_once(caplog):
    wrong = [OSError("gone"), OSError("gone"), OSError("other"), OSError("other"), True]
    ours = [RuntimeError("ours"), RuntimeError("ours")]
    predictor = Updated(*wrong, False, OSError("other"), *ours, True)
    predictor.may.release(10)

    async def watch():
        watching = asyncio.create_task(Renewal(predictor, "run", Monitoring()).watch(0.001))
        while predictor.asked < 10 and not watching.done():
            await asyncio.sleep(0.01)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(watch())
    warned = [r.args[0] for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["gone", "other", "other"]
    failed = [r.exc_info[1].args[0] for r in caplog.records if r.levelno == logging.ERROR]
    assert failed == ["ours"]
    assert predictor.version == "v10"


def test_what_is_refused_slowly_is_not_looked_at_all_the_time():
    times = []

    class Slow(Updated):
        def update(self, checkpoint):
            times.append(time.perf_counter())
            time.sleep(0.1)
            return super().update(checkpoint)

    predictor = Slow(OSError("damaged"), OSError("damaged"), True, False, False)
    predictor.may.release(5)

    async def watch():
        watching = asyncio.create_task(Renewal(predictor, "run", Monitoring()).watch(0.001))
        while predictor.asked < 5:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(watch())
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert min(pauses[:2]) >= 1.0
    assert min(pauses[2:]) < 1.0
