import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked, unchunked

from cupyrec.ops.move_rows import move_rows


def disjoint(n, count, seed=0):
    """Rows to move, and others to move them over."""
    order = np.random.default_rng(seed).permutation(n)
    return order[:count], order[count : 2 * count]


@pytest.mark.parametrize(("n", "count"), [(1, 0), (3, 1), (17, 8), (1025, 512)])
@pytest.mark.parametrize(("stride", "k"), [(4, 0), (12, 3), (132, 6)])
def test_rows_come_over_whole(n, count, stride, k):
    rows = oracle.normals((n, stride))
    rows.view(np.int32)[:, -1] = np.arange(n)  # a word that is no float
    memory, chunks = chunked(rows, k)
    source, target = disjoint(n, count)
    move_rows(memory, source, target)
    for i, j in zip(source, target, strict=True):
        rows[j] = rows[i]
    assert unchunked(chunks, n).tobytes() == rows.tobytes()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(source=np.zeros(1, np.int32)), TypeError, "'source' must be int64, got int32."),
        (dict(target=np.zeros(1)), TypeError, "'target' must be int64, got float64."),
        (
            dict(target=np.zeros(2, np.int64)), ValueError,
            "'target' must have N = 1 like 'source', got shape (2,).",
        ),
    ],
)  # fmt: skip
def test_refuses(wrong, error, text):
    memory, _ = chunked(np.zeros((4, 4), np.float32), 1)
    rows = dict(source=np.zeros(1, np.int64), target=np.ones(1, np.int64))
    with pytest.raises(error, match=oracle.sentence(f"move_rows: {text}")):
        move_rows(memory, **rows | wrong)
