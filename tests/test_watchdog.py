"""A rank that stalls or ends early ends the job, which says which one and where all stood."""

import re
from pathlib import Path

import pytest
from job import job, launch

from cupyrec.parallel.failure import Position
from cupyrec.parallel.watchdog import Watchdog

ROWS = Position(step=3, calls=8, name="rows", inside=True, doing="", ended=False)
KEYS = Position(step=3, calls=7, name="keys", inside=False, doing="", ended=False)


@pytest.mark.parametrize(
    ("fault", "culprit", "judge", "stands"),
    [
        (
            "time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)", 1, 0,
            {0: "in 'rows' (call 7) at step 3", 1: ".*, silent for ", 2: "in 'rows' (call 7)"},
        ),
        (
            "time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)", 0, 1,
            {0: ".*, silent for ", 1: "in 'rows' (call 7) at step 3"},
        ),
        (
            "while True: pass", 1, 0,
            {0: "in 'rows' (call 7)", 1: "after 'keys' (call 6)", 2: "in 'rows' (call 7)"},
        ),
    ],
)  # fmt: skip
def test_a_rank_that_stalls_ends_the_job(
    tmp_path: Path, fault: str, culprit: int, judge: int, stands: dict[int, str]
) -> None:
    ended = job(tmp_path, fault, ranks=3, culprit=culprit, stall_timeout=3.0)
    assert ended.code == 1
    assert ended.seconds < 60
    assert f"rank {judge} of 3 ends the job: no rank has got on for " in ended.err
    for rank, stand in stands.items():  # alone or with others
        (told,) = re.findall(rf"^  ranks? (?:\d, )*{rank}(?:, \d)*: (.*)", ended.err, re.MULTILINE)
        assert re.match(re.sub(r"[()]", r"\\\g<0>", stand), told), ended.err


def test_a_rank_that_ends_early_ends_the_job(tmp_path: Path) -> None:
    ended = job(tmp_path, "sys.exit(0)", stall_timeout=10.0)
    assert ended.code == 1
    assert ended.seconds < 60
    assert (
        "rank 0 of 2 ends the job: rank 1 ended while others wait:\n"
        "  rank 0: in 'rows' (call 7) at step 3\n"
        "  rank 1: after 'keys' (call 6) at step 3, its program has ended"
    ) in ended.err


def test_whoever_is_busy_gets_on_and_all_end_well(tmp_path: Path) -> None:
    fault = "with ranks.busy('saving'): time.sleep(9)"
    ended = job(tmp_path, fault, stall_timeout=6.0)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("is through") == 2


def program(of_0: str, of_1: str, more: str = "") -> str:
    """Two ranks that do this before the rest of the step."""
    return f"""
import os, signal, time
import numpy as np
from numba.core import event
from cupyrec import activity
from cupyrec.parallel import Communicator, all_reduce, world
Communicator.stall_timeout = 10.0
ranks = world()
{more}
ranks.barrier("all are here")
ranks.stall_timeout = 6.0
if ranks.rank == 0:
    {of_0}
else:
    {of_1}
print("rank", ranks.rank, "is through")
"""


COMPILING = "event.trigger_event('numba:compile')"


def test_a_rank_that_compiles_gets_on_whatever_it_waits_for(tmp_path: Path) -> None:
    """Its call of before waits for the other, which is not there yet."""
    of_1 = f"ahead = ranks.any('keys', False)\n    with {COMPILING}: time.sleep(9)"
    text = program("time.sleep(9); ranks.any('keys', False).result()", of_1)
    ended = launch(tmp_path, text, 2)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("is through") == 2


def test_a_rank_that_is_stopped_while_it_compiles_ends_the_job(tmp_path: Path) -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    fault = f"with activity.during('compiling'): time.sleep(3); {stop}"
    ended = job(tmp_path, fault, stall_timeout=3.0)
    assert ended.code == 1
    assert ended.seconds < 60
    assert "rank 1: after 'keys' (call 6) at step 3, compiling, silent for " in ended.err


def test_sums_are_compiled_by_the_thread_that_asks(tmp_path: Path) -> None:
    """It takes longer than the timeout, and others must hear of it."""
    slow = """
module = __import__("sys").modules["cupyrec.parallel.all_reduce"]
rank_sum = module.rank_sum
def compiled(*given, **options):
    module.rank_sum = rank_sum
    with activity.during("compiling"):
        time.sleep(9)
    return rank_sum(*given, **options)
x = np.ones(100, np.float32)
"""
    reduce = "all_reduce(ranks, 'gradients', x).result(); assert (x == 2).all()"
    ended = launch(tmp_path, program(reduce, f"module.rank_sum = compiled; {reduce}", slow), 2)
    assert (ended.returncode, ended.stderr) == (0, "")


def verdict(dog: Watchdog, seconds: int, *beats: tuple) -> str | None:
    """Of a dog that hears the same every second."""
    told = None
    for _ in range(seconds):
        for beat in beats:
            dog.hear(*beat)
        told = told or dog.judge(1.0, timeout=10.0)
    return told


@pytest.mark.parametrize(("rank", "patience"), [(0, 10), (1, 14), (2, 18), (3, 18)])
def test_rank_0_judges_first(rank: int, patience: int) -> None:
    dog = Watchdog(rank, 4)
    dog.hear(rank, ROWS)
    assert verdict(dog, patience + 1) is None
    assert verdict(dog, 1).startswith(f"no rank has got on for {patience + 1} s:\n")


@pytest.mark.parametrize(
    "change", [dict(calls=9), dict(step=4), dict(inside=False), dict(inside=False, doing="saving")]
)
def test_news_of_any_rank_are_progress(change: dict) -> None:
    dog = Watchdog(0, 3)
    assert verdict(dog, 10, (0, ROWS), (1, ROWS), (2, KEYS)) is None
    assert verdict(dog, 10, (0, ROWS), (1, ROWS._replace(**change)), (2, KEYS)) is None
    assert bool(verdict(dog, 10, (0, ROWS), (1, ROWS._replace(**change)), (2, KEYS))) is (
        "doing" not in change  # that is progress as long as it is heard
    )


def test_a_rank_that_falls_silent_while_busy_does_not_get_on() -> None:
    dog = Watchdog(0, 2)
    assert verdict(dog, 20, (0, ROWS), (1, KEYS._replace(doing="saving"))) is None
    told = verdict(dog, 12, (0, ROWS))
    assert "  rank 1: after 'keys' (call 7) at step 3, saving, silent for 12 s" in told


def test_what_needs_no_other_rank_is_progress_whatever_the_call_waits_for() -> None:
    dog = Watchdog(0, 2)
    assert verdict(dog, 20, (0, ROWS), (1, ROWS._replace(doing="compiling", alone=True))) is None
    assert "compiling, silent for 12 s" in verdict(dog, 12, (0, ROWS))


def test_a_rank_that_waits_for_others_is_not_busy() -> None:
    assert verdict(Watchdog(0, 2), 20, (0, ROWS), (1, ROWS._replace(doing="saving"))) is not None


def test_the_others_take_rank_0s_word_for_the_jobs_progress() -> None:
    dog = Watchdog(1, 3)
    for pulse in range(60):
        assert verdict(dog, 1, (1, ROWS), (0, ROWS, pulse)) is None
    told = verdict(dog, 20, (1, ROWS), (0, ROWS, 59))
    assert told == "no rank has got on for 15 s:\n  ranks 0, 1: in 'rows' (call 8) at step 3"


def test_ranks_that_nobody_heard_of_are_told() -> None:
    told = verdict(Watchdog(0, 3), 12, (0, ROWS))
    assert told.endswith("\n  ranks 1, 2: not heard of yet, silent for 12 s")


def test_an_end_is_early_only_if_others_wait_for_a_later_call() -> None:
    ended = KEYS._replace(ended=True)
    assert verdict(Watchdog(0, 2), 9, (0, ROWS._replace(calls=7)), (1, ended)) is None
    assert verdict(Watchdog(0, 2), 9, (0, ROWS._replace(inside=False)), (1, ended)) is None
    assert verdict(Watchdog(0, 2), 2, (0, ROWS), (1, ended)) is None  # news may be late
    told = verdict(Watchdog(0, 2), 9, (0, ROWS), (1, ended))
    assert told.startswith("rank 1 ended while others wait:\n")
    assert verdict(Watchdog(1, 2), 9, (0, ROWS), (1, ended)) is None  # for rank 0 to tell


def test_a_rank_may_be_heard_of_while_the_dog_judges() -> None:
    """Messages come in another thread."""
    dog = Watchdog(0, 3)

    class Late(Position):
        @property
        def inside(self) -> bool:
            dog.hear(2, KEYS)
            return True

    dog.hear(0, ROWS)
    dog.hear(1, Late(*ROWS))
    assert dog.judge(1.0, timeout=10.0) is None
