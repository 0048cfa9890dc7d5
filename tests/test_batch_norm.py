"""Batch normalization on every device, against the formulas column by column in float64."""

import functools

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays
from cupyrec.ops.batch_norm import batch_norm
from cupyrec.parallel import world
from cupyrec.testing import gradcheck

f32 = np.float32
SHAPES = oracle.covering((2, 3, 17, 127, 1025), (1, 3, 4, 16, 17, 128, 130, 1025), most=20_000)
SHAPES += [(2, 8193), (1025, 33)]


def run(xp, x, weight, bias, dy, running=None, **options):
    """y, dx, dweight, dbias, running mean and variance as NumPy arrays."""
    tensors = [Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in (x, weight, bias)]
    mean, variance = running or (np.zeros(x.shape[1], f32), np.ones(x.shape[1], f32))
    running = [arrays.copy_to(xp, a.copy()) for a in (mean, variance)]
    y = batch_norm(*tensors, *running, **{"training": True, **options})
    y.backward(arrays.copy_to(xp, dy))
    results = [y.data, *(t.grad for t in tensors), *running]
    assert {arrays.device(a) for a in results} == {arrays.name(xp)}
    return [arrays.to_host(a) for a in results]


def truth(x, weight, bias, dy, eps=1e-5):
    """y, dx, dweight, dbias: layer normalization of columns, whose parameters are all rows'."""
    columns, ones = x.shape[1], np.ones(len(x))
    w, b = np.float64(weight)[:, None], np.float64(bias)[:, None]
    xhat = oracle.layer_norm(x.T, ones, 0 * ones, eps)
    dx = oracle.layer_norm_gradient((dy * np.float64(weight)).T, x.T, ones, eps)[0]
    dweight = [float((np.float64(dy[:, n]) * xhat[n]).sum()) for n in range(columns)]
    return (xhat * w + b).T, dx.T, np.array(dweight), np.float64(dy).sum(axis=0)


def naive(x, weight, bias, dy, eps=1e-5):
    """The same in float32, by NumPy's functions."""
    rstd = 1 / np.sqrt(x.var(axis=0) + f32(eps))
    xhat = (x - x.mean(axis=0)) * rstd
    dx = weight * rstd * (dy - dy.mean(axis=0) - xhat * (dy * xhat).mean(axis=0))
    return xhat * weight + bias, dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def normals(shape):
    shapes = shape, shape[1], shape[1], shape
    return [oracle.normals(s, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers(np_or_xp, shape):
    """Exact but for means of parts of a batch, which are no whole numbers."""
    rows, columns = shape
    transposed, eps = oracle.with_moments((columns, rows))
    x = np.ascontiguousarray(transposed.T)
    weight, bias = 4 * oracle.integers(columns, -5, 5, seed=1), oracle.integers(columns, -9, 9)
    dy = oracle.integers(shape, -9, 9, seed=2)
    y, dx, dweight, dbias, mean, variance = run(
        np_or_xp, x, weight, bias, dy, eps=eps, momentum=0.5
    )
    expected = truth(x, weight, bias, dy, eps)
    oracle.check_exact(dbias, expected[3])
    for got, wanted in zip((y, dx, dweight), expected, strict=False):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(mean, x.mean(axis=0, dtype=float) / 2, atol=1e-5)
    unbiased = (16 - eps) * rows / (rows - 1)
    np.testing.assert_allclose(variance, np.full(columns, 0.5 + unbiased / 2), rtol=3e-6)


@pytest.mark.parametrize("rows", [2, 4, 64, 256])
def test_alternating_whole_numbers_are_exact(np_or_xp, rows):
    """Any even number of rows from an even one on has the mean of all."""
    centres = oracle.integers(12, -50, 50)
    x = np.tile(np.array([[-2], [2]], f32), (rows // 2, 12)) + centres
    x[rows // 2 :] = x[: rows // 2] if rows > 2 else x[1:]
    weight, bias = 4 * oracle.integers(12, -5, 5, seed=1), oracle.integers(12, -9, 9, seed=2)
    dy = oracle.integers((rows, 12), -9, 9, seed=3)
    y, dx, dweight, dbias, mean, _ = run(np_or_xp, x, weight, bias, dy, eps=12.0, momentum=1)
    expected = truth(x, weight, bias, dy, 12.0)
    oracle.check_exact(y, expected[0])
    oracle.check_exact(2 * dweight, 2 * expected[2])
    oracle.check_exact(dbias, expected[3])
    oracle.check_exact(mean, centres)
    np.testing.assert_allclose(dx, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mean", [0, 1e4])
@pytest.mark.parametrize("shape", [(17, 127), (130, 40), (1025, 17)], ids=str)
def test_error(np_or_xp, shape, mean):
    x, *others = normals(shape)
    x += f32(mean)
    got = run(np_or_xp, x, *others)
    plain, expected = naive(x, *others), truth(x, *others)
    for a, b, c in zip(got[:4], plain, expected, strict=True):
        oracle.check_error(a, b, c)
    x = np.float64(x)
    np.testing.assert_allclose(got[4], 0.1 * x.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got[5], 0.9 + 0.1 * x.var(axis=0, ddof=1), rtol=1e-6)


def test_evaluation_takes_the_running_statistics_and_leaves_them(np_or_xp):
    for rows in (0, 1, 17):
        x, weight, bias, dy = normals((rows, 10))
        mean, variance = oracle.normals(10, seed=5), oracle.normals(10, seed=6) ** 2
        got = run(np_or_xp, x, weight, bias, dy, (mean, variance), training=False, eps=0.25)
        rstd = 1 / np.sqrt(np.float64(variance) + 0.25)
        xhat = (np.float64(x) - mean) * rstd
        expected = xhat * weight + bias, dy * weight * rstd, (dy * xhat).sum(axis=0), dy.sum(axis=0)
        for a, b in zip(got[:4], expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[4], mean)
        np.testing.assert_array_equal(got[5], variance)


def test_an_empty_batch_changes_nothing(np_or_xp):
    mean, variance = oracle.normals(10, seed=5), oracle.normals(10, seed=6) ** 2
    y, dx, dweight, dbias, *running = run(np_or_xp, *normals((0, 10)), (mean, variance))
    assert y.shape == dx.shape == (0, 10)
    np.testing.assert_array_equal([dweight, dbias], np.zeros((2, 10)))
    np.testing.assert_array_equal(running, [mean, variance])


@pytest.mark.parametrize("rows", [2, 17, 300])
def test_columns_of_one_value_give_the_bias(np_or_xp, rows):
    x = np.repeat(np.array([[0, 0.1, 1e4 / 3, -3e7]], f32), rows, axis=0)
    _, weight, bias, dy = normals(x.shape)
    y, dx, dweight, _, mean, variance = run(np_or_xp, x, weight, bias, dy, momentum=1)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    np.testing.assert_array_equal(dweight, np.zeros(4))
    np.testing.assert_array_equal([mean, variance], [x[0], np.zeros(4)])
    np.testing.assert_allclose(dx, truth(x, weight, bias, dy)[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("row", [0, 35])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_column(np_or_xp, value, row):
    x, weight, bias, dy = normals((40, 17))
    clean = run(np_or_xp, x, weight, bias, dy)
    x[row, 5] = value
    with np.errstate(invalid="ignore"):
        got = run(np_or_xp, x, weight, bias, dy)
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.delete(a, 5, -1), np.delete(b, 5, -1))
    assert all(np.isnan(got[i][..., 5]).all() for i in (0, 1, 2))
    np.testing.assert_array_equal(got[3], clean[3])
    assert (got[4][5], got[5][5]) == (0, 1)  # as they were


def test_views(np_or_xp):
    """Rows off 16 bytes, transposes, every second element."""
    x, weight, bias, dy = normals((6, 128))
    expected = run(np_or_xp, x, weight, bias, dy)[0]
    move = lambda a: arrays.copy_to(np_or_xp, np.ascontiguousarray(a))  # noqa: E731
    flat = move(np.append(f32(0), x))[1:].reshape(6, 128)
    spread = move(np.repeat(weight, 2))[::2]
    for view in (flat, move(x.T).T, move(np.repeat(x, 2, axis=1))[:, ::2]):
        running = move(np.zeros(128, f32)), move(np.ones(128, f32))
        y = batch_norm(view, spread, move(bias), *running, training=True)
        np.testing.assert_allclose(arrays.to_host(y), expected, rtol=1e-5, atol=1e-5)


def test_an_input_without_a_gradient_costs_none(np_or_xp):
    x, weight, bias, dy = (arrays.copy_to(np_or_xp, a) for a in normals((5, 4)))
    running = np_or_xp.zeros(4, f32), np_or_xp.ones(4, f32)
    parameter = Tensor(weight, requires_grad=True)
    y = batch_norm(x, parameter, bias, *running, training=True)
    assert y._node.needs == [False, True, False]
    y.backward(dy)
    got = arrays.to_host(parameter.grad)
    expected = run(np_or_xp, *normals((5, 4)))[2]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("training", [False, True])
def test_gradcheck(training):
    def f(x, weight, bias):
        mean, variance = np.linspace(-1, 1, 7), np.linspace(0.5, 2, 7)
        return batch_norm(x, weight, bias, mean, variance, training=training, eps=0.1)

    assert gradcheck(f, [oracle.normals(s, float, seed=i) for i, s in enumerate([(9, 7), 7, 7])])


def test_same_bits_for_any_number_of_threads():
    for shape in [(1025, 130), (9000, 17)]:
        inputs = normals(shape)
        oracle.check_same_bits(lambda inputs=inputs: run(np, *inputs))


@pytest.mark.parametrize("shape", [(600, 16), (70, 17), (70, 130)], ids=str)
def test_thread_order(xp, shape):
    inputs = normals(shape)
    oracle.check_thread_order(xp, lambda: run(xp, *inputs))


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["even", "uneven", "the last has all"])
@pytest.mark.parametrize("mean", [0, 1e4])
@pytest.mark.parametrize("shape", [(7, 127), (130, 40), (1025, 33)], ids=str)
def test_a_batch_on_several_ranks(np_or_xp, shape, mean, how):
    ranks, rows = world(), shape[0]
    x, *vectors, dy = normals(shape)
    x += f32(mean)
    borders = {
        "even": np.linspace(0, rows, ranks.size + 1).astype(int),
        "uneven": [0, *[min(rows, k * k) for k in range(ranks.size - 1)], rows],
        "the last has all": [0] * ranks.size + [rows],
    }[how]
    own = slice(borders[ranks.rank], borders[ranks.rank + 1])
    gather = functools.partial(ranks.all_gather, "a test")
    y, dx, *sums, mean, variance = run(np_or_xp, x[own], *vectors, dy[own], gather=gather)
    plain, expected = naive(x, *vectors, dy), truth(x, *vectors, dy)
    whole = [np.concatenate(_all(ranks, a)) for a in (y, dx)]
    whole += [np.sum(_all(ranks, a), axis=0) for a in sums]
    for a, b, c in zip(whole, plain, expected, strict=True):
        oracle.check_error(a, b, c)
    x = np.float64(x)
    np.testing.assert_allclose(mean, 0.1 * x.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * x.var(axis=0, ddof=1), rtol=1e-6)
    for a in (mean, variance):
        assert len({other.tobytes() for other in _all(ranks, a)}) == 1


def _all(ranks, array):
    """The arrays of all ranks."""
    told = ranks.all_gather_json("a test", np.float64(array).tolist())
    return [np.reshape(a, (-1, *array.shape[1:])).astype(f32) for a in told]


@pytest.mark.ranks
def test_what_is_not_finite_on_one_rank_moves_no_statistics(np_or_xp):
    ranks = world()
    x, *vectors, dy = normals((5, 3))
    x[0, 1] = np.inf if ranks.rank == ranks.size - 1 else 0
    gather = functools.partial(ranks.all_gather, "a test")
    with np.errstate(invalid="ignore"):
        y, *_, mean, variance = run(np_or_xp, x, *vectors, dy, gather=gather)
    assert (mean[1], variance[1]) == (0, 1) and np.isnan(y[:, 1]).all()
    assert (mean[[0, 2]] != 0).all() and np.isfinite(y[:, [0, 2]]).all()


def zeros(*shape, dtype=f32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"x": zeros(1, 4)}, ValueError,
         "'x' must have B of at least 2 in training, got shape (1, 4)."),
        ({"x": zeros(2, 3, 4)}, ValueError, "'x' must have axes (B, N), got shape (2, 3, 4)."),
        ({"weight": zeros(3)}, ValueError, "'weight' must have N = 4 like 'x', got shape (3,)."),
        ({"running_var": zeros(3)}, ValueError,
         "'running_var' must have N = 4 like 'x', got shape (3,)."),
        ({"x": zeros(2, 4, dtype=int)}, TypeError, "'x' must be float32 or float64, got int64."),
        ({"bias": zeros(4, dtype=float)}, TypeError, "'bias' must be float32, got float64."),
        ({"momentum": 1.5}, ValueError, "'momentum' must lie in [0, 1], got 1.5."),
        ({"momentum": -0.5}, ValueError, "'momentum' must be finite and at least 0, got -0.5."),
        ({"eps": -1}, ValueError, "'eps' must be finite and at least 0, got -1."),
        ({"eps": None}, TypeError, "'eps' must be a number, got None."),
    ],
)  # fmt: skip
def test_refuses(changed, error, text):
    names = "weight", "bias", "running_mean", "running_var"
    given = {"x": zeros(2, 4)} | {name: zeros(4) for name in names} | {"training": True}
    with pytest.raises(error, match=oracle.sentence(f"batch_norm: {text}")):
        batch_norm(**given | changed)


def test_refuses_no_column():
    text = "batch_norm: 'x' must have N of at least 1, got shape (2, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        batch_norm(zeros(2, 0), zeros(0), zeros(0), zeros(0), zeros(0))
