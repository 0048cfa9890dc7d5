import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.sum_squares import sum_squares

SIZES = [0, 1, 3, 17, 127, 1025, 65_535, 65_536, 65_537, 200_000]


@pytest.mark.parametrize("n", SIZES)
def test_integer_data_is_exact(n):
    x = oracle.integers(n, -9, 9)
    got = sum_squares(x)
    assert type(got) is float
    oracle.check_exact(np.float64(got), np.float64(sum(int(v) ** 2 for v in x)))


@pytest.mark.parametrize("n", SIZES[3:])
def test_error(n):
    """Squares of float32 are exact in float64: only the sum rounds."""
    x = oracle.normals(n)
    truth = math.fsum(float(v) ** 2 for v in x)
    assert abs(sum_squares(x) - truth) <= np.finfo(np.float64).eps * math.sqrt(n) * truth


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 70_000, 131_071])
def test_nan_and_inf(value, at):
    x = oracle.normals(131_072)
    x[at] = value
    np.testing.assert_equal(sum_squares(x), abs(value))


def test_neither_overflows_nor_underflows():
    assert sum_squares(np.full(4, 2.0**127, np.float32)) == 2.0**256
    assert sum_squares(np.full(4, 2.0**-149, np.float32)) == 2.0**-296


def test_any_shape_and_layout():
    x = oracle.integers((17, 10, 3), -9, 9)
    assert sum_squares(x) == sum_squares(x.ravel())
    assert sum_squares(x[:, ::2].T) == (x[:, ::2] ** 2).sum()
    assert sum_squares(np.float32(3) * np.ones((), np.float32)[None]) == 9


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_several_arrays(device):
    """Also where a launch has several blocks, or nothing to do."""
    xp = arrays.module(device)
    xs = [oracle.integers(n, -9, 9, seed=n) for n in (3, 0, 5000, 1, 2049)]
    truth = sum(int(v) ** 2 for x in xs for v in x)
    held = [xp.asarray(x) for x in xs]
    assert np.asarray(arrays.to_host(sum_squares(*held))).item() == truth
    assert np.asarray(arrays.to_host(sum_squares(held[1], held[1]))).item() == 0


def test_same_bits():
    x = oracle.normals(300_000)
    oracle.check_same_bits(lambda: [sum_squares(x), sum_squares(x[1:]), sum_squares(x[:-3])])


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros(3), "'x' must be float32, got float64."),
        ([1.0], "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list."),
    ],
)
def test_refuses(x, text):
    with pytest.raises(TypeError, match=oracle.sentence(f"sum_squares: {text}")):
        sum_squares(x)
