"""DCN's cross layer on every device, against its formulas row by row in float64."""

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, cross_vector
from cupyrec.testing import gradcheck

f32 = np.float32
SHAPES = oracle.covering(
    (0, 1, 2, 3, 17, 127, 1025), (1, 3, 4, 16, 17, 128, 130, 624, 1025, 2048), most=40_000
)
SHAPES += [(2, 8191), (1, 8192), (1025, 4)]


def run(xp, x, x0, weight, bias, dy):
    """y, dx, dx0, dweight, dbias as NumPy arrays."""
    inputs = x, x0, weight, bias
    tensors = [Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in inputs]
    y = cross_vector(*tensors)
    y.backward(arrays.copy_to(xp, dy))
    results = [y.data, *(t.grad for t in tensors)]
    assert {arrays.device(a) for a in results} == {arrays.name(xp)}
    return [arrays.to_host(a) for a in results]


def naive(x, x0, weight, bias, dy):
    """The same in float32, by NumPy's functions."""
    product, slope = (x @ weight)[:, None], (dy * x0).sum(axis=1, keepdims=True)
    y = x0 * product + bias + x
    dweight, dbias = (slope * x).sum(axis=0), dy.sum(axis=0)
    return y, slope * weight + dy, dy * product, dweight, dbias


def case(shape, make=oracle.normals, **options):
    """x, x0, weight, bias, dy."""
    shapes = shape, shape, shape[1], shape[1], shape
    return [make(s, seed=i, **options) for i, s in enumerate(shapes)]


def small(shape, seed):
    return oracle.integers(shape, -3, 3, seed=seed)


def truth(x, x0, weight, bias, dy):
    return oracle.cross_vector(dy, x, x0, weight, bias)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(np_or_xp, shape):
    inputs = case(shape, small)
    for got, expected in zip(run(np_or_xp, *inputs), truth(*inputs), strict=True):
        oracle.check_exact(got, expected)


@pytest.mark.parametrize(
    "shape", [(127, 17), (40, 130), (70, 624), (3, 1025), (3, 8193), (40, 12_292)], ids=str
)
def test_error(np_or_xp, shape):
    inputs = case(shape)
    for got, plain, exact in zip(
        run(np_or_xp, *inputs), naive(*inputs), truth(*inputs), strict=True
    ):
        oracle.check_error(got, plain, exact)


def test_the_first_layer_adds_both_gradients(np_or_xp):
    x, _, weight, bias, dy = case((17, 5), small)
    tensor = Tensor(arrays.copy_to(np_or_xp, x), requires_grad=True)
    weight_, bias_ = (arrays.copy_to(np_or_xp, a) for a in (weight, bias))
    cross_vector(tensor, tensor, weight_, bias_).backward(arrays.copy_to(np_or_xp, dy))
    _, dx, dx0, *_ = oracle.cross_vector(dy, x, x, weight, bias)
    oracle.check_exact(arrays.to_host(tensor.grad), dx + dx0)


@pytest.mark.parametrize("columns", [4, 17, 1025])
def test_nan_stays_in_its_row(np_or_xp, columns):
    inputs = case((20, columns))
    clean = run(np_or_xp, *inputs)
    inputs[0][3, columns // 2] = np.nan
    y, dx, dx0, dweight, dbias = run(np_or_xp, *inputs)
    for got, before in ((y, clean[0]), (dx0, clean[2])):
        assert np.isnan(got[3]).all()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(before, 3, 0))
    np.testing.assert_array_equal(dx, clean[1])
    np.testing.assert_array_equal(dbias, clean[4])
    assert np.isnan(dweight).sum() == 1


def test_views(np_or_xp):
    """Rows off 16 bytes; transposes; every second element."""
    x, x0, weight, bias, dy = case((6, 128), small)
    expected = run(np_or_xp, x, x0, weight, bias, dy)[0]
    move = lambda a: arrays.copy_to(np_or_xp, np.ascontiguousarray(a))  # noqa: E731
    flat = move(np.append(f32(0), x))[1:].reshape(6, 128)
    spread = move(np.repeat(weight, 2))[::2]
    for view in (flat, move(x.T).T, move(np.repeat(x, 2, axis=1))[:, ::2]):
        y = cross_vector(view, move(x0.T).T, spread, move(bias))
        np.testing.assert_array_equal(arrays.to_host(y), expected)


def test_gradcheck():
    assert gradcheck(cross_vector, case((5, 7), oracle.normals, dtype=np.float64)[:4])


@pytest.mark.parametrize("shape", [(1025, 130), (9000, 17)], ids=str)
def test_same_bits_for_any_number_of_threads(shape):
    oracle.check_same_bits(lambda: run(np, *case(shape)))


@pytest.mark.parametrize("shape", [(70, 16), (70, 17), (35, 1025), (2, 8193)], ids=str)
def test_thread_order(xp, shape):
    inputs = case(shape)
    oracle.check_thread_order(xp, lambda: run(xp, *inputs))


def zeros(*shape, dtype=f32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (
            (zeros(2, 3), zeros(2, 4), zeros(3), zeros(3)), ValueError,
            "'x0' must have N = 3 like 'x', got shape (2, 4).",
        ),
        (
            (zeros(2, 3), zeros(2, 3), zeros(3, 3), zeros(3)), ValueError,
            "'weight' must have axes (N), got shape (3, 3).",
        ),
        (
            (zeros(2, 0), zeros(2, 0), zeros(0), zeros(0)), ValueError,
            "N must be at least 1, got shape (2, 0).",
        ),
        (
            (zeros(2, 3), zeros(2, 3), zeros(3), zeros(3, dtype=float)), TypeError,
            "'bias' must be float32, got float64.",
        ),
        (
            (zeros(2, 3, dtype=int), zeros(2, 3), zeros(3), zeros(3)), TypeError,
            "'x' must be float32 or float64, got int64.",
        ),
    ],
)  # fmt: skip
def test_refuses(inputs, error, text):
    with pytest.raises(error, match=oracle.sentence(f"cross_vector: {text}")):
        cross_vector(*inputs)


def test_devices_refuse_float64(xp):
    text = "cross_vector: 'x' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        cross_vector(*(xp.ones(s, float) for s in [(2, 3), (2, 3), 3, 3]))
