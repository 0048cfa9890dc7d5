import math

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays
from cupyrec.ops.relu_dropout import Dropout, mask_words, relu_dropout, relu_dropout_backward
from cupyrec.testing import gradcheck

f32 = np.float32
SHAPES = oracle.covering((0, 1, 3, 17, 127, 1025), (1, 3, 4, 16, 128, 130), most=40_000)


def bits(mask, columns):
    """(rows, columns) of bool out of the mask's words."""
    out = np.empty((len(mask), columns), bool)
    for b in range(len(mask)):
        for n in range(columns):
            out[b, n] = int(mask[b, n // 32]) >> (n % 32) & 1
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(shape):
    rows, columns = shape
    x, bias = oracle.integers(shape, -9, 9), oracle.integers(columns, -4, 4, seed=1)
    y, mask = relu_dropout(x, bias)
    z = np.float64(x) + bias
    oracle.check_exact(y, z * (z > 0))
    assert (mask.shape, mask.dtype) == ((rows, mask_words(columns)), np.uint32)
    np.testing.assert_array_equal(bits(mask, columns), z > 0)
    dx = relu_dropout_backward(x, mask)
    oracle.check_exact(dx, np.float64(x) * (z > 0))
    assert (y.dtype, dx.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize(("columns", "words"), [(0, 0), (1, 4), (128, 4), (129, 8), (256, 8)])
def test_mask_rows_are_padded_to_128_bits_of_zero(columns, words):
    assert mask_words(columns) == words
    _, mask = relu_dropout(np.ones((2, columns), np.float32), np.zeros(columns, np.float32))
    assert mask.shape == (2, words)
    assert np.bitwise_count(mask).sum() == 2 * columns


@pytest.mark.parametrize("rate", [0.25, 0.5, 1 - 2**-10, 1 - 2**-40])
@pytest.mark.parametrize("columns", [1, 10, 130])
def test_keeps_the_units_that_philox_says(rate, columns):
    rows, first = 17, 1000
    dropout = Dropout(rate, seed=2**63 + 5, step=7, layer=3, first=first)
    x = oracle.integers((rows, columns), 1, 9)
    y, mask = relu_dropout(x, np.zeros(columns, np.float32), dropout)
    kept = oracle.keep(rows, columns, rate, *dropout[1:])
    np.testing.assert_array_equal(y, np.where(kept, x * np.float32(1 / (1 - rate)), 0))
    np.testing.assert_array_equal(bits(mask, columns), kept)
    np.testing.assert_array_equal(relu_dropout_backward(x, mask, dropout), y)


def test_a_unit_is_kept_from_its_word_on():
    word = oracle.philox4x32((0, 0, 0, 0), (1, 0))[0]
    x, bias = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
    for threshold, live in [(word, 1), (word + 1, 0)]:
        assert relu_dropout(x, bias, Dropout(threshold / 2**32, seed=1))[1][0, 0] == live


def test_rate_of_kept_units():
    x, bias = np.ones((1025, 128), np.float32), np.zeros(128, np.float32)
    for rate in (0.01, 0.1, 0.5, 0.9):
        _, mask = relu_dropout(x, bias, Dropout(rate, seed=1))
        kept = np.bitwise_count(mask)
        n = x.size
        assert abs(kept.sum() - n * (1 - rate)) < 5 * math.sqrt(n * rate * (1 - rate))
        by_column = bits(mask, 128).sum(axis=0)
        bound = 6 * math.sqrt(1025 * rate * (1 - rate))
        assert np.abs(by_column - 1025 * (1 - rate)).max() < bound


@pytest.mark.parametrize("change", [{"seed": 2}, {"seed": 1 + 2**32}, {"step": 1}, {"layer": 1}])
def test_masks_of_other_counters_are_unrelated(change):
    x, bias = np.ones((1025, 128), np.float32), np.zeros(128, np.float32)
    dropout = Dropout(0.5, seed=1)
    masks = [relu_dropout(x, bias, d)[1] for d in (dropout, dropout._replace(**change))]
    agree = x.size - int(np.bitwise_count(masks[0] ^ masks[1]).sum())
    assert abs(agree - x.size / 2) < 5 * math.sqrt(x.size / 4)


def test_mask_does_not_depend_on_how_the_batch_is_split():
    x, bias = oracle.normals((1025, 130)), oracle.normals(130, seed=1)
    dropout = Dropout(0.3, seed=9, step=2, layer=1)
    y, mask = relu_dropout(x, bias, dropout)
    for start, stop in [(0, 0), (0, 1), (1, 700), (700, 1025)]:
        part, part_mask = relu_dropout(x[start:stop], bias, dropout._replace(first=start))
        np.testing.assert_array_equal(part, y[start:stop])
        np.testing.assert_array_equal(part_mask, mask[start:stop])


def test_error():
    x, bias, dropout = oracle.normals((127, 130)), oracle.normals(130, seed=1), Dropout(0.3)
    y, mask = relu_dropout(x, bias, dropout)
    kept = bits(mask, 130)
    naive = np.maximum(x + bias, np.float32(0)) * kept / np.float32(0.7)
    truth = np.maximum(np.float64(x) + bias, 0) * kept / 0.7
    oracle.check_error(y, naive, truth)
    dx = relu_dropout_backward(x, mask, dropout)
    oracle.check_error(dx, x * kept / np.float32(0.7), np.float64(x) * kept / 0.7)


def test_directional_derivative():
    x = oracle.normals((17, 10), np.float64), oracle.normals(10, np.float64, seed=1)
    assert gradcheck(lambda x, bias: relu_dropout(x, bias, Dropout(0.3, seed=4))[0], x)


def test_directional_derivative_by_the_mask():
    x, bias = oracle.normals((17, 10), np.float64), oracle.normals(10, np.float64, seed=1)
    dropout = Dropout(0.3, seed=4)
    mask = relu_dropout(x, bias, dropout)[1]
    c, v = oracle.normals(x.shape, np.float64, 2), oracle.normals(x.shape, np.float64, 3)
    up, down = (relu_dropout(x + h * v, bias, dropout)[0] for h in (1e-6, -1e-6))
    slope = (c * (up - down)).sum() / 2e-6
    np.testing.assert_allclose((relu_dropout_backward(c, mask, dropout) * v).sum(), slope, 1e-6)


def test_arrays_give_an_array_and_tensors_a_tensor():
    x, bias = oracle.normals((17, 10)), oracle.normals(10, seed=1)
    y, mask = relu_dropout(x, bias)
    assert isinstance(y, np.ndarray)
    tracked, same = relu_dropout(x, Tensor(bias, requires_grad=True))
    assert tracked.requires_grad
    np.testing.assert_array_equal(tracked.data, y)
    np.testing.assert_array_equal(same, mask)
    assert not relu_dropout(Tensor(x), bias)[0].requires_grad


def test_nan_and_inf():
    x = np.array([[np.nan, np.inf, -np.inf, 1.0, -0.0]], np.float32)
    y, mask = relu_dropout(x, np.zeros(5, np.float32))
    np.testing.assert_array_equal(y, [[np.nan, np.inf, 0, 1, 0]])
    assert not np.signbit(y[0, 4])
    np.testing.assert_array_equal(relu_dropout_backward(x[:, ::-1], mask), [[0, 1, 0, np.inf, 0]])
    y, _ = relu_dropout(np.ones((1, 2), np.float32), np.array([np.nan, 0], np.float32))
    np.testing.assert_array_equal(y, [[np.nan, 1]])


def test_inputs_stay_as_they_are():
    x, bias = oracle.normals((17, 10)), oracle.normals(10, seed=1)
    before = x.copy()
    y, mask = relu_dropout(x, bias)
    relu_dropout_backward(x, mask)
    np.testing.assert_array_equal(x, before)
    views = np.asfortranarray(x), np.repeat(bias, 2)[::2]
    np.testing.assert_array_equal(relu_dropout(*views)[0], y)
    dx = relu_dropout_backward(np.asfortranarray(x), np.asfortranarray(mask))
    np.testing.assert_array_equal(dx, relu_dropout_backward(x, mask))


def test_same_bits():
    x, bias, dropout = oracle.normals((1025, 130)), oracle.normals(130, seed=1), Dropout(0.3)

    def call():
        y, mask = relu_dropout(x, bias, dropout)
        return y, mask, relu_dropout_backward(x, mask, dropout)

    oracle.check_same_bits(call)


@pytest.mark.parametrize(
    ("x", "bias", "error", "text"),
    [
        (
            np.ones(3, f32), np.ones(3, f32), ValueError,
            "'x' must have axes (B, N), got shape (3,).",
        ),
        (
            np.ones((2, 3), f32), np.ones(4, f32), ValueError,
            "'bias' must have N = 3 like 'x', got shape (4,).",
        ),
        (
            np.ones((2, 3), int), np.ones(3, f32), TypeError,
            "'x' must be float32 or float16 or bfloat16 or float64, got int64.",
        ),
        (np.ones((2, 3), f32), np.ones(3), TypeError, "'bias' must be float32, got float64."),
        (
            [[1.0]], np.ones(1), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list.",
        ),
    ],
)  # fmt: skip
def test_forward_refuses(x, bias, error, text):
    with pytest.raises(error, match=oracle.sentence(f"relu_dropout: {text}")):
        relu_dropout(x, bias)


@pytest.mark.parametrize("rate", [1, 1.5, -0.5, np.nan])
def test_refuses_a_rate_outside(rate):
    text = f"relu_dropout: 'dropout.rate' must lie in [0, 1), got {rate}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        relu_dropout(np.ones((2, 3)), np.ones(3), Dropout(rate))


@pytest.mark.parametrize(
    ("dy", "mask", "error", "text"),
    [
        (
            np.ones((), f32), np.ones((2, 4), np.uint32), ValueError,
            "'dy' must have axes (B, N), got shape ().",
        ),
        (
            np.ones((2, 3), f32), np.ones((2, 8), np.uint32), ValueError,
            "'mask' must have axes (B, 4), got shape (2, 8).",
        ),
        (
            np.ones((2, 3), f32), np.ones((3, 4), np.uint32), ValueError,
            "'mask' must have B = 2 like 'dy', got shape (3, 4).",
        ),
        (
            np.ones((2, 3), f32), np.ones((2, 4), int), TypeError,
            "'mask' must be uint32, got int64.",
        ),
        (
            np.ones((2, 3), int), np.ones((2, 4), np.uint32), TypeError,
            "'dy' must be float32 or float16 or bfloat16 or float64, got int64.",
        ),
        (
            None, np.ones((2, 4), np.uint32), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got NoneType.",
        ),
    ],
)  # fmt: skip
def test_backward_refuses(dy, mask, error, text):
    with pytest.raises(error, match=oracle.sentence(f"relu_dropout_backward: {text}")):
        relu_dropout_backward(dy, mask)


@pytest.mark.parametrize(
    ("dropout", "first", "text"),
    [
        (dict(seed=-1), 0, "'dropout.seed' must lie in [0, 2**64), got -1."),
        (dict(step=2**32), 0, "'dropout.step' must lie in [0, 2**32), got 4294967296."),
        (dict(layer=-1), 0, "'dropout.layer' must lie in [0, 2**32), got -1."),
        (dict(), 2**32 - 1, "samples must be numbered below 2**32, got 4294967297."),
        (dict(), -3, "samples must be numbered below 2**32, got -1."),
    ],
)
def test_refuses_counters_that_philox_has_no_room_for(dropout, first, text):
    x, bias = np.zeros((2, 3)), np.zeros(3)
    with pytest.raises(ValueError, match=oracle.sentence(f"relu_dropout: {text}")):
        relu_dropout(x, bias, Dropout(0.5, first=first, **dropout))


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
@pytest.mark.parametrize("columns", [13, 16, 130])
def test_floats_of_16_bits_are_rounded_once(np_or_xp, columns, dtype):
    xp, dropout = np_or_xp, Dropout(0.3, 5, 2)
    x, bias = oracle.normals((17, columns)).astype(dtype), oracle.normals(columns).astype(dtype)
    y, mask = relu_dropout(xp.asarray(x), xp.asarray(bias), dropout)
    wide, expected_mask = relu_dropout(x.astype(f32), bias.astype(f32), dropout)
    got = arrays.to_host(y)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(f32), wide.astype(dtype).astype(f32))
    words = slice(0, -(-columns // 32))
    np.testing.assert_array_equal(arrays.to_host(mask)[:, words], expected_mask[:, words])
    dx = arrays.to_host(relu_dropout_backward(xp.asarray(x), mask, dropout))
    assert dx.dtype == dtype
    wide = relu_dropout_backward(x.astype(f32), expected_mask, dropout)
    np.testing.assert_array_equal(dx.astype(f32), wide.astype(dtype).astype(f32))
