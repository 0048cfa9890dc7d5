"""move_rows.cu."""

import numpy as np
import oracle
import pytest
from test_embedding_rows_kernels import chunked, moved, unchunked
from test_move_rows import disjoint

from cupyrec.ops.move_rows import move_rows


@pytest.mark.parametrize(("n", "count"), [(1, 0), (3, 1), (17, 8), (1025, 512)])
@pytest.mark.parametrize(("stride", "k"), [(4, 0), (12, 3), (132, 6)])
def test_rows_come_over_whole(xp, n, count, stride, k):
    rows = oracle.normals((n, stride))
    rows.view(np.int32)[:, -1] = np.arange(n)
    memory, chunks = chunked(xp, rows, k)
    source, target = disjoint(n, count)
    move_rows(memory, *moved(xp, source, target))
    rows[target] = rows[source]
    assert unchunked(chunks, n).tobytes() == rows.tobytes()


def test_thread_order(xp):
    rows = oracle.normals((300, 20))

    def call():
        memory, chunks = chunked(xp, rows, 5)
        move_rows(memory, *moved(xp, *disjoint(300, 150)))
        return chunks

    oracle.check_thread_order(xp, call)


def test_one_device(xp):
    memory, _ = chunked(xp, np.zeros((4, 4), np.float32), 1)
    with pytest.raises(TypeError, match=r"move_rows: arguments must be arrays of one device, "):
        move_rows(memory, np.zeros(1, np.int64), np.ones(1, np.int64))
