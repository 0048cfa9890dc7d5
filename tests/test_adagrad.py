import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.adagrad import adagrad_dense, adagrad_rows

OPTIONS = dict(lr=0.1, eps=1e-8, weight_decay=0.3, scale=0.7)


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025, 65_537])
def test_dense_is_exact_where_all_roots_are(n):
    """The first step from s = 0 moves by lr * sign(g); s = g^2."""
    w, s, g = oracle.integers(n, -99, 99), np.zeros(n, np.float32), oracle.integers(n, 1, 99)
    g[::2] *= -1
    truth = np.float64(w), np.zeros(n)
    oracle.adagrad(*truth, g, lr=2.0, eps=0.0, weight_decay=0.25, scale=2.0)
    adagrad_dense(w, s, g, lr=2.0, eps=0.0, weight_decay=0.25, scale=2.0)
    oracle.check_exact(w, truth[0])
    oracle.check_exact(s, truth[1])


def check_rows(width, n, k, update, naive):
    """50 steps on rows that come and go, against float64 and the same in float32 by NumPy."""
    stride = (2 * width + 3) // 4 * 4
    start = oracle.normals((n, stride))
    start[:, width:] = 0.1
    memory, chunks = chunked(start, k)
    truth, plain = np.float64(start), start.copy()
    generator = np.random.default_rng(0)
    seen = np.zeros(n, bool)
    for t in range(1, 51):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        seen[touched] = True
        g = oracle.normals((len(touched), width), seed=t)
        before = unchunked(chunks, n)
        update(memory, touched, g, t)
        after = unchunked(chunks, n)
        others = np.setdiff1d(np.arange(n), touched)
        assert after[others].tobytes() == before[others].tobytes()
        for u, row in enumerate(touched):
            naive(plain[row], g[u], t)
            oracle.adagrad(truth[row, :width], truth[row, width : 2 * width], g[u], **OPTIONS)
    assert not seen[-1]
    oracle.check_error(unchunked(chunks, n)[:, : 2 * width], plain[:, : 2 * width],
                       truth[:, : 2 * width])  # fmt: skip
    assert (unchunked(chunks, n)[:, 2 * width :] == start[:, 2 * width :]).all()  # the padding


@pytest.mark.parametrize("width", [1, 3, 10, 130])
def test_rows_over_50_steps(width):
    lr, eps, scale = (np.float32(OPTIONS[name]) for name in ("lr", "eps", "scale"))

    def naive(row, g, t):
        w, s = row[:width], row[width : 2 * width]
        w *= np.float32(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        s += (scale * g) ** 2
        w -= lr * (scale * g) / (np.sqrt(s) + eps)

    check_rows(width, 20, 3, lambda m, r, g, t: adagrad_rows(m, r, g, **OPTIONS), naive)


def test_dense_and_rows_are_one_formula():
    rows, g = np.abs(oracle.normals((17, 8))), oracle.normals((17, 4), seed=1)
    memory, chunks = chunked(rows, 2)
    adagrad_rows(memory, np.arange(17), g, **OPTIONS)
    w, s = rows[:, :4].ravel(), rows[:, 4:].ravel()
    adagrad_dense(w, s, g.ravel(), **OPTIONS)
    after = unchunked(chunks, 17)
    np.testing.assert_array_equal(after[:, :4].ravel(), w)
    np.testing.assert_array_equal(after[:, 4:].ravel(), s)


def test_zero_gradient_changes_nothing_and_nan_stays_in_its_element():
    w, s = np.ones(4, np.float32), np.zeros(4, np.float32)
    adagrad_dense(w, s, np.array([0, np.nan, 2, np.inf], np.float32), lr=0.5, eps=1e-8)
    np.testing.assert_array_equal(w, [1, np.nan, 0.5, np.nan])
    np.testing.assert_array_equal(s, [0, np.nan, 4, np.inf])


def test_same_bits():
    start, g = np.abs(oracle.normals((5000, 28))), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        w, s = oracle.normals(200_000), np.ones(200_000, np.float32)
        adagrad_dense(w, s, oracle.normals(200_000, seed=1), **OPTIONS)
        memory, chunks = chunked(start, 6)
        adagrad_rows(memory, order, g, **OPTIONS)
        return w, s, unchunked(chunks, 5000)

    oracle.check_same_bits(call)


def test_rows_refuse():
    check_update_refuses(lambda *a: adagrad_rows(*a, **OPTIONS), parts=2)


@pytest.mark.parametrize("name", ["w", "s", "g"])
def test_dense_refuses(name):
    arrays = {n: np.ones(3, np.float32) for n in ["w", "s", "g"]}
    text = f"adagrad_dense: '{name}' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        adagrad_dense(**arrays | {name: np.ones(3)}, **OPTIONS)
    with pytest.raises(ValueError, match="adagrad_dense: '.' must have N = "):
        adagrad_dense(**arrays | {name: np.ones(2, np.float32)}, **OPTIONS)
