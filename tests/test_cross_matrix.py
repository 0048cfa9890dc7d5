"""DCN-v2's cross layer on every device, against its formulas in float64."""

import ml_dtypes
import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, cross_matrix
from cupyrec.testing import gradcheck

f32 = np.float32
SHAPES = oracle.covering((0, 1, 2, 3, 17, 127, 1025), (1, 3, 4, 16, 17, 128, 130), most=140_000)
AMPS = "float16", "bfloat16"


def run(xp, x, x0, weight, bias, dy, **options):
    """y, dx, dx0, dweight, dbias as NumPy arrays."""
    inputs = x, x0, weight, bias
    tensors = [Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in inputs]
    y = cross_matrix(*tensors, **options)
    y.backward(arrays.copy_to(xp, dy))
    results = [y.data, *(t.grad for t in tensors)]
    assert {(arrays.device(a), a.dtype.name) for a in results} == {(arrays.name(xp), "float32")}
    return [arrays.to_host(a) for a in results]


def formulas(x, x0, weight, bias, dy, rounded=lambda a: a):
    """In the type of x, with what matmuls take `rounded`."""
    matrix, dz = rounded(weight), rounded(dy * x0)
    z = rounded(x) @ matrix.T + bias
    return x0 * z + x, dz @ matrix + dy, dy * z, dz.T @ rounded(x), dz.sum(axis=0)


def truth(*inputs, **options):
    return formulas(*map(np.float64, inputs), **options)


def case(shape, make=oracle.normals, **options):
    """x, x0, weight, bias, dy."""
    columns = shape[1]
    shapes = shape, shape, (columns, columns), columns, shape
    return [make(s, seed=i, **options) for i, s in enumerate(shapes)]


def small(shape, seed):
    return oracle.integers(shape, -3, 3, seed=seed)


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_integer_data_is_exact(np_or_xp, i):
    shape, amp = SHAPES[i], (None, *AMPS)[i % 3]
    inputs = case(shape, small)
    for got, exact in zip(run(np_or_xp, *inputs, amp=amp), truth(*inputs), strict=True):
        oracle.check_exact(got, exact)


@pytest.mark.parametrize("shape", [(127, 17), (40, 130), (9, 624)], ids=str)
def test_error(np_or_xp, shape):
    inputs = case(shape)
    for got, plain, exact in zip(
        run(np_or_xp, *inputs), formulas(*inputs), truth(*inputs), strict=True
    ):
        oracle.check_error(got, plain, exact)


@pytest.mark.parametrize("amp", AMPS)
@pytest.mark.parametrize("shape", [(127, 17), (40, 130)], ids=str)
def test_error_in_16_bits(np_or_xp, shape, amp):
    """Of what is rounded: what they sum up is float32."""
    half = np.dtype(getattr(ml_dtypes, amp, np.float16))
    inputs = case(shape)
    got = run(np_or_xp, *inputs, amp=amp)
    plain = formulas(*inputs, rounded=lambda a: a.astype(half).astype(f32))
    rounded = [f32(a).astype(half).astype(np.float64) for a in (inputs[0], inputs[2])]
    for a, b, c in zip(got, plain, truth(*inputs), strict=True):
        oracle.check_error(a, b, c)
    z = rounded[0] @ rounded[1].T + inputs[3]
    np.testing.assert_allclose(got[0], inputs[1] * z + inputs[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("amp", [None, *AMPS])
@pytest.mark.parametrize("shape", [(35, 16), (3, 17)], ids=str)
def test_devices_agree(xp, shape, amp):
    inputs = case(shape)
    for got, expected in zip(run(xp, *inputs, amp=amp), run(np, *inputs, amp=amp), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("amp", [None, *AMPS])
def test_nan_stays_in_its_row(np_or_xp, amp):
    inputs = case((20, 17))
    clean = run(np_or_xp, *inputs, amp=amp)
    inputs[0][3, 5] = np.nan
    y, dx, dx0, dweight, dbias = run(np_or_xp, *inputs, amp=amp)
    for got, before in ((y, clean[0]), (dx0, clean[2])):
        assert np.isnan(got[3]).all()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(before, 3, 0))
    np.testing.assert_array_equal(dx, clean[1])
    np.testing.assert_array_equal(dbias, clean[4])
    np.testing.assert_array_equal(np.isnan(dweight).all(axis=0), np.arange(17) == 5)


def test_views(np_or_xp):
    """Rows off 16 bytes; transposes; every second element."""
    x, x0, weight, bias, dy = case((6, 16), small)
    expected = run(np_or_xp, x, x0, weight, bias, dy)[0]
    move = lambda a: arrays.copy_to(np_or_xp, np.ascontiguousarray(a))  # noqa: E731
    flat = move(np.append(f32(0), x))[1:].reshape(6, 16)
    spread = move(np.repeat(bias, 2))[::2]
    for view in (flat, move(x.T).T, move(np.repeat(x, 2, axis=1))[:, ::2]):
        y = cross_matrix(view, move(x0.T).T, move(weight.T).T, spread)
        np.testing.assert_array_equal(arrays.to_host(y), expected)


def test_gradcheck():
    assert gradcheck(cross_matrix, case((5, 7), oracle.normals, dtype=np.float64)[:4])


@pytest.mark.parametrize("amp", [None, *AMPS])
def test_same_bits_for_any_number_of_threads(amp):
    oracle.check_same_bits(lambda: run(np, *case((1025, 130)), amp=amp))


@pytest.mark.parametrize("amp", [None, *AMPS])
@pytest.mark.parametrize("shape", [(70, 16), (70, 17)], ids=str)
def test_thread_order(xp, shape, amp):
    inputs = case(shape)
    oracle.check_thread_order(xp, lambda: run(xp, *inputs, amp=amp))


def zeros(*shape, dtype=f32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("inputs", "amp", "error", "text"),
    [
        (
            (zeros(2, 3), zeros(2, 3), zeros(3, 4), zeros(3)), None, ValueError,
            "'weight' must have N = 3 like 'x', got shape (3, 4).",
        ),
        (
            (zeros(2, 3), zeros(2, 3), zeros(3), zeros(3)), None, ValueError,
            "'weight' must have axes (N, N), got shape (3,).",
        ),
        (
            (zeros(2, 0), zeros(2, 0), zeros(0, 0), zeros(0)), None, ValueError,
            "N must be at least 1, got shape (2, 0).",
        ),
        (
            (zeros(2, 3), zeros(2, 3), zeros(3, 3), zeros(3)), "int8", ValueError,
            "'amp' must be None, 'float16' or 'bfloat16', got 'int8'.",
        ),
        (
            (zeros(2, 3, dtype=float), zeros(2, 3), zeros(3, 3), zeros(3)), "float16", TypeError,
            "'x' must be float32, got float64.",
        ),
        (
            (zeros(2, 3), zeros(2, 3, dtype=float), zeros(3, 3), zeros(3)), None, TypeError,
            "'x0' must be float32, got float64.",
        ),
    ],
)  # fmt: skip
def test_refuses(inputs, amp, error, text):
    with pytest.raises(error, match=oracle.sentence(f"cross_matrix: {text}")):
        cross_matrix(*inputs, amp=amp)
