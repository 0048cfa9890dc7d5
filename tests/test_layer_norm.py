"""Layer normalization on every device, against the formulas row by row in float64."""

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays
from cupyrec.ops.layer_norm import layer_norm
from cupyrec.testing import gradcheck

f32 = np.float32
SHAPES = oracle.covering(
    (0, 1, 2, 3, 17, 127, 1025), (1, 3, 4, 16, 17, 128, 130, 256, 1025, 2048), most=40_000
)
SHAPES += [(2, 8191), (1, 8192), (1025, 4)]


def run(xp, x, weight, bias, dy, **options):
    """y, dx, dweight, dbias as NumPy arrays."""
    tensors = [Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in (x, weight, bias)]
    y = layer_norm(*tensors, **options)
    y.backward(arrays.copy_to(xp, dy))
    results = [y.data, *(t.grad for t in tensors)]
    assert {arrays.device(a) for a in results} == {arrays.name(xp)}
    return [arrays.to_host(a) for a in results]


def naive(x, weight, bias, dy, eps):
    """The same in float32, by NumPy's functions."""
    rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + f32(eps))
    xhat, g = (x - x.mean(axis=1, keepdims=True)) * rstd, dy * weight
    products = (g * xhat).mean(axis=1, keepdims=True)
    dx = rstd * (g - g.mean(axis=1, keepdims=True) - xhat * products)
    return xhat * weight + bias, dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def normals(shape):
    shapes = shape, shape[1], shape[1], shape
    return [oracle.normals(s, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(np_or_xp, shape):
    x, eps = oracle.with_moments(shape)
    weight, bias = 4 * oracle.integers(shape[1], -5, 5, seed=1), oracle.integers(shape[1], -9, 9)
    dy = oracle.integers(shape, -9, 9, seed=2)
    y, dx, dweight, dbias = run(np_or_xp, x, weight, bias, dy, eps=eps)
    truth = oracle.layer_norm_gradient(dy, x, weight, eps)
    oracle.check_exact(y, oracle.layer_norm(x, weight, bias, eps))
    oracle.check_exact(4 * dweight, 4 * truth[1])
    oracle.check_exact(dbias, truth[2])
    if shape[1] & (shape[1] - 1) == 0 and shape[1] <= 256:  # means of whole numbers are exact
        oracle.check_exact(dx, truth[0])
    np.testing.assert_allclose(dx, truth[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mean", [0, 1e4])
@pytest.mark.parametrize(
    "shape", [(127, 17), (40, 130), (3, 1025), (3, 8193), (2, 12_292)], ids=str
)
def test_error(np_or_xp, shape, mean):
    x, weight, bias, dy = normals(shape)
    x += f32(mean)
    got, plain = run(np_or_xp, x, weight, bias, dy), naive(x, weight, bias, dy, 1e-5)
    truth = (
        oracle.layer_norm(x, weight, bias, 1e-5),
        *oracle.layer_norm_gradient(dy, x, weight, 1e-5),
    )
    for a, b, c in zip(got, plain, truth, strict=True):
        oracle.check_error(a, b, c)


def test_a_mean_far_above_the_deviations(np_or_xp):
    """Their sum of squares would leave nothing of the variance."""
    x = np.array([[2**20 - 4, 2**20 + 4] * 50, [-(2**23), -(2**23) + 8] * 50], f32)
    y = layer_norm(
        *(arrays.copy_to(np_or_xp, a) for a in (x, np.ones(100, f32), np.zeros(100, f32)))
    )
    np.testing.assert_allclose(arrays.to_host(y), np.sign(x - x.mean(axis=1, keepdims=True)), 1e-6)


@pytest.mark.parametrize("columns", [1, 3, 130, 1025, 8193])
def test_rows_of_one_value_give_the_bias(np_or_xp, columns):
    x = np.repeat(np.array([[0], [0.1], [1e4 / 3], [-3e7]], f32), columns, axis=1)
    _, weight, bias, dy = normals(x.shape)
    y, dx, dweight, _ = run(np_or_xp, x, weight, bias, dy)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    np.testing.assert_array_equal(dweight, np.zeros(columns))
    truth = oracle.layer_norm_gradient(dy, x, weight, 1e-5)[0]
    np.testing.assert_allclose(dx, truth, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("columns", [4, 17, 1025])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_stays_in_its_row(np_or_xp, columns, value):
    x, weight, bias, dy = normals((20, columns))
    clean = run(np_or_xp, x, weight, bias, dy)
    x[3, columns // 2] = value
    with np.errstate(invalid="ignore"):
        y, dx, dweight, dbias = run(np_or_xp, x, weight, bias, dy)
    for got, before in ((y, clean[0]), (dx, clean[1])):
        assert np.isnan(got[3]).all()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(before, 3, 0))
    assert np.isnan(dweight).all()
    np.testing.assert_array_equal(dbias, clean[3])


def test_nan_of_a_gradient_stays_in_its_row_and_column(np_or_xp):
    x, weight, bias, dy = normals((40, 17))
    clean = run(np_or_xp, x, weight, bias, dy)
    dy[35, 5] = np.nan
    y, dx, dweight, dbias = run(np_or_xp, x, weight, bias, dy)
    np.testing.assert_array_equal(y, clean[0])
    np.testing.assert_array_equal(np.isnan(dx).all(axis=1), np.arange(40) == 35)
    for got, before in ((dweight, clean[2]), (dbias, clean[3])):
        np.testing.assert_array_equal(np.isnan(got), np.arange(17) == 5)
        np.testing.assert_array_equal(np.delete(got, 5), np.delete(before, 5))


def test_leading_axes_and_views(np_or_xp):
    """One axis or three; rows off 16 bytes; transposes; every second element."""
    x, weight, bias, dy = normals((6, 128))
    expected = run(np_or_xp, x, weight, bias, dy)
    got = run(np_or_xp, x.reshape(2, 3, 128), weight, bias, dy.reshape(2, 3, 128))
    assert got[0].shape == got[1].shape == (2, 3, 128)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    alone = run(np_or_xp, x[0], weight, bias, dy[0])
    np.testing.assert_array_equal(alone[0], expected[0][0])
    move = lambda a: arrays.copy_to(np_or_xp, np.ascontiguousarray(a))  # noqa: E731
    flat = move(np.append(f32(0), x))[1:].reshape(6, 128)
    spread = move(np.repeat(np.append(weight, weight), 2))[: 2 * 128 : 2]
    for view in (flat, move(x.T).T, move(np.repeat(x, 2, axis=1))[:, ::2]):
        y = layer_norm(view, spread, move(bias))
        np.testing.assert_allclose(arrays.to_host(y), expected[0], rtol=1e-5, atol=1e-5)


def test_gradcheck():
    inputs = [oracle.normals(s, np.float64, seed=i) for i, s in enumerate([(2, 5, 7), 7, 7])]
    assert gradcheck(layer_norm, inputs)
    assert gradcheck(lambda *a: layer_norm(*a, eps=0.5), [inputs[0][0], *inputs[1:]])


def test_same_bits_for_any_number_of_threads():
    for shape in [(1025, 130), (9000, 17)]:
        inputs = normals(shape)
        oracle.check_same_bits(lambda inputs=inputs: run(np, *inputs))


@pytest.mark.parametrize("shape", [(70, 16), (70, 17), (35, 1025), (2, 8193)], ids=str)
def test_thread_order(xp, shape):
    inputs = normals(shape)
    oracle.check_thread_order(xp, lambda: run(xp, *inputs))


def test_only_what_is_asked_for_gets_a_gradient(np_or_xp):
    x, weight, bias, dy = (arrays.copy_to(np_or_xp, a) for a in normals((3, 4)))
    assert arrays.device(layer_norm(x, weight, bias)) == arrays.name(np_or_xp)
    parameter = Tensor(weight, requires_grad=True)
    layer_norm(x, parameter, bias).backward(dy)
    assert parameter.grad.shape == (4,)


def zeros(*shape, dtype=f32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("inputs", "eps", "error", "text"),
    [
        (
            (zeros(2, 3), zeros(4), zeros(4)), 0.1, ValueError,
            "'x' must have a last axis of N like 'weight', at least 1, got shape (2, 3) for N = 4.",
        ),
        (
            (zeros(), zeros(4), zeros(4)), 0.1, ValueError,
            "'x' must have a last axis of N like 'weight', at least 1, got shape () for N = 4.",
        ),
        (
            (zeros(2, 0), zeros(0), zeros(0)), 0.1, ValueError,
            "'x' must have a last axis of N like 'weight', at least 1, got shape (2, 0) for N = 0.",
        ),
        (
            (zeros(2, 4), zeros(4), zeros(3)), 0.1, ValueError,
            "'bias' must have N = 4 like 'weight', got shape (3,).",
        ),
        (
            (zeros(2, 4), zeros(4), zeros(4)), -1, ValueError,
            "'eps' must be finite and at least 0, got -1.",
        ),
        (
            (zeros(2, 4), zeros(4), zeros(4)), "x", TypeError, "'eps' must be a number, got 'x'.",
        ),
        (
            (zeros(2, 4, dtype=int), zeros(4), zeros(4)), 0.1, TypeError,
            "'x' must be float32 or float64, got int64.",
        ),
        (
            (zeros(2, 4, dtype=float), zeros(4), zeros(4)), 0.1, TypeError,
            "'weight' must be float64, got float32.",
        ),
        (
            (zeros(2, 4), zeros(4), zeros(4, dtype=float)), 0.1, TypeError,
            "'bias' must be float32, got float64.",
        ),
    ],
)  # fmt: skip
def test_refuses(inputs, eps, error, text):
    with pytest.raises(error, match=oracle.sentence(f"layer_norm: {text}")):
        layer_norm(*inputs, eps=eps)


def test_devices_refuse_float64(xp):
    with pytest.raises(
        TypeError, match=oracle.sentence("layer_norm: 'x' must be float32, got float64.")
    ):
        layer_norm(xp.ones((2, 3), float), xp.ones(3, float), xp.ones(3, float))
