import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.ftrl import ftrl_dense, ftrl_rows

OPTIONS = dict(lr=0.1, lambda1=0.3, lambda2=0.01, beta=0.5, weight_decay=0.02, scale=0.7)
f32 = np.float32


def naive(w, n, z, g, *, lr, lambda1, lambda2, beta, weight_decay, scale):
    """The formula in float32, one rounding an operation."""
    g, before = f32(scale) * g, np.sqrt(n)
    n += g * g
    c = f32(beta) + np.sqrt(n) + f32(lr * lambda2)
    z[:] = np.where((z == 0) & (w != 0), -(f32(beta) + before) * w, z)
    z += f32(lr) * g - (np.sqrt(n) - before) * w + f32(lr * weight_decay) * c * w
    w[:] = (np.clip(z, -f32(lr * lambda1), f32(lr * lambda1)) - z) / c


def state(n, initial=0.1):
    """(w, n, z) of a start at 0."""
    return np.zeros(n, f32), np.full(n, initial, f32), np.zeros(n, f32)


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025, 65_537])
def test_dense_is_exact_where_all_roots_are(n):
    """The first step from n = z = 0 moves by lr * sign(g); n = g^2."""
    w, squares, z = oracle.integers(n, -9, 9), np.zeros(n, f32), np.zeros(n, f32)
    g = oracle.integers(n, 1, 99)
    g[::2] *= -1
    truth = np.float64(w), np.zeros(n), np.zeros(n)
    oracle.ftrl(*truth, g, lr=2.0, scale=2.0)
    ftrl_dense(w, squares, z, g, lr=2.0, scale=2.0)
    for got, expected in zip((w, squares, z), truth, strict=True):
        oracle.check_exact(got, expected)


@pytest.mark.parametrize("width", [1, 3, 10, 130])
def test_rows_over_50_steps(width):
    """Rows that come and go, against float64 and the same in float32 by NumPy."""
    n, stride = 20, (3 * width + 3) // 4 * 4
    start = np.zeros((n, stride), f32)
    start[:, :width] = oracle.normals((n, width))
    start[:, width : 2 * width] = 0.1
    start[:, 3 * width :] = 9
    memory, chunks = chunked(start, 3)
    truth, plain = np.float64(start), start.copy()
    generator = np.random.default_rng(0)
    for t in range(1, 51):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        before = unchunked(chunks, n)
        ftrl_rows(memory, touched, g, **OPTIONS)
        others = np.setdiff1d(np.arange(n), touched)
        assert unchunked(chunks, n)[others].tobytes() == before[others].tobytes()
        for row, x in zip(touched, g, strict=True):
            oracle.ftrl(*np.split(truth[row, : 3 * width], 3), x, **OPTIONS)
            naive(*np.split(plain[row, : 3 * width], 3), x, **OPTIONS)
    after = unchunked(chunks, n)
    for part in np.split(np.arange(3 * width), 3):
        oracle.check_error(after[:, part], plain[:, part], truth[:, part])
    assert after[-1].tobytes() == start[-1].tobytes()
    assert (after[:, 3 * width :] == 9).all()


def test_dense_and_rows_are_one_formula():
    rows, g = np.abs(oracle.normals((17, 12))), oracle.normals((17, 4), seed=1)
    memory, chunks = chunked(rows, 2)
    ftrl_rows(memory, np.arange(17), g, **OPTIONS)
    parts = [np.ascontiguousarray(part).ravel() for part in np.split(rows, 3, axis=1)]
    ftrl_dense(*parts, g.ravel(), **OPTIONS)
    for got, expected in zip(np.split(unchunked(chunks, 17), 3, axis=1), parts, strict=True):
        np.testing.assert_array_equal(got.ravel(), expected)


def test_is_plain_gradient_descent_with_adagrads_rate():
    """Without penalties: w -= lr * g / (beta + sqrt(n)) where z belongs to w (McMahan 2011)."""
    lr, beta = 0.1, 0.5
    w32, n32, z32 = state(100)
    w, n = np.float64(w32), np.float64(n32)
    for t in range(50):
        g = oracle.normals(100, seed=t)
        ftrl_dense(w32, n32, z32, g, lr=lr, beta=beta)
        n += np.float64(g) ** 2
        w -= lr * g / (beta + np.sqrt(n))
    np.testing.assert_allclose(w32, w, rtol=0, atol=2e-6)


def test_an_initial_weight_is_the_first_proximal_centre():
    """Of sum g w + lambda1 |w| + lambda2 / 2 w^2 + sum sigma / 2 (w - w_s)^2: with gradient 0 that
    of |w - w0|^2 / 2 and the penalties."""
    start, (_, n, z) = oracle.normals(50), state(50)
    w, lambda1, lambda2, lr, beta = start.copy(), 2.0, 0.3, 0.1, 1.0
    ftrl_dense(w, n, z, np.zeros(50, f32), lr=lr, lambda1=lambda1, lambda2=lambda2, beta=beta)
    sigma = (beta + 0.1**0.5) / lr
    shrunk = np.maximum(abs(np.float64(start)) - lambda1 / sigma, 0) * np.sign(start)
    np.testing.assert_allclose(w, shrunk * sigma / (sigma + lambda2), rtol=1e-5, atol=1e-7)
    assert (w == 0).any()
    assert w.any()


@pytest.mark.parametrize("start", [0.05, -0.05])
def test_lambda1_pulls_initial_weights_to_0_at_once(start):
    _, n, z = state(1)
    w = np.full(1, start, f32)
    ftrl_dense(w, n, z, np.full(1, 0.01, f32), lr=0.1, lambda1=100.0)
    assert w == 0


def test_lambda1_gives_zeros_and_they_come_back():
    w, n, z = state(4)
    g = np.array([0.1, 0.9, 1.0, -3.0], f32)
    ftrl_dense(w, n, z, g, lr=0.5, lambda1=1.0)
    assert (w == 0).tolist() == [True, True, True, False]
    ftrl_dense(w, n, z, g, lr=0.5, lambda1=1.0)
    assert np.sign(w).tolist() == [0, -1, -1, 1]


def test_weight_decay_shrinks_every_step_and_leaves_zeros_be():
    w, n, z = state(2)
    ftrl_dense(w, n, z, np.array([1.0, 0.2], f32), lr=0.1, lambda1=0.5)
    first, zero = w[0], np.zeros(2, f32)
    for t in range(1, 11):
        ftrl_dense(w, n, z, zero, lr=0.1, lambda1=0.5, weight_decay=0.3)
        assert w[0] == pytest.approx(first * (1 - 0.1 * 0.3) ** t, rel=1e-5)
        assert w[1] == 0


def test_a_falling_rate_leaves_weights_where_they_are_and_0_updates_nothing():
    w, n, z = state(50)
    for t in range(20):
        ftrl_dense(w, n, z, oracle.normals(50, seed=t), lr=0.1, beta=1.0)
    before = w.copy(), n.copy(), z.copy()
    ftrl_dense(w, n, z, oracle.normals(50, seed=20), lr=1e-9, beta=1.0)
    np.testing.assert_allclose(w, before[0], rtol=0, atol=1e-6)
    before = w.copy(), n.copy(), z.copy()
    ftrl_dense(w, n, z, oracle.normals(50, seed=21), lr=0.0, lambda1=1.0, weight_decay=1.0)
    memory, chunks = chunked(oracle.normals((2, 12)), 1)
    ftrl_rows(memory, np.arange(2), np.ones((2, 4), f32), lr=0.0)
    np.testing.assert_array_equal((w, n, z), before)
    np.testing.assert_array_equal(unchunked(chunks, 2), oracle.normals((2, 12)))


def test_zeros_stay_zero_and_nan_stays_in_its_element():
    w, n, z = state(4, initial=0.0)
    ftrl_dense(w, n, z, np.array([0, np.nan, 2, np.inf], f32), lr=0.5)
    np.testing.assert_array_equal(w, [0, np.nan, -0.5, np.nan])
    np.testing.assert_array_equal(n, [0, np.nan, 4, np.inf])


def test_same_bits():
    start, g = np.abs(oracle.normals((5000, 40))), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        w, n, z = oracle.normals(200_000), np.ones(200_000, f32), np.zeros(200_000, f32)
        ftrl_dense(w, n, z, oracle.normals(200_000, seed=1), **OPTIONS)
        memory, chunks = chunked(start, 6)
        ftrl_rows(memory, order, g, **OPTIONS)
        return w, n, z, unchunked(chunks, 5000)

    oracle.check_same_bits(call)


def test_rows_refuse():
    check_update_refuses(lambda *a: ftrl_rows(*a, **OPTIONS), parts=3)


@pytest.mark.parametrize("name", ["w", "n", "z", "g"])
def test_dense_refuses(name):
    arrays = {n: np.ones(3, f32) for n in ["w", "n", "z", "g"]}
    text = f"ftrl_dense: '{name}' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        ftrl_dense(**arrays | {name: np.ones(3)}, **OPTIONS)
    with pytest.raises(ValueError, match="ftrl_dense: '.' must have N = "):
        ftrl_dense(**arrays | {name: np.ones(2, f32)}, **OPTIONS)
