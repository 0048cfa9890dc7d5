import numpy as np
import oracle
import pytest
from test_embedding_rows import check_update_refuses, chunked, unchunked

from cupyrec.ops.adam import adam_dense, adam_rows

f32 = np.float32
OPTIONS = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, scale=0.7)
every_decay = pytest.mark.parametrize("decay", [0.0, 0.3])


def naive_adam(w, m, v, g, t, decay):
    """PyTorch's way in float32: scalars in Python, one rounding an operation."""
    g = f32(OPTIONS["scale"]) * g
    w *= f32(1 - OPTIONS["lr"] * decay)
    beta1, beta2 = OPTIONS["beta1"], OPTIONS["beta2"]
    m *= f32(beta1)
    m += f32(1 - beta1) * g
    v *= f32(beta2)
    v += f32(1 - beta2) * g * g
    denominator = np.sqrt(v) / f32((1 - beta2**t) ** 0.5) + f32(OPTIONS["eps"])
    w -= f32(OPTIONS["lr"] / (1 - beta1**t)) * (m / denominator)


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025, 65_537])
def test_dense_is_exact_where_all_roots_are(n):
    """The first step from 0, with betas that are powers of two, moves by lr * sign(g)."""
    w, g = oracle.integers(n, -99, 99), 4 * oracle.integers(n, 1, 99)
    g[::2] *= -1
    m, v = np.zeros(n, f32), np.zeros(n, f32)
    truth = np.float64(w), np.zeros(n), np.zeros(n)
    options = dict(lr=2.0, beta1=0.5, beta2=0.75, eps=0.0, t=1, scale=0.5)
    oracle.adam(*truth, g, **options)
    adam_dense(w, m, v, g, **options)
    for got, expected in zip((w, m, v), truth, strict=True):
        oracle.check_exact(got, expected)
    np.testing.assert_array_equal(
        truth[0], np.float64(oracle.integers(n, -99, 99)) - 2 * np.sign(g)
    )


@every_decay
def test_dense_over_50_steps(decay):
    w = oracle.normals(1025)
    got = w, np.zeros_like(w), np.zeros_like(w)
    naive = [a.copy() for a in got]
    truth = [np.float64(a) for a in got]
    for t in range(1, 51):
        g = oracle.normals(1025, seed=t)
        adam_dense(*got, g, t=t, weight_decay=decay, **OPTIONS)
        naive_adam(*naive, g, t, decay)
        oracle.adam(*truth, g, t=t, weight_decay=decay, **OPTIONS)
    for a, b, c in zip(got, naive, truth, strict=True):
        oracle.check_error(a, b, c)


@every_decay
@pytest.mark.parametrize("width", [1, 3, 10, 130])
def test_rows_over_50_steps(width, decay):
    """Lazy: rows come and go, t counts all steps, and a row that is away keeps its bytes."""
    n, stride = 20, (3 * width + 3) // 4 * 4
    start = np.zeros((n, stride), f32)
    start[:, :width] = oracle.normals((n, width))
    start[:, 3 * width :] = 9  # the padding
    memory, chunks = chunked(start, 3)
    naive, truth = start.copy(), np.float64(start)

    def parts(row):
        return [row[i * width : (i + 1) * width] for i in range(3)]

    generator = np.random.default_rng(0)
    for t in range(1, 51):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        before = unchunked(chunks, n)
        adam_rows(memory, touched, g, t=t, weight_decay=decay, **OPTIONS)
        after = unchunked(chunks, n)
        others = np.setdiff1d(np.arange(n), touched)
        assert after[others].tobytes() == before[others].tobytes()
        for u, row in enumerate(touched):
            naive_adam(*parts(naive[row]), g[u], t, decay)
            oracle.adam(*parts(truth[row]), g[u], t=t, weight_decay=decay, **OPTIONS)
    after = unchunked(chunks, n)
    for part in range(3):
        columns = slice(part * width, (part + 1) * width)
        oracle.check_error(after[:, columns], naive[:, columns], truth[:, columns])
    assert (after[:, 3 * width :] == 9).all()


def test_dense_and_rows_are_one_formula():
    rows, g = np.abs(oracle.normals((17, 12))), oracle.normals((17, 4), seed=1)
    memory, chunks = chunked(rows, 2)
    adam_rows(memory, np.arange(17), g, t=3, **OPTIONS)
    parts = [rows[:, i : i + 4].ravel() for i in (0, 4, 8)]
    adam_dense(*parts, g.ravel(), t=3, **OPTIONS)
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(unchunked(chunks, 17)[:, 4 * i : 4 * i + 4].ravel(), part)


def test_decay_is_a_part_of_the_weight_whatever_the_gradient():
    w, none = f32([4, -8, 0]), np.zeros(3, f32)
    options = dict(beta1=0.5, beta2=0.5, eps=1e-8, t=1, weight_decay=0.5)
    adam_dense(w, none.copy(), none.copy(), none, lr=0.25, **options)
    np.testing.assert_array_equal(w, f32([3.5, -7, 0]))
    adam_dense(w, none.copy(), none.copy(), f32([1, -9, 0]), lr=1.0, **options)
    np.testing.assert_array_equal(w, f32([0.75, -2.5, 0]))


@pytest.mark.parametrize("t", [1, 2, 1000, 10**6, 10**12])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0), (0.9, 0.99999)])
def test_bias_correction_at_any_step(t, betas):
    """With m = (1 - beta1^t) g and v = (1 - beta2^t) g^2 a step moves by lr."""
    beta1, beta2 = betas
    w = np.ones(1, f32)
    m = np.array([(1 - beta1 ** (t - 1)) * 3], f32)
    v = np.array([(1 - beta2 ** (t - 1)) * 9], f32)
    adam_dense(w, m, v, f32([3]), lr=0.25, beta1=beta1, beta2=beta2, eps=1e-8, t=t)
    np.testing.assert_allclose(w, 0.75, rtol=1e-6)


def test_zero_gradient_and_nan():
    w, m, v = np.ones(4, f32), np.zeros(4, f32), np.zeros(4, f32)
    g = np.array([0, np.nan, 2, np.inf], f32)
    adam_dense(w, m, v, g, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, t=1)
    np.testing.assert_allclose(w, [1, np.nan, 0.5, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(np.isfinite(m), [True, False, True, False])
    np.testing.assert_array_equal(np.isfinite(v), [True, False, True, False])


def test_same_bits():
    start, g = np.abs(oracle.normals((5000, 40))), oracle.normals((5000, 13), seed=1)
    order = np.random.default_rng(0).permutation(5000)

    def call():
        w, m, v = oracle.normals(200_000), np.zeros(200_000, f32), np.ones(200_000, f32)
        adam_dense(w, m, v, oracle.normals(200_000, seed=1), t=2, **OPTIONS)
        memory, chunks = chunked(start, 6)
        adam_rows(memory, order, g, t=2, **OPTIONS)
        return w, m, v, unchunked(chunks, 5000)

    oracle.check_same_bits(call)


def test_rows_refuse():
    check_update_refuses(lambda *a: adam_rows(*a, t=1, **OPTIONS), parts=3)


@pytest.mark.parametrize("name", ["w", "m", "v", "g"])
def test_dense_refuses(name):
    arrays = {n: np.ones(3, np.float32) for n in ["w", "m", "v", "g"]}
    text = f"adam_dense: '{name}' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        adam_dense(**arrays | {name: np.ones(3)}, t=1, **OPTIONS)
    with pytest.raises(ValueError, match="adam_dense: '.' must have N = "):
        adam_dense(**arrays | {name: np.ones(2, np.float32)}, t=1, **OPTIONS)
