"""row_life.cu."""

import numpy as np
import oracle
import pytest
from test_embedding_rows_kernels import chunked, moved, unchunked
from test_row_life import MOST, SHAPES, lives, touched

from cupyrec import arrays
from cupyrec.ops.row_life import touch_rows


@pytest.mark.parametrize(("n", "stride", "k", "at"), [s for s in SHAPES if s[0] < 1000])
@pytest.mark.parametrize("step", [0, MOST])
def test_lives_are_noted_and_nothing_else(xp, n, stride, k, at, step):
    held, rows, offsets = lives(n, stride, at)
    memory, chunks = chunked(xp, held.view(np.float32), k)
    counts = touch_rows(memory, *moved(xp, rows, offsets), at, step)
    after, expected = touched(held, rows, offsets, at, step)
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(arrays.to_host(counts), expected)
    assert unchunked(chunks, n).tobytes() == after.tobytes()


def test_counts_end_at_the_most(xp):
    held = np.array([[0, MOST - 2, 0, 0], [0, 0, 0, 0]], np.int32)
    memory, _ = chunked(xp, held.view(np.float32), 1)
    for step, expected in [(1, [MOST - 1, 1]), (2, [MOST, 2]), (3, [MOST, 3])]:
        counts = touch_rows(memory, *moved(xp, np.arange(2), np.arange(3)), 0, step)
        assert arrays.to_host(counts).tolist() == expected
    counts = touch_rows(memory, *moved(xp, np.arange(2), np.array([0, 0, 2**63 - 1])), 0, 4)
    assert arrays.to_host(counts).tolist() == [MOST, MOST]


def test_no_rows(xp):
    held = oracle.normals((4, 4))
    memory, chunks = chunked(xp, held, 1)
    for none in (np.empty(0, np.int64), np.full(3, -1)):
        counts = touch_rows(memory, *moved(xp, none, np.arange(len(none) + 1)), 2, 1)
        assert arrays.to_host(counts).tolist() == [0] * len(none)
    assert unchunked(chunks, 4).tobytes() == held.tobytes()


@pytest.mark.parametrize("at", [2, 3])
def test_thread_order(xp, at):
    held, rows, offsets = lives(600, 8, at)

    def call():
        memory, chunks = chunked(xp, held.view(np.float32), 5)
        return [touch_rows(memory, *moved(xp, rows, offsets), at, 3), *chunks]

    oracle.check_thread_order(xp, call)


def test_one_device(xp):
    memory, _ = chunked(xp, np.zeros((4, 4), np.float32), 1)
    with pytest.raises(TypeError, match=r"touch_rows: arguments must be arrays of one device, "):
        touch_rows(memory, np.zeros(1, np.int64), np.arange(2), 0, 1)
