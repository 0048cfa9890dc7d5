import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.momentum import momentum_dense, momentum_rows
from cupyrec.ops.sgd import sgd_dense

OPTIONS = dict(lr=0.1, momentum=0.9, weight_decay=0.3, scale=0.7)
both = pytest.mark.parametrize("nesterov", [False, True])


def naive(w, m, g, nesterov):
    """torch.optim.SGD's way in float32, one rounding an operation."""
    lr, mu, scale = (np.float32(OPTIONS[name]) for name in ("lr", "momentum", "scale"))
    w *= np.float32(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
    m *= mu
    m += scale * g
    w -= lr * (scale * g + mu * m if nesterov else m)


@both
@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025, 65_537])
def test_dense_is_exact_on_integer_data(n, nesterov):
    w, m, g = (oracle.integers(n, -99, 99, seed=seed) for seed in range(3))
    truth = np.float64(w), np.float64(m)
    options = dict(lr=0.5, momentum=0.25, nesterov=nesterov, weight_decay=0.5, scale=0.5)
    oracle.momentum(*truth, g, **options)
    momentum_dense(w, m, g, **options)
    oracle.check_exact(w, truth[0])
    oracle.check_exact(m, truth[1])


@both
def test_dense_over_50_steps(nesterov):
    start = oracle.normals(1025), np.zeros(1025, np.float32)
    got, plain = [a.copy() for a in start], [a.copy() for a in start]
    truth = [np.float64(a) for a in start]
    for t in range(50):
        g = oracle.normals(1025, seed=t)
        momentum_dense(*got, g, nesterov=nesterov, **OPTIONS)
        naive(*plain, g, nesterov)
        oracle.momentum(*truth, g, nesterov=nesterov, **OPTIONS)
    for a, b, c in zip(got, plain, truth, strict=True):
        oracle.check_error(a, b, c)


@both
@pytest.mark.parametrize("width", [1, 3, 10, 130])
def test_rows_over_50_steps(width, nesterov):
    """Rows come and go; those away keep their bytes, momentum included."""
    n = 20
    start = oracle.normals((n, (2 * width + 3) // 4 * 4))
    start[:, width : 2 * width] = 0
    memory, chunks = chunked(start, 3)
    truth, plain = np.float64(start), start.copy()
    generator = np.random.default_rng(0)
    for t in range(50):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        before = unchunked(chunks, n)
        momentum_rows(memory, touched, g, nesterov=nesterov, **OPTIONS)
        away = np.setdiff1d(np.arange(n), touched)
        assert unchunked(chunks, n)[away].tobytes() == before[away].tobytes()
        for u, row in enumerate(touched):
            naive(plain[row, :width], plain[row, width : 2 * width], g[u], nesterov)
            parts = truth[row, :width], truth[row, width : 2 * width]
            oracle.momentum(*parts, g[u], nesterov=nesterov, **OPTIONS)
    after = unchunked(chunks, n)
    for part in (slice(0, width), slice(width, 2 * width)):
        oracle.check_error(after[:, part], plain[:, part], truth[:, part])
    np.testing.assert_array_equal(after[:, 2 * width :], start[:, 2 * width :])


def test_without_momentum_it_is_sgd():
    g, w = oracle.normals(127, seed=1), oracle.normals(127)
    expected = w.copy()
    momentum_dense(w, np.zeros(127, np.float32), g, lr=0.25, momentum=0.0, weight_decay=0.5)
    sgd_dense(expected, g, lr=0.25, weight_decay=0.5)
    np.testing.assert_array_equal(w, expected)


def test_first_step_is_sgds_and_nesterovs_goes_further():
    g = np.array([2.0, -4.0], np.float32)
    steps = []
    for nesterov in (False, True):
        w, m = np.zeros(2, np.float32), np.zeros(2, np.float32)
        momentum_dense(w, m, g, lr=0.5, momentum=0.5, nesterov=nesterov)
        np.testing.assert_array_equal(m, g)
        steps.append(w.tolist())
    assert steps == [[-1, 2], [-1.5, 3]]


@both
def test_nan_and_inf_stay_in_their_element(nesterov):
    w, m = np.zeros(4, np.float32), np.zeros(4, np.float32)
    g = np.array([0, np.nan, np.inf, 1], np.float32)
    momentum_dense(w, m, g, lr=1.0, momentum=0.0, nesterov=nesterov)
    np.testing.assert_array_equal(m, g)
    np.testing.assert_array_equal(w, [0, np.nan, np.nan if nesterov else -np.inf, -1])


def test_same_bits():
    start, g = oracle.normals((5000, 28)), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        w, m = oracle.normals(200_000), np.ones(200_000, np.float32)
        momentum_dense(w, m, oracle.normals(200_000, seed=1), **OPTIONS)
        memory, chunks = chunked(start, 6)
        momentum_rows(memory, order, g, nesterov=True, **OPTIONS)
        return w, m, unchunked(chunks, 5000)

    oracle.check_same_bits(call)


def test_rows_refuse():
    check_update_refuses(lambda *a: momentum_rows(*a, **OPTIONS), parts=2)


@pytest.mark.parametrize("name", ["w", "m", "g"])
def test_dense_refuses(name):
    arrays = {n: np.ones(3, np.float32) for n in ["w", "m", "g"]}
    text = f"momentum_dense: '{name}' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        momentum_dense(**arrays | {name: np.ones(3)}, **OPTIONS)
    with pytest.raises(ValueError, match="momentum_dense: '.' must have N = "):
        momentum_dense(**arrays | {name: np.ones(2, np.float32)}, **OPTIONS)
