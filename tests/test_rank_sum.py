import functools

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.rank_sum import rank_sum

SHAPES = oracle.covering((1, 2, 3, 5, 8, 9), (0, 1, 3, 17, 127, 1025, 2048, 2050))
X = np.ones((2, 3), np.float32)


def from_left(parts):
    """Each addition of two float32 in float64 is exact, or rounds to the same as at once."""
    add = lambda a, b: (a.astype(np.float64) + b).astype(np.float32)  # noqa: E731
    with np.errstate(over="ignore", invalid="ignore"):
        return functools.reduce(add, parts)


def summed(xp, parts):
    return arrays.to_host(rank_sum(arrays.copy_to(xp, parts)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(np_or_xp, shape):
    parts = oracle.normals(shape)
    got = summed(np_or_xp, parts)
    assert (got.shape, got.dtype) == (shape[1:], np.float32)
    assert got.tobytes() == from_left(parts).tobytes()


def test_many_numbers():
    """Several blocks and strips of the CPU's loop."""
    parts = oracle.normals((3, 40_001))
    assert rank_sum(parts).tobytes() == from_left(parts).tobytes()
    assert rank_sum(parts[::-1]).tobytes() != rank_sum(parts).tobytes()


def test_any_bits(np_or_xp):
    """Subnormal numbers are kept; infinities and NaN are where they belong."""
    bits = np.random.default_rng(0).integers(2**32, size=(5, 3000), dtype=np.uint32)
    bits[:, ::2] &= np.uint32(0x81FFFFFF)  # magnitudes around 2^-126
    parts = bits.view(np.float32)
    parts[0, :4], parts[1:, :4] = [-0.0, -0.0, 0.0, np.inf], [[0.0], [-0.0], [1e-45], [-1e-45]]
    got, expected = summed(np_or_xp, parts), from_left(parts)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got.view("u4")[number], expected.view("u4")[number])


def test_out_and_views(np_or_xp):
    xp, parts = np_or_xp, oracle.normals((4, 24))
    given, expected = arrays.copy_to(xp, parts), from_left(parts)
    for shift in (0, 1, 2):  # by 4, 1 and 2 numbers at a time
        out = xp.zeros(24 + shift, np.float32)[shift:]
        assert rank_sum(given, out=out) is out
        assert arrays.to_host(out).tobytes() == expected.tobytes()
    half = rank_sum(given[:, ::2])
    assert arrays.to_host(half).tobytes() == expected[::2].tobytes()
    rank_sum(given, out=given[0])
    assert arrays.to_host(given[0]).tobytes() == expected.tobytes()


def test_same_bits_on_the_cpu():
    parts = oracle.normals((3, 100_000))
    oracle.check_same_bits(lambda: [rank_sum(parts)])


def test_thread_order(xp):
    parts = arrays.copy_to(xp, oracle.normals((6, 3000)))
    oracle.check_thread_order(xp, lambda: [rank_sum(parts)])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: rank_sum(X[0]), ValueError, "'parts' must have axes (N, L), got shape (3,)."),
        (lambda: rank_sum(X[:0]), ValueError,
         "'parts' must have N of at least 1, got shape (0, 3)."),
        (lambda: rank_sum(X.astype(float)), TypeError, "'parts' must be float32, got float64."),
        (lambda: rank_sum(X, out=X[:, 0].copy()), ValueError,
         "'out' must have L = 3 like 'parts', got shape (2,)."),
        (lambda: rank_sum(X, out=np.zeros(3)), TypeError, "'out' must be float32, got float64."),
    ],
)  # fmt: skip
def test_refuses(call, error, text):
    with pytest.raises(error, match=oracle.sentence(f"rank_sum: {text}")):
        call()


def test_devices_do_not_mix(xp):
    with pytest.raises(TypeError, match=r"rank_sum: arguments must be arrays of one device"):
        rank_sum(arrays.copy_to(xp, X), out=np.zeros(3, np.float32))
