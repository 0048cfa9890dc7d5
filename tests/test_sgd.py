import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.sgd import sgd_dense, sgd_rows


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025, 65_537])
def test_dense_is_exact_on_integer_data(n):
    w, g = oracle.integers(n, -99, 99), oracle.integers(n, -99, 99, seed=1)
    truth = np.float64(w)
    oracle.sgd(truth, g, lr=0.5, weight_decay=0.5, scale=0.25)
    sgd_dense(w, g, lr=0.5, weight_decay=0.5, scale=0.25)
    oracle.check_exact(w, truth)


@pytest.mark.parametrize("width", [1, 3, 4, 10, 16, 128, 130, 1025])
@pytest.mark.parametrize("n", [1, 17, 1025])
def test_rows_are_exact_on_integer_data_and_others_untouched(n, width):
    rows = oracle.integers((n + 3, (width + 3) // 4 * 4), -99, 99)
    memory, chunks = chunked(rows, 3)
    touched = np.random.default_rng(0).permutation(n + 3)[:n]
    g = oracle.integers((n, width), -99, 99, seed=1)
    truth = np.float64(rows)
    for row, gradient in zip(touched, g, strict=True):
        oracle.sgd(truth[row, :width], gradient, lr=0.5, weight_decay=0.5, scale=0.25)
    sgd_rows(memory, touched, g, lr=0.5, weight_decay=0.5, scale=0.25)
    oracle.check_exact(unchunked(chunks, n + 3), truth)


def test_error_over_50_steps():
    w = oracle.normals(1025)
    truth, naive = np.float64(w), w.copy()
    for t in range(50):
        g = oracle.normals(1025, seed=t)
        oracle.sgd(truth, g, lr=0.1, weight_decay=0.3, scale=0.7)
        naive *= np.float32(1 - 0.1 * 0.3)
        naive -= np.float32(0.1) * (np.float32(0.7) * g)
        sgd_dense(w, g, lr=0.1, weight_decay=0.3, scale=0.7)
    oracle.check_error(w, naive, truth)


def test_no_rows():
    rows = oracle.normals((4, 4))
    memory, chunks = chunked(rows, 1)
    sgd_rows(memory, np.empty(0, np.int64), np.empty((0, 3), np.float32), lr=1.0)
    np.testing.assert_array_equal(unchunked(chunks, 4), rows)


def test_nan_stays_in_its_element():
    w, g = np.zeros(4, np.float32), np.array([0, np.nan, np.inf, 1], np.float32)
    sgd_dense(w, g, lr=1.0)
    np.testing.assert_array_equal(w, [0, np.nan, -np.inf, -1])


def test_same_bits():
    start, g = oracle.normals((5000, 16)), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        w = oracle.normals(200_000)
        sgd_dense(w, oracle.normals(200_000, seed=1), lr=0.1, scale=0.3)
        memory, chunks = chunked(start, 6)
        sgd_rows(memory, order, g, lr=0.1, scale=0.3)
        return w, unchunked(chunks, 5000)

    oracle.check_same_bits(call)


def test_rows_refuse():
    check_update_refuses(lambda *a: sgd_rows(*a, lr=1.0), parts=1)


@pytest.mark.parametrize("name", ["w", "g"])
def test_dense_refuses(name):
    arrays = {n: np.ones(3, np.float32) for n in ["w", "g"]}
    text = f"sgd_dense: '{name}' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        sgd_dense(**arrays | {name: np.ones(3)}, lr=1.0)
    with pytest.raises(ValueError, match="sgd_dense: '.' must have N = "):
        sgd_dense(**arrays | {name: np.ones(2, np.float32)}, lr=1.0)
