"""Gradients of a layer with one output, against the formula row by row in float64."""

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops import single_output as op
from cupyrec.ops.single_output import single_output_backward

f32 = np.float32
DTYPES = [np.dtype(f32), *arrays.HALVES]
ROWS, COLUMNS = (0, 1, 3, 17, 127, 1025), (1, 3, 16, 127, 130, 1025)
SHAPES = [(ROWS[i], COLUMNS[(i + j) % 6]) for i in range(6) for j in (0, 2, 5)]


def relu(make, shape, dtype, seed=0):
    """What ReLU leaves: about half is 0."""
    return np.maximum(make(shape, seed=seed), 0).astype(dtype)


def case(make, rows, columns, dtype=f32):
    dy, weight = make((rows, 1), seed=1), make((1, columns), seed=2).astype(dtype)
    return dy, relu(make, (rows, columns), dtype), weight


def whole(shape, seed=0):
    return oracle.integers(shape, -3, 3, seed=seed)


def run(xp, dy, x, weight, scale=2.0):
    """dweight, dbias, dx and its sums, on the device."""
    given = [arrays.copy_to(xp, a) for a in (dy, x, weight)]
    shapes = (weight.shape, f32), (1, f32), (x.shape, x.dtype), (x.shape[1], f32)
    outputs = [xp.empty(shape, dtype) for shape, dtype in shapes]
    single_output_backward(*given, *outputs, scale=scale)
    return outputs


def on_host(outputs):
    return [arrays.to_host(a) for a in outputs]


def truth(dy, x, weight, scale=2.0):
    dy, x, weight = (np.float64(a.astype(f32)) for a in (dy, x, weight))
    dweight, dx = np.zeros(weight.shape), np.zeros(x.shape)
    for b in range(len(x)):
        dweight[0] += dy[b, 0] * x[b]
        dx[b] = dy[b, 0] * weight[0]
        if scale is not None:
            dx[b] = np.where(x[b] > 0, dx[b] * scale, 0)
    return dweight, np.array([dy.sum()]), dx, dx.sum(axis=0)


@pytest.mark.parametrize("i", range(len(SHAPES)), ids=[str(s) for s in SHAPES])
def test_integer_data_is_exact(np_or_xp, i):
    dtype, scale = DTYPES[i % 3], (2.0, None)[i // 3 % 2]
    data = case(whole, *SHAPES[i], dtype)
    got = on_host(run(np_or_xp, *data, scale))
    for a, b in zip(got, truth(*data, scale), strict=True):
        assert a.shape == b.shape
        oracle.check_exact(a.astype(f32), b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error(np_or_xp, dtype):
    """Beside float32 all through, of the same inputs, and dx rounded once."""
    dy, x, weight = data = case(oracle.normals, 1025, 130, dtype)
    wide = x.astype(f32)
    slopes = np.where(wide > 0, dy * weight.astype(f32) * f32(1.25), f32(0))
    naive = dy.T @ wide, dy.sum(axis=0), slopes.astype(dtype).astype(f32), slopes.sum(axis=0)
    got = [a.astype(f32) for a in on_host(run(np_or_xp, *data, 1.25))]
    for a, b, c in zip(got, naive, truth(*data, 1.25), strict=True):
        oracle.check_error(a, b, c)


def test_directional_derivative(np_or_xp):
    """Of sum(dy * (x . weight)), linear in x and in weight, and the layer below's scale."""
    dy, x, weight = case(oracle.normals, 127, 17)
    dweight, dbias, dx, _ = map(np.float64, on_host(run(np_or_xp, dy, x, weight, scale=None)))
    u, v = np.float64(oracle.normals(x.shape, seed=5)), np.float64(oracle.normals((1, 17), seed=6))

    def objective(t):
        return (dy * ((x + t * u) * (weight + t * v) + 3 * t / 17)).sum()

    slope = (objective(1e-4) - objective(-1e-4)) / 2e-4
    np.testing.assert_allclose((dx * u).sum() + (dweight * v).sum() + 3 * dbias[0], slope, 1e-4)


@pytest.mark.parametrize(("columns", "dtype"), [(130, DTYPES[0]), (64, DTYPES[1])], ids=str)
def test_same_bits_in_any_order(xp, columns, dtype):
    data = case(oracle.normals, 300, columns, dtype)
    oracle.check_thread_order(xp, lambda: run(xp, *data))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_that_fill_rows_up_get_no_gradient(np_or_xp, dtype):
    dy, x, weight = case(whole, 130, 24, dtype)
    x[:, 21:], weight[:, 21:] = 0, 0
    given = [arrays.copy_to(np_or_xp, a) for a in (dy, x, weight)]
    outputs = [np_or_xp.full(shape, 7, f32) for shape in ((1, 21), 1)]
    dx, sums = np_or_xp.empty(x.shape, x.dtype), np_or_xp.full(22, 7, f32)
    single_output_backward(*given, *outputs, dx, sums[:21], scale=2.0)
    dweight, dbias, expected, expected_sums = truth(dy, x, weight)
    for got, b in [
        (outputs[0], dweight[:, :21]), (outputs[1], dbias), (dx, expected),
        (sums, np.append(expected_sums[:21], 7)),
    ]:  # fmt: skip
        oracle.check_exact(arrays.to_host(got).astype(f32), b)


def test_what_is_not_wanted_is_left_out(xp):
    data = case(whole, 200, 130)
    expected = on_host(run(xp, *data))
    dweight, dbias = xp.empty((1, 130), f32), xp.empty(1, f32)
    single_output_backward(*(arrays.copy_to(xp, a) for a in data), dweight, dbias)
    for got, a in zip((dweight, dbias), expected, strict=False):
        np.testing.assert_array_equal(arrays.to_host(got), a)


def test_nan_and_inf(np_or_xp):
    """One in dy reaches all of its row where x is live, one in x only its weight's gradient."""
    dy, x, weight = case(whole, 130, 20)
    dy[100] = np.inf
    x[5, 3] = np.nan
    weight[0] = 1
    dweight, dbias, dx, sums = on_host(run(np_or_xp, dy, x, weight))
    assert not np.isfinite(dbias[0])
    np.testing.assert_array_equal(np.isinf(dx), (np.arange(130) == 100)[:, None] & (x > 0))
    np.testing.assert_array_equal(np.isfinite(sums), ~(x[100] > 0))
    assert np.isnan(dweight[0, 3])
    np.testing.assert_array_equal(np.isinf(dweight[0]), (x[100] > 0) & (np.arange(20) != 3))


def test_arrays_at_any_address(xp):
    data = case(whole, 70, 16)
    expected = on_host(run(xp, *data))
    for shift in (1, 2):
        room = xp.empty(70 * 16 + shift, f32)
        x = room[shift:].reshape(70, 16)
        x[...] = xp.asarray(data[1])
        for a, b in zip(on_host(run(xp, data[0], x, data[2])), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_how_it_is_cut():
    """Two blocks a tile from 65 rows on; what one block adds up is bounded."""
    grids = [op._geometry(B=b, tiles=8, lanes=16).grid for b in (0, 1, 64, 65, 65_536, 2**24)]
    assert grids == [8, 8, 8, 16, 2048, 2048]
    assert op._geometry(B=2**24, tiles=1, lanes=16).grid == 256
    assert op._geometry(B=129, tiles=5000, lanes=16).grid == 5000


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            {"x": np.ones((3, 2))}, TypeError,
            "'x' must be float32 or float16 or bfloat16, got float64.",
        ),
        ({"dy": np.ones((3, 1))}, TypeError, "'dy' must be float32, got float64."),
        (
            {"weight": np.ones((1, 3), f32)}, ValueError,
            "'weight' must have N = 2 like 'x', got shape (1, 3).",
        ),
        (
            {"dweight": np.ones((1, 3), f32), "dx_sum": np.ones(3, f32)}, ValueError,
            "'dweight' must have at most 2 columns, got shape (1, 3).",
        ),
        (
            {"dx_sum": np.ones(1, f32)}, ValueError,
            "'dx_sum' must have K = 2 like 'dweight', got shape (1,).",
        ),
        ({"dx_sum": np.ones(2)}, TypeError, "'dx_sum' must be float32, got float64."),
    ],
)  # fmt: skip
def test_refuses(wrong, error, text):
    given = {"dy": (3, 1), "x": (3, 2), "weight": (1, 2), "dweight": (1, 2), "dbias": 1}
    given = {name: np.ones(shape, f32) for name, shape in given.items()} | wrong
    with pytest.raises(error, match=oracle.sentence(f"single_output_backward: {text}")):
        single_output_backward(**given)
