import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, cast
from cupyrec.ops.cast import cast_array, cast_matrices, padded, widen

f32 = np.float32
SIZES = 0, 1, 3, 17, 127, 1025


def nearest(x, dtype):
    """Of the numbers of `dtype` around each x the nearest, of two as near the even one."""
    if dtype == np.float16:
        codes = np.arange(0x7C01, dtype=np.uint16)
    else:
        codes = np.arange(0x7F81, dtype=np.uint16)
    values = codes.view(dtype).astype(np.float64)
    limit = 2 * values[-2] - values[-3]  # infinity lies where the next number would
    values[-1] = limit
    size = np.minimum(np.abs(np.float64(x)), limit)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    to_low, to_high = size - values[above - 1], values[above] - size
    up = (to_high < to_low) | ((to_high == to_low) & (codes[above] % 2 == 0))
    code = np.where(up, codes[above], codes[above - 1])
    return np.copysign(code.astype(np.uint16).view(dtype).astype(np.float64), x)


def awkward(n):
    """Numbers of all sizes, halfway cases and what both types can't hold."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-24, 20, n)
    x[::3] = np.round(x[::3] * 2.0**11) / 2.0**11  # ties of float16 between 1 and 2
    x[5::16], x[6::16] = 65519.996, 65520.0
    return x.astype(f32)


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_rounds_to_the_nearest(xp, n, dtype):
    x = awkward(n)
    got = cast(xp.asarray(x), dtype)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    np.testing.assert_array_equal(arrays.to_host(got).astype(np.float64), nearest(x, dtype))
    back = cast(got, f32)
    assert back.dtype == f32
    np.testing.assert_array_equal(arrays.to_host(back), nearest(x, dtype))


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
def test_on_the_cpu_too(dtype):
    x = awkward(1025)
    np.testing.assert_array_equal(cast(x, dtype).astype(np.float64), nearest(x, dtype))


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
def test_from_one_type_of_16_bits_to_the_other(np_or_xp, dtype):
    other = arrays.HALVES[dtype == arrays.HALVES[0]]
    x = cast(awkward(85), other).reshape(5, 17)
    expected = nearest(x.astype(f32), dtype)
    for make in (cast, padded):
        got = arrays.to_host(make(np_or_xp.asarray(x), dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got[:, :17].astype(np.float64), expected)


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
def test_what_is_not_finite_stays_so(xp, dtype):
    x = np.array([np.inf, -np.inf, np.nan, -0.0], f32)
    got = arrays.to_host(cast(xp.asarray(x), dtype)).astype(f32)
    np.testing.assert_array_equal(got, x)
    assert np.signbit(got[3])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_gradient_comes_in_the_type_of_the_input(device):
    if device == "sim":
        pytest.importorskip("cupy", reason="pip install cupyrec[sim]")
    xp = arrays.module(device)
    x = Tensor(xp.asarray(np.arange(6, dtype=f32).reshape(2, 3)), requires_grad=True)
    y = cast(x, "bfloat16")
    assert (str(y.dtype), cast(x, f32)) == ("bfloat16", x)
    y.backward(xp.full((2, 3), 3, y.dtype))
    assert x.grad.dtype == f32
    oracle.check_exact(arrays.to_host(x.grad), np.full((2, 3), 3.0))


@pytest.mark.parametrize("source", [f32, *arrays.HALVES], ids=str)
@pytest.mark.parametrize("columns", [1, 8, 13, 479])
def test_rows_are_padded_with_zeros(xp, columns, source):
    dtype = arrays.HALVES[source == arrays.HALVES[1]]
    x = oracle.integers((17, columns), -100, 100).astype(source)
    got = arrays.to_host(padded(xp.asarray(x), dtype)).astype(f32)
    assert got.shape == (17, -(-columns // 8) * 8)
    np.testing.assert_array_equal(got[:, :columns], x.astype(f32))
    assert not got[:, columns:].any()


@pytest.mark.parametrize(("shift", "last"), [(0, None), (1, (5, 13)), (0, (1, 3)), (1, (300, 8))])
def test_several_matrices_in_one_launch(shift, last):
    pytest.importorskip("cupy", reason="pip install cupyrec[sim]")
    xp = arrays.module("sim")
    shapes = [(5, 13), (16, 8), (3,), (1, 1), (8,), (129, 40)]
    hosts = [oracle.normals(shape, seed=i) for i, shape in enumerate(shapes)]
    flat = xp.asarray(np.concatenate([np.zeros(shift, f32), *(x.ravel() for x in hosts)]))
    ends = np.cumsum([shift, *(x.size for x in hosts)])
    xs = [
        flat[i:j].reshape(s) for s, i, j in zip(shapes, ends[:-1], ends[1:], strict=True)
    ]  # as they lie in an optimizer's buffer
    for seed in range(2):
        x = None if last is None else oracle.normals(last, seed=seed)
        there = None if x is None else xp.asarray(x)
        with xp.record() as seen:
            got = cast_matrices(xs, arrays.HALVES[0], there)
    assert [launch.name for launch in seen.launches] == ["cast_matrices"]
    assert seen.syncs == 0
    if last is not None:
        y = got.pop().get()
        assert y.tobytes() == cast_matrices(hosts, "float16", x)[-1].tobytes()
        expected = np.pad(nearest(x, np.float16), ((0, 0), (0, -last[1] % 8)))
        np.testing.assert_array_equal(y.astype(f32), expected)
    for x, y in zip(hosts, got, strict=True):
        y, own = y.get().astype(f32), tuple(slice(0, n) for n in x.shape)
        assert y.shape == tuple(-(-n // 8) * 8 for n in x.shape)
        np.testing.assert_array_equal(y[own], nearest(x, np.float16))
        y[own] = 0
        assert not y.any()


def test_thread_order(xp):
    x = xp.asarray(awkward(3000).reshape(250, 12))

    def call():
        both = cast_matrices([x, x[:7]], arrays.HALVES[0])
        return [cast(x, arrays.HALVES[1]), padded(x, arrays.HALVES[0]), *both]

    oracle.check_thread_order(xp, call)


def test_nothing_is_done_for_the_same_type():
    x = np.zeros(3, f32)
    assert cast(x, "float32") is x
    assert cast_array(x, f32) is x


@pytest.mark.parametrize(
    ("make", "dtype", "text"),
    [
        (lambda: np.zeros(3, int), "float16", "'x' must be float32 or float16 or bfloat16 or "),
        (lambda: np.zeros(3, f32), np.int32, "'dtype' must be float32 or float16 or bfloat16 or "),
        (lambda: np.zeros(3, f32), "half_precision", "'dtype' must be float32 or float16 or "),
    ],
)
def test_refuses(make, dtype, text):
    with pytest.raises(TypeError, match=f"cast: {text}"):
        cast(make(), dtype)


def test_16_bits_are_widened_and_others_left(np_or_xp):
    for dtype in arrays.HALVES:
        x = Tensor(np_or_xp.ones(3, dtype), requires_grad=True)
        y = widen(x)
        assert y.dtype == f32
        y.backward(np_or_xp.ones(3, f32))
        assert x.grad.dtype == dtype
    x = np_or_xp.ones(3, f32)
    assert widen(x) is x
