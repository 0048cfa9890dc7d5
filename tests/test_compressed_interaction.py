"""xDeepFM's layer on every device, against its formulas in float64."""

import ml_dtypes
import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, compressed_interaction
from cupyrec.ops import compressed_interaction as op
from cupyrec.testing import gradcheck

f32 = np.float32
AMPS = None, "float16", "bfloat16"
# R, H, M, O
SHAPES = oracle.covering((0, 1, 3, 17, 127), (1, 3, 8, 33), (1, 4, 39, 130), (1, 5, 16))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """A few rows at a time."""
    monkeypatch.setattr(op, "_CHUNK", 1 << 16)


def run(xp, x, x0, weight, bias, dy, **options):
    """y, dx, dx0, dweight, dbias as NumPy arrays."""
    inputs = x, x0, weight, bias
    tensors = [Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in inputs]
    y = compressed_interaction(*tensors, **options)
    y.backward(arrays.copy_to(xp, dy))
    results = [y.data, *(t.grad for t in tensors)]
    assert {(arrays.device(a), a.dtype.name) for a in results} == {(arrays.name(xp), "float32")}
    return [arrays.to_host(a) for a in results]


def formulas(x, x0, weight, bias, dy, rounded=lambda a: a, linear=False):
    """Sums over all products, written out; in the type of x, what is multiplied `rounded`."""
    p, weight = rounded(x[:, :, None] * x0[:, None, :]), rounded(weight)
    z = np.einsum("rij,oij->ro", p, weight) + bias
    live = linear | (z > 0)
    dz = rounded(np.where(live, dy, dy.dtype.type(0)))
    dp = np.einsum("ro,oij->rij", dz, weight)
    dx, dx0 = (dp * x0[:, None, :]).sum(axis=2), (dp * x[:, :, None]).sum(axis=1)
    return np.where(live, z, z.dtype.type(0)), dx, dx0, np.einsum("ro,rij->oij", dz, p), dz.sum(0)


def truth(*inputs, **options):
    return formulas(*map(np.float64, inputs), **options)


def case(shape, make=oracle.normals, **options):
    """x, x0, weight, bias, dy."""
    r, h, m, o = shape
    shapes = (r, h), (r, m), (o, h, m), o, (r, o)
    return [make(s, seed=i, **options) for i, s in enumerate(shapes)]


def small(shape, seed):
    return oracle.integers(shape, -2, 2, seed=seed)


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_integer_data_is_exact(np_or_xp, i):
    inputs, amp = case(SHAPES[i], small), AMPS[i % 3]
    inputs[3] += f32(0.5)  # nothing is 0 before the ReLU
    for got, exact in zip(run(np_or_xp, *inputs, amp=amp), truth(*inputs), strict=True):
        oracle.check_exact(2 * got, 2 * exact)


@pytest.mark.parametrize("amp", AMPS)
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (127, 3, 4, 5), (17, 8, 39, 16)], ids=str)
def test_without_relu_integer_data_is_exact(np_or_xp, shape, amp):
    inputs = case(shape, small)
    expected = truth(*inputs, linear=True)
    for got, exact in zip(
        run(np_or_xp, *inputs, linear_output=True, amp=amp), expected, strict=True
    ):
        oracle.check_exact(got, exact)


def after_relu(shape, make=oracle.normals):
    x, *others = case(shape, make)
    return np.maximum(x, 0), *others


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_after_a_relu_integer_data_is_exact(np_or_xp, i):
    inputs = after_relu(SHAPES[i], small)
    inputs[3][...] += f32(0.5)
    got = run(np_or_xp, *inputs, rectified=True, amp=AMPS[i // 3 % 3])
    for k, (a, b) in enumerate(zip(got, truth(*inputs), strict=True)):
        live = inputs[0] > 0 if k == 1 else ...
        oracle.check_exact(2 * a[live], 2 * b[live])


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("shape", [(700, 17, 9, 5), (600, 8, 130, 40)], ids=str)
def test_error_after_a_relu(shape, linear):
    inputs = after_relu(shape)
    got = run(np, *inputs, rectified=True, linear_output=linear)
    assert (got[1] == 0)[inputs[0] == 0].all()
    plain, exact = formulas(*inputs, linear=linear), truth(*inputs, linear=linear)
    for i, (a, b, c) in enumerate(zip(got, plain, exact, strict=True)):
        live = inputs[0] > 0 if i == 1 else ...
        oracle.check_error(a[live], b[live], c[live])


def test_nan_after_a_relu_stays_in_its_row():
    inputs = after_relu((20, 3, 5, 4))
    clean = run(np, *inputs, rectified=True)
    inputs[0][3, 1] = np.nan
    got = run(np, *inputs, rectified=True)
    assert np.isnan(got[0][3]).all()
    for a, b in zip(got[:3], clean, strict=False):
        np.testing.assert_array_equal(np.delete(a, 3, 0), np.delete(b, 3, 0))


def test_same_bits_after_a_relu():
    oracle.check_same_bits(lambda: run(np, *after_relu((1025, 33, 39, 16)), rectified=True))


@pytest.mark.parametrize("shape", [(127, 17, 9, 5), (40, 8, 130, 16)], ids=str)
def test_error(np_or_xp, shape):
    inputs = case(shape)
    for got, plain, exact in zip(
        run(np_or_xp, *inputs), formulas(*inputs), truth(*inputs), strict=True
    ):
        oracle.check_error(got, plain, exact)


@pytest.mark.parametrize("amp", AMPS[1:])
@pytest.mark.parametrize("shape", [(127, 17, 9, 5), (40, 8, 130, 16)], ids=str)
def test_error_in_16_bits(np_or_xp, shape, amp):
    half = np.dtype(getattr(ml_dtypes, amp, np.float16))
    inputs = case(shape)
    got = run(np_or_xp, *inputs, amp=amp)
    plain = formulas(*inputs, rounded=lambda a: a.astype(half).astype(f32))
    for a, b, c in zip(got, plain, truth(*inputs), strict=True):
        oracle.check_error(a, b, c)
    assert not np.array_equal(got[0], run(np_or_xp, *inputs)[0])


@pytest.mark.parametrize("amp", AMPS)
def test_devices_agree(xp, amp):
    inputs = case((35, 9, 7, 6))
    for got, expected in zip(run(xp, *inputs, amp=amp), run(np, *inputs, amp=amp), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("amp", AMPS)
def test_nan_stays_in_its_row(np_or_xp, amp):
    inputs = case((20, 3, 5, 4))
    clean = run(np_or_xp, *inputs, amp=amp)
    inputs[0][3, 1] = np.nan
    got = run(np_or_xp, *inputs, amp=amp)
    assert np.isnan(got[0][3]).all()
    for a, b in zip(got[:3], clean, strict=False):
        np.testing.assert_array_equal(np.delete(a, 3, 0), np.delete(b, 3, 0))


def test_gradcheck():
    inputs = case((5, 3, 4, 2), oracle.normals, dtype=np.float64)[:4]
    inputs[3] += 0.01
    assert gradcheck(compressed_interaction, inputs)


@pytest.mark.parametrize("amp", AMPS)
def test_same_bits_for_any_number_of_threads(amp):
    oracle.check_same_bits(lambda: run(np, *case((1025, 33, 39, 16)), amp=amp))


@pytest.mark.parametrize("amp", AMPS)
def test_thread_order(xp, amp):
    inputs = case((35, 9, 39, 5))
    oracle.check_thread_order(xp, lambda: run(xp, *inputs, amp=amp))


def test_chunks_give_the_same(xp, monkeypatch):
    inputs = case((70, 8, 16, 4))
    expected = run(xp, *inputs)
    monkeypatch.setattr(op, "_CHUNK", 1 << 30)
    for i, (got, before) in enumerate(zip(run(xp, *inputs), expected, strict=True)):
        if i == 3:  # added up chunk by chunk
            np.testing.assert_allclose(got, before, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_allclose(got, before, rtol=1e-6, atol=1e-6)


def zeros(*shape, dtype=f32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("inputs", "amp", "error", "text"),
    [
        (
            (zeros(2, 3), zeros(3, 4), zeros(5, 3, 4), zeros(5)), None, ValueError,
            "'x0' must have R = 2 like 'x', got shape (3, 4).",
        ),
        (
            (zeros(2, 3), zeros(2, 4), zeros(5, 12), zeros(5)), None, ValueError,
            "'weight' must have axes (O, H, M), got shape (5, 12).",
        ),
        (
            (zeros(2, 0), zeros(2, 4), zeros(5, 0, 4), zeros(5)), None, ValueError,
            "O, H and M must be at least 1, got shape (5, 0, 4).",
        ),
        (
            (zeros(2, 3), zeros(2, 4), zeros(5, 3, 4), zeros(5)), "int8", ValueError,
            "'amp' must be None, 'float16' or 'bfloat16', got 'int8'.",
        ),
        (
            (zeros(2, 3), zeros(2, 4), zeros(5, 3, 4, dtype=float), zeros(5)), None, TypeError,
            "'weight' must be float32, got float64.",
        ),
    ],
)  # fmt: skip
def test_refuses(inputs, amp, error, text):
    with pytest.raises(error, match=oracle.sentence(f"compressed_interaction: {text}")):
        compressed_interaction(*inputs, amp=amp)
