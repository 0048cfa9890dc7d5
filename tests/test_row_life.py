import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked, unchunked

from cupyrec.ops.row_life import touch_rows

MOST = 2**31 - 1
SHAPES = [(1, 4, 0, 2), (3, 4, 1, 0), (17, 12, 3, 5), (9000, 12, 6, 10), (300, 132, 4, 129)]


def lives(n, stride, at, seed=0):
    """Rows with counts up to the largest, (rows, offsets) to touch: some negative, some of none."""
    rng = np.random.default_rng(seed)
    held = rng.integers(-(2**31), 2**31, (n, stride)).astype(np.int32)
    held[:, at + 1] = rng.choice([0, 5, 1_000_000, MOST - 3, MOST], n)
    rows = rng.permutation(n)[: (n + 1) // 2]
    rows = rng.permutation(np.concatenate([rows, np.full(n // 4, -1), [-(2**63)]]))
    more = rng.choice([0, 1, 2, 3, 4, 2**31, 2**40], len(rows))
    return held, rows, np.concatenate([[7], 7 + np.cumsum(more)])


def touched(held, rows, offsets, at, step):
    """(rows, counts) afterwards, in Python's integers."""
    held, counts = held.copy(), np.zeros(len(rows), np.int32)
    for u, row in enumerate(rows.tolist()):
        if row >= 0:
            looked_up = int(offsets[u + 1]) - int(offsets[u])
            counts[u] = min(int(held[row, at + 1]) + looked_up, MOST)
            held[row, at], held[row, at + 1] = step, counts[u]
    return held, counts


@pytest.mark.parametrize(("n", "stride", "k", "at"), SHAPES)
@pytest.mark.parametrize("step", [0, 12, MOST])
def test_lives_are_noted_and_nothing_else(n, stride, k, at, step):
    held, rows, offsets = lives(n, stride, at)
    memory, chunks = chunked(held.view(np.float32), k)
    counts = touch_rows(memory, rows, offsets, at, step)
    after, expected = touched(held, rows, offsets, at, step)
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, expected)
    assert unchunked(chunks, n).tobytes() == after.tobytes()


def test_counts_end_at_the_most():
    held = np.array([[0, MOST - 2, 0, 0], [0, 0, 0, 0]], np.int32)
    memory, _ = chunked(held.view(np.float32), 1)
    for step, expected in [(1, [MOST - 1, 1]), (2, [MOST, 2]), (3, [MOST, 3])]:
        counts = touch_rows(memory, np.arange(2), np.arange(3), 0, step)
        assert counts.tolist() == expected
    counts = touch_rows(memory, np.arange(2), np.array([0, 0, 2**63 - 1]), 0, 4)
    assert counts.tolist() == [MOST, MOST]


def test_no_rows():
    held = oracle.normals((4, 4))
    memory, chunks = chunked(held, 1)
    for none in (np.empty(0, np.int64), np.full(3, -1)):
        counts = touch_rows(memory, none, np.arange(len(none) + 1), 2, 1)
        assert counts.tolist() == [0] * len(none)
    assert unchunked(chunks, 4).tobytes() == held.tobytes()


def test_views():
    held, rows, offsets = lives(40, 8, 3)
    memory, chunks = chunked(held.view(np.float32), 2)
    counts = touch_rows(memory, np.repeat(rows, 2)[::2], np.repeat(offsets, 2)[::2], 3, 9)
    after, expected = touched(held, rows, offsets, 3, 9)
    np.testing.assert_array_equal(counts, expected)
    assert unchunked(chunks, 40).tobytes() == after.tobytes()


def test_same_bits():
    held, rows, offsets = lives(20_000, 8, 5)

    def call():
        memory, chunks = chunked(held.view(np.float32), 6)
        return touch_rows(memory, rows, offsets, 5, 3), unchunked(chunks, 20_000)

    oracle.check_same_bits(call)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(rows=np.zeros(2, np.int32)), TypeError, "'rows' must be int64, got int32."),
        (dict(offsets=np.zeros(3)), TypeError, "'offsets' must be int64, got float64."),
        (dict(rows=np.arange(1)[None]), ValueError, "'rows' must have axes (U), got shape (1, 1)."),
        (dict(offsets=np.arange(2)), ValueError, "'offsets' must have axes (3), got shape (2,)."),
        (dict(at=1.0), TypeError, "'at' must be an integer, got 1.0."),
        (dict(at=-1), ValueError, "'at' must be at least 0, got -1."),
        (dict(at=3), ValueError, "rows must have 'at' + 2 = 5 words, got a stride of 4."),
        (dict(step=True), TypeError, "'step' must be an integer, got True."),
        (dict(step=-1), ValueError, "'step' must be at least 0, got -1."),
        (dict(step=2**31), ValueError, "'step' must be less than 2**31, got 2147483648."),
    ],
)  # fmt: skip
def test_refuses(wrong, error, text):
    held = np.zeros((4, 4), np.float32)
    memory, chunks = chunked(held, 1)
    given = dict(rows=np.arange(2), offsets=np.arange(3), at=0, step=1)
    with pytest.raises(error, match=oracle.sentence(f"touch_rows: {text}")):
        touch_rows(memory, **given | wrong)
    with pytest.raises(TypeError, match=r"'memory\.chunks' must be uint64, got int64\."):
        touch_rows(memory._replace(chunks=memory.chunks.view(np.int64)), **given)
    assert not unchunked(chunks, 4).any()
