import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.rowwise_adagrad import rowwise_adagrad_rows

OPTIONS = dict(lr=0.1, eps=1e-8, weight_decay=0.02, scale=0.7)
f32 = np.float32


def naive(w, s, g, *, lr, eps, weight_decay, scale):
    """The formula in float32, by NumPy."""
    g = f32(scale) * g
    s += (g * g).mean()
    w -= f32(lr * weight_decay) * w
    w -= f32(lr) * g / (np.sqrt(s) + f32(eps))


def start_rows(n, width, whole=False):
    """Rows whose sum starts from 0.1, or 0 where whole; 9 is in the padding."""
    rows = np.full((n, (width + 4) // 4 * 4), 9, f32)
    rows[:, :width] = oracle.integers((n, width), -99, 99) if whole else oracle.normals((n, width))
    rows[:, width] = 0 if whole else 0.1
    return rows


def exact_gradient(n, width):
    """A row holds one power of two, of both signs: mean of squares and root are exact."""
    signs = 2 * oracle.integers((n, width), 0, 1, seed=1) - 1
    return signs * 2 ** oracle.integers((n, 1), 0, 6, seed=2)


@pytest.mark.parametrize("width", [1, 3, 4, 10, 16, 128, 130, 1025])
@pytest.mark.parametrize("n", [0, 1, 17, 127])
def test_is_exact_where_means_and_roots_are(n, width):
    rows = start_rows(n + 3, width, whole=True)
    memory, chunks = chunked(rows, 3)
    touched, g = np.random.default_rng(0).permutation(n + 3)[:n], exact_gradient(n, width)
    rowwise_adagrad_rows(memory, touched, g, lr=2.0, eps=0.0, scale=0.5)
    truth = np.float64(rows)
    for row, x in zip(touched, g, strict=True):
        part = truth[row, :width], truth[row, width : width + 1]
        oracle.rowwise_adagrad(*part, x, lr=2.0, eps=0.0, scale=0.5)
    oracle.check_exact(4 * unchunked(chunks, n + 3), 4 * truth)


@pytest.mark.parametrize("width", [1, 3, 10, 130])
def test_over_50_steps(width):
    """Rows that come and go, against float64 and the same in float32 by NumPy."""
    n, start = 20, start_rows(20, width)
    memory, chunks = chunked(start, 3)
    truth, plain = np.float64(start), start.copy()
    generator = np.random.default_rng(0)
    for t in range(1, 51):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        before = unchunked(chunks, n)
        rowwise_adagrad_rows(memory, touched, g, **OPTIONS)
        others = np.setdiff1d(np.arange(n), touched)
        assert unchunked(chunks, n)[others].tobytes() == before[others].tobytes()
        for row, x in zip(touched, g, strict=True):
            for rows, rule in [(truth, oracle.rowwise_adagrad), (plain, naive)]:
                rule(rows[row, :width], rows[row, width : width + 1], x, **OPTIONS)
    after = unchunked(chunks, n)
    for part in (slice(width), slice(width, width + 1)):
        oracle.check_error(after[:, part], plain[:, part], truth[:, part])
    assert after[-1].tobytes() == start[-1].tobytes()
    assert (after[:, width + 1 :] == 9).all()


def test_a_wide_row_is_summed_as_well_as_by_numpy():
    start, g = start_rows(50, 4096), 1 + oracle.normals((50, 4096)) / 8
    memory, chunks = chunked(start, 2)
    rowwise_adagrad_rows(memory, np.arange(50), g, lr=0.1, eps=1e-8)
    truth = 0.1 + (np.float64(g) ** 2).mean(axis=1)
    oracle.check_error(unchunked(chunks, 50)[:, 4096], f32(0.1) + (g * g).mean(axis=1), truth)


def test_nan_stays_in_its_row_and_a_zero_gradient_only_decays():
    start = start_rows(3, 4)
    memory, chunks = chunked(start, 2)
    g = np.array([[0, 0, 0, 0], [1, np.nan, 1, 1], [1, 1, 1, 1]], f32)
    rowwise_adagrad_rows(memory, np.arange(3), g, lr=0.5, eps=1e-8, weight_decay=0.25)
    after = unchunked(chunks, 3)
    np.testing.assert_array_equal(after[0, :4], start[0, :4] * f32(1 - 0.125))
    assert after[0, 4] == f32(0.1)
    assert np.isnan(after[1, :5]).all()
    assert np.isfinite(after[2]).all()


def test_same_bits():
    start, g = start_rows(5000, 13), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        memory, chunks = chunked(start, 6)
        rowwise_adagrad_rows(memory, order, g, **OPTIONS)
        return [unchunked(chunks, 5000)]

    oracle.check_same_bits(call)


def test_refuses():
    check_update_refuses(lambda *a: rowwise_adagrad_rows(*a, **OPTIONS), parts=1, words=1)
