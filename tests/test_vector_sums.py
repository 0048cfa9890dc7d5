"""Sums of vectors by address."""

import numpy as np
import pytest

from cupyrec import cpu
from cupyrec.ops.vector_sums import AHEAD, add_vectors, write_sum


@cpu.exact_loop
def add_up(x, order, weights, first, stop, sums):
    addresses = np.zeros(order.size + AHEAD, np.uint64)
    for i in range(order.size):
        addresses[i] = x.ctypes.data + 4 * order[i] * x.shape[1]
    add_vectors(addresses, weights, first, stop, sums)


@pytest.mark.parametrize("width", [1, 3, 17, 127])
@pytest.mark.parametrize(("first", "stop"), [(0, 0), (2, 3), (0, 4), (1, 10)])
@pytest.mark.parametrize("weighted", [False, True])
def test_vectors_are_added_one_after_another(width, first, stop, weighted):
    generator = np.random.default_rng(0)
    x, order = generator.standard_normal((8, width), np.float32), generator.integers(0, 8, 10)
    weights = generator.standard_normal(10, np.float32) if weighted else None
    got, expected = np.ones((2, width), np.float32)
    add_up(x, order, weights, first, stop, got)
    for i in range(first, stop):
        expected += x[order[i]] * (weights[i] if weighted else np.float32(1))
    assert got.tobytes() == expected.tobytes()


@cpu.exact_loop
def write_up(a, b, c, out):
    vectors = np.uint64(a.ctypes.data), np.uint64(b.ctypes.data), np.uint64(c.ctypes.data)
    write_sum(vectors, np.uint64(out.ctypes.data), a.size)


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 127])
@pytest.mark.parametrize("onto", [None, 0, 2])
def test_a_sum_is_written_in_order_wherever_it_belongs(width, onto):
    x = np.random.default_rng(0).standard_normal((4, width + 1), np.float32)
    a, b, c, out = x[:, :width]
    out = out if onto is None else x[onto, :width]
    expected, behind = (a + b) + c, x[:, width].copy()
    write_up(a, b, c, out)
    assert out.tobytes() == expected.tobytes()
    assert np.array_equal(x[:, width], behind)
