"""Blocks of work on several threads."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from cupyrec import cpu


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


@pytest.mark.parametrize(("n", "block"), [(0, 4), (1, 4), (4, 4), (5, 4), (1025, 1), (1025, 64)])
def test_parallel_calls_each_block_once(threads, n, block):
    seen = []
    cpu.parallel(lambda i, j: seen.append((i, j)), n, block)
    assert sorted(seen) == [(i, min(i + block, n)) for i in range(0, n, block)]


def test_parallel_runs_on_as_many_threads_as_set(threads):
    meeting = threading.Barrier(threads, timeout=60)  # passed only if so many are there at once
    workers = set()

    def work(i, j):
        meeting.wait()
        workers.add(threading.get_ident())

    cpu.parallel(work, threads, 1)
    assert len(workers) == threads
    assert threading.get_ident() in workers


def test_parallel_raises_what_a_block_raises(threads):
    def work(i, j):
        if i == 5:
            raise RuntimeError("block 5")

    with pytest.raises(RuntimeError, match="block 5"):
        cpu.parallel(work, 10, 1)
    done = []
    cpu.parallel(lambda i, j: done.append(i), 10, 1)  # the pool lives on
    assert sorted(done) == list(range(10))


def test_parallel_raises_once_no_block_runs():
    before, meeting = cpu.num_threads(), threading.Barrier(4, timeout=60)
    caller, running = threading.get_ident(), set()

    def work(i, j):
        running.add(i)
        meeting.wait()  # each thread has one block
        helps = threading.get_ident() != caller
        time.sleep(0.02 * i * helps)
        running.remove(i)
        if helps:
            raise RuntimeError(f"block {i}")

    cpu.set_num_threads(4)
    try:
        for _ in range(8):
            with pytest.raises(RuntimeError, match="block"):
                cpu.parallel(work, 4, 1)
            assert not running
    finally:
        cpu.set_num_threads(before)


def test_blocks_find_the_context_of_the_caller(threads):
    meeting = threading.Barrier(threads, timeout=60)
    seen = []

    def work(i, j):
        meeting.wait()
        seen.append(np.geterr()["over"])

    with np.errstate(over="raise"):
        cpu.parallel(work, threads, 1)
    assert seen == ["raise"] * threads


def test_parallel_may_be_nested(threads):
    done = []

    def outer(i, j):
        cpu.parallel(lambda k, _: (time.sleep(0.001), done.append((i, k))), 4, 1)

    cpu.parallel(outer, 4, 1)
    assert sorted(done) == [(i, k) for i in range(4) for k in range(4)]


def test_parallel_from_several_threads():
    sums = np.zeros((4, 100))

    def work_on(row):
        def work(i, j):
            row[i:j] += 1

        for _ in range(20):
            cpu.parallel(work, 100, 7)

    callers = [threading.Thread(target=work_on, args=(row,)) for row in sums]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    np.testing.assert_array_equal(sums, 20)


FORKED = """
import os
import numpy as np
from cupyrec import cpu
from cupyrec.ops.clip_scale import clip_scale
cpu.set_num_threads(3)
x = np.ones(160_000, np.float32)
def ones():
    out = np.zeros(100, np.int64)
    def work(i, j):
        out[i:j] = 1
    cpu.parallel(work, 100, 7)
    return int(out.sum())
ones()
child = os.fork()  # at once: nobody may be compiling what waits
if child == 0:
    os._exit(0 if ones() == 100 and clip_scale([x], 1) == 1 / 400 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ones())
"""


@pytest.mark.parametrize("cached", [False, True])
def test_parallel_in_a_forked_process(cached, tmp_path):
    """It has none of its parent's threads, and loads loops that the parent never called."""
    environment = os.environ if cached else os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("0 100\n", "")


def test_no_room_for_threads_leaves_the_work_to_those_there_are(monkeypatch):
    monkeypatch.setattr(cpu, "_helpers", cpu._Helpers())
    monkeypatch.setattr(cpu, "_threads", 5)

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    for _ in range(2):
        cpu.parallel(lambda i, j: done.append(i), 10, 1)
    assert sorted(done) == sorted([*range(10)] * 2)


def test_an_error_keeps_nothing_of_what_the_work_held(threads):
    held = np.zeros(3)
    reference = weakref.ref(held)
    meeting = threading.Barrier(threads, timeout=60)

    def work(i, j, held=held):
        meeting.wait()
        raise RuntimeError("all of them")

    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="all of them"):
            cpu.parallel(work, threads, 1)
        del work, held
        deadline = time.monotonic() + 30
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # until the last thread is out
        assert reference() is None
    finally:
        gc.enable()


def test_threads_without_work_go_to_sleep(threads):
    meeting = threading.Barrier(threads, timeout=60)
    cpu.parallel(lambda i, j: meeting.wait(), threads, 1)
    for _ in range(60):  # they spin a moment
        before = time.process_time()
        time.sleep(0.5)
        if (used := time.process_time() - before) < 0.25:
            break
    assert used < 0.25


def test_a_job_that_nobody_took_up_is_forgotten(threads):
    """Even where all others are at work: what it holds is freed."""
    gate, held = threading.Event(), np.zeros(3)
    reference = weakref.ref(held)
    caller = threading.Thread(
        target=cpu.parallel, args=(lambda i, j: gate.wait(30), 2 * threads, 1)
    )
    caller.start()
    cpu.parallel(lambda i, j, held=held: held[i:j].sum(), 3, 1)
    gate.set()
    caller.join(60)
    del held
    deadline = time.monotonic() + 30
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None


@pytest.mark.parametrize("delays", [[0.1], np.linspace(0, 2e-3, 60)], ids=["asleep", "on the way"])
def test_an_interrupt_comes_when_no_block_runs(delays):
    """Wherever the caller is: at its block, on its way to wait, or asleep."""
    before, caller, meeting = cpu.num_threads(), threading.get_ident(), threading.Barrier(2)
    written = []

    def work(delay):
        meeting.wait(30)
        if threading.get_ident() != caller:
            until = time.perf_counter() + delay
            while time.perf_counter() < until:
                time.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)  # an impatient user
            time.sleep(0.02)
            written.append(delay)

    cpu.set_num_threads(2)
    try:
        for delay in delays:
            written.clear()
            with pytest.raises(KeyboardInterrupt):
                cpu.parallel(lambda i, j, delay=delay: work(delay), 2, 1)
            assert written == [delay]
    finally:
        cpu.set_num_threads(before)


def test_jobs_that_nobody_took_up_hold_nothing_while_others_work():
    before, gate, meeting = cpu.num_threads(), threading.Event(), threading.Barrier(3, timeout=60)
    cpu.set_num_threads(2)
    work = lambda i, j: (meeting.wait(), gate.wait(60))  # noqa: E731
    busy = threading.Thread(target=cpu.parallel, args=(work, 2, 1))
    busy.start()
    try:
        meeting.wait()  # both are in
        held = np.zeros(3)
        reference = weakref.ref(held)
        cpu.parallel(lambda i, j, held=held: held[i:j].sum(), 3, 1)
        del held
        assert reference() is None
    finally:
        gate.set()
        busy.join(60)
        cpu.set_num_threads(before)
