"""Work of several threads, in order."""

import threading
import time

import pytest
from oracle import sentence

from cupyrec.data.in_order import in_order


def ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("cupyrec-in-order")]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_results_keep_their_order(threads, count):
    def slow(i: int) -> int:
        time.sleep(0.002 * (i % 3))
        return i * i

    assert list(in_order(slow, iter(range(count)), threads)) == [i * i for i in range(count)]
    assert not ours()


def test_several_work_at_once():
    meeting = threading.Barrier(2, timeout=30)
    assert list(in_order(lambda _: meeting.wait() >= 0, range(4), 2)) == [True] * 4


def test_few_are_asked_for_ahead():
    asked = []

    def items():
        for i in range(50):
            asked.append(i)
            yield i

    for i in in_order(abs, items(), 3):
        assert i < len(asked) <= i + 4


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_work_comes_at_its_place(threads):
    def work(i: int) -> int:
        if i == 5:
            raise ValueError("five")
        return i

    results, got = in_order(work, range(20), threads), []
    with pytest.raises(ValueError, match=sentence("five")):
        got.extend(iter(lambda: next(results), None))
    assert not ours()
    results = in_order(work, range(20), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=sentence("five")):
        next(results)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_items_comes_after_those_before_it(threads):
    def items():
        yield from range(5)
        raise OSError("gone")

    results = in_order(abs, items(), threads)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match=sentence("gone")):
        next(results)
    assert not ours()


def test_closing_ends_the_threads():
    results = in_order(abs, iter(int, 1), 2)
    assert next(results) == 0
    assert ours()
    results.close()
    assert not ours()
