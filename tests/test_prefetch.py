import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from cupyrec.data import prefetch


def threads() -> int:
    return sum(thread.name == "cupyrec-prefetch" for thread in threading.enumerate())


def eventually(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


class Source:
    """Counts without end, and tells how far it came and whether it was closed."""

    def __init__(self):
        self.made, self.closed = 0, False

    def __iter__(self):
        try:
            while True:
                self.made += 1
                yield self.made
        finally:
            self.closed = True


@pytest.mark.parametrize("depth", [1, 2, 100])
@pytest.mark.parametrize("items", [0, 1, 50])
def test_all_items_in_order(depth, items):
    assert list(prefetch(range(items), depth)) == list(range(items))
    assert threads() == 0


def test_none_is_an_item():
    assert list(prefetch([None, None])) == [None, None]


def test_the_source_runs_in_another_thread():
    names = prefetch(threading.current_thread().name for _ in range(2))
    assert list(names) == ["cupyrec-prefetch"] * 2


def test_reads_ahead_and_no_further():
    source = Source()
    items = prefetch(source, depth=3)
    assert next(items) == 1
    assert eventually(lambda: source.made == 5)  # one here, three in the queue, one that waits
    time.sleep(0.05)
    assert source.made == 5
    items.close()


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield 1
        yield 2
        raise ZeroDivisionError("in the source")

    items = prefetch(source())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="in the source"):
        next(items)
    assert list(items) == []
    assert threads() == 0


@pytest.mark.parametrize("end", ["close", "drop", "cycle", "error"])
def test_the_thread_ends_with_its_consumer(end):
    source = Source()
    items = prefetch(source, depth=1)
    next(items)
    assert eventually(lambda: source.made == 3)  # the queue is full
    if end == "close":
        items.close()
    elif end == "drop":
        del items
    elif end == "cycle":
        cycle = [items]
        cycle.append(cycle)
        del items, cycle
        gc.collect()
    else:
        with pytest.raises(KeyError):
            items.throw(KeyError())
    assert threads() == 0
    assert source.closed
    assert source.made == 3


def test_an_iterator_never_begun_has_no_thread():
    items = prefetch(Source())
    assert threads() == 0
    items.close()


def test_two_at_once():
    assert list(zip(prefetch(range(100), 1), prefetch(range(100), 7), strict=True)) == [
        (i, i) for i in range(100)
    ]


@pytest.mark.parametrize(("depth", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_bad_depth(depth, error):
    with pytest.raises(error, match="prefetch: 'depth' must be"):
        prefetch([], depth)


def run(code: str) -> subprocess.Popen:
    code = "import itertools, time\nfrom cupyrec.data import prefetch\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_the_interpreter_ends_with_an_iterator_left_open():
    process = run("""
        items = prefetch(itertools.count(), 1)
        print(next(items))
    """)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "0\n", "")


def test_ctrl_c_while_waiting():
    process = run("""
        def slow():
            for i in itertools.count():
                yield i
                time.sleep(0.3)
        for item in prefetch(slow()):
            print(item, flush=True)
    """)
    assert process.stdout.readline() == "0\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
