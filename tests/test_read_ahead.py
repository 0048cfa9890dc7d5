import threading

import numpy as np
import pytest

from cupyrec.embedding.host_rows import HostRows
from cupyrec.embedding.read_ahead import ReadAhead

ROWS = np.arange(20)


class Told(HostRows):
    """Notes which rows are asked for, and waits or fails in a thread if told to."""

    def __init__(self):
        super().__init__(4)
        self.asked, self.gate, self.error = [], None, None
        self.write(ROWS, lines_of(ROWS))

    def read(self, rows, out):
        self.asked.append(rows.tolist())
        if threading.current_thread() is not threading.main_thread():
            if self.gate is not None:
                assert self.gate.wait(60)
            if self.error is not None:
                raise self.error
        super().read(rows, out)


def lines_of(rows, salt=0):
    return (np.asarray(rows)[:, None] * 10 + np.arange(4) + salt).astype(np.uint32)


@pytest.fixture
def rows():
    return Told()


def read(ahead, asked):
    out = np.empty((len(asked), 4), np.uint32)
    ahead.read(np.array(asked, np.int64), out)
    return out


def test_what_was_read_ahead_is_not_read_again(rows):
    ahead = ReadAhead(rows, 4)
    ahead.begin(np.array([7, 3, 5]))
    np.testing.assert_array_equal(read(ahead, [5, 9, 3]), lines_of([5, 9, 3]))
    assert rows.asked == [[3, 5, 7], [9]]
    np.testing.assert_array_equal(read(ahead, [5]), lines_of([5]))  # once
    assert rows.asked[2:] == [[5]]


@pytest.mark.parametrize("asked", [[], [0], [19, 0, 4]])
def test_nothing_of_it_may_be_asked_for(rows, asked):
    ahead = ReadAhead(rows, 4)
    ahead.begin(np.array([7]))
    np.testing.assert_array_equal(read(ahead, asked), lines_of(asked))


def test_rows_that_were_written_meanwhile_are_read_again(rows):
    ahead, rows.gate = ReadAhead(rows, 4), threading.Event()
    ahead.begin(np.array([3, 5, 7]))
    rows.write(np.array([5, 11]), lines_of([5, 11], 1000))
    ahead.written(np.array([5, 11, 99, 0]))
    rows.gate.set()
    want = np.concatenate([lines_of([3]), lines_of([5], 1000), lines_of([7])])
    np.testing.assert_array_equal(read(ahead, [3, 5, 7]), want)
    assert rows.asked[1:] == [[5]]


def test_an_error_of_the_thread_is_the_callers(rows):
    ahead, rows.error = ReadAhead(rows, 4), OSError("gone")
    ahead.begin(np.array([3, 5]))
    np.testing.assert_array_equal(read(ahead, [3]), lines_of([3]))  # here it worked
    rows.truncate(0)


def test_forgetting_waits_for_the_thread(rows):
    ahead = ReadAhead(rows, 4)
    ahead.begin(np.array([3, 5]))
    ahead.begin(np.array([7]))
    ahead.forget()
    np.testing.assert_array_equal(read(ahead, [7]), lines_of([7]))
    assert rows.asked == [[3, 5], [7], [7]]


def test_no_rows_need_no_thread(rows):
    ahead = ReadAhead(rows, 4)
    ahead.begin(np.empty(0, np.int64))
    assert ahead._thread is None
    assert rows.asked == []
