"""The int8 codec on every device, against the formula in Python's exact fractions."""

import warnings
from fractions import Fraction

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec import arrays
from cupyrec.ops.int8_codec import int8_decode, int8_encode

TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
SHAPES = oracle.covering(
    (0, 1, 3, 17, 127, 1025), (1, 3, 4, 10, 16, 128, 130, 1025, 4097), most=40_000
)[:40]
EDGES = [0.0, -0.0, 1e-45, -1e-39, TINY, -TINY, 1.2e-38, 1e-37, 1.0, -3.4e38, HUGE, -HUGE,
         np.inf, -np.inf, np.nan]  # fmt: skip


def nearest(x):
    """A fraction as the nearest float32, ties to even; magnitudes below 2^-126 are 0.

    Rounding to float64 before changes nothing: 53 bits are more than 2 * 24 + 1.
    """
    number = np.float32(float(x)) if abs(x) < Fraction(float(HUGE)) * 2 else np.float32(np.inf)
    return number if abs(number) >= TINY else np.float32(0)


def code(x, s):
    """Exact division and multiplication, each rounded once."""
    t = Fraction(float(nearest(Fraction(float(nearest(Fraction(x) / Fraction(s)))) * 127)))
    return int(abs(t) + Fraction(1, 2)) * (1 if t >= 0 else -1)


def encode_exactly(x):
    codes, scales = np.zeros(x.shape, np.int8), np.zeros(len(x), np.float32)
    for row, row_codes, i in zip(x, codes, range(len(x)), strict=True):
        s = max(abs(float(v)) if np.isfinite(v) else np.inf for v in row)
        scales[i] = np.nan if s == np.inf else s if s >= TINY else 0
        if TINY <= s < np.inf:
            row_codes[:] = [code(float(v), s) if abs(v) >= TINY else 0 for v in row]
    return codes, scales


def decode_in_numpy(codes, scales):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = codes.astype(np.float32) * (scales / np.float32(127))[:, None]
    return np.where(np.abs(values) < TINY, np.float32(0), values)


def encoded(xp, x):
    return [arrays.to_host(a) for a in int8_encode(arrays.copy_to(xp, x))]


def decoded(xp, codes, scales):
    return arrays.to_host(int8_decode(arrays.copy_to(xp, codes), arrays.copy_to(xp, scales)))


def check_codec(xp, x, exact=None):
    """Codes and scales have the right bits, and so have the values."""
    codes, scales = encoded(xp, x)
    expected = exact or encode_exactly(x)
    np.testing.assert_array_equal(codes, expected[0])
    assert scales.tobytes() == expected[1].tobytes()
    values = decoded(xp, codes, scales)
    truth = decode_in_numpy(codes, scales)
    np.testing.assert_array_equal(values, truth)
    assert (np.signbit(values) == np.signbit(truth))[~np.isnan(truth)].all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(np_or_xp, shape):
    x = oracle.normals(shape)
    exact = encode_exactly(x) if x.size < 3000 else tuple(int8_encode(x))
    check_codec(np_or_xp, x, exact)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_what_was_decoded_is_encoded_to_the_same_values(numbers):
    values = int8_decode(*int8_encode(np.array([numbers], np.float32)))
    assert int8_decode(*int8_encode(values)).tobytes() == values.tobytes()


def test_scales_of_a_whole_octave_give_the_same_values_again():
    """Both of s / 127 and 127 times it are rounded."""
    scales = np.arange(0x3F800000, 0x40000000, 3, dtype=np.uint32).view(np.float32)[:, None]
    values = int8_decode(*int8_encode(scales))
    assert int8_decode(*int8_encode(values)).tobytes() == values.tobytes()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("width", [1, 4, 37])
def test_a_row_with_an_edge(np_or_xp, edge, width):
    x = oracle.normals((5, width)) * np.float32(1e-3)
    x[3, width // 2] = edge
    x[4] = edge
    check_codec(np_or_xp, x)


def test_halves_are_rounded_away_from_zero(np_or_xp):
    x = np.arange(-127, 127, dtype=np.float32)[None] + np.float32(0.5)
    x[0, 0] = 127  # so that x / s * 127 is x, rounded twice
    t = x / np.float32(127) * np.float32(127)
    assert (t == x).sum() > 100
    codes, _ = encoded(np_or_xp, x)
    expected = np.trunc(x + np.copysign(0.5, x))
    np.testing.assert_array_equal(codes[t == x], expected[t == x])


@pytest.mark.parametrize("scale", [1.2e-38, 1e-37, 1.0, 3.4e38])
def test_values_are_right_to_half_a_step(np_or_xp, scale):
    x = np.linspace(-1, 1, 130).reshape(2, 65) * scale
    x[:, 0] = scale
    x = x.astype(np.float32)
    codes, scales = encoded(np_or_xp, x)
    np.testing.assert_array_equal(scales, np.float32(scale))
    assert codes.max() == 127
    error = np.abs(decoded(np_or_xp, codes, scales).astype(float) - x)
    assert error.max() <= scale / 254 * 1.0001 + TINY


def test_zeros_and_what_is_not_finite(np_or_xp):
    x = np.zeros((4, 20), np.float32)
    x[1, 3], x[2, 19], x[3] = -0.0, np.nan, TINY / 2
    codes, scales = encoded(np_or_xp, x)
    assert not codes.any()
    assert decoded(np_or_xp, codes, scales)[[0, 1, 3]].tobytes() == bytes(3 * 20 * 4)
    assert np.isnan(decoded(np_or_xp, codes, scales)[2]).all()
    np.testing.assert_array_equal(np.isnan(scales), [False, False, True, False])


numbers = st.one_of(
    st.floats(width=32), st.sampled_from(EDGES).map(lambda x: float(np.float32(x))),
    st.floats(-1, 1, width=32), st.floats(-(2.0**-120), 2.0**-120, width=32),
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "sim"])
@settings(max_examples=60)
@given(st.integers(1, 6).flatmap(lambda d: st.lists(st.lists(numbers, min_size=d, max_size=d),
                                                    min_size=1, max_size=5)))  # fmt: skip
def test_any_rows(device, rows):
    if device == "sim":
        pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    check_codec(arrays.module(device), np.array(rows, np.float32))


def test_any_bits(np_or_xp):
    bits = np.random.default_rng(0).integers(2**32, size=(40, 50), dtype=np.uint32)
    check_codec(np_or_xp, bits.view(np.float32))
    bits &= np.uint32(0x81FFFFFF)  # magnitudes around 2^-126, no row with inf or NaN
    check_codec(np_or_xp, bits.view(np.float32))


def test_out_and_views(np_or_xp):
    xp = np_or_xp
    x = arrays.copy_to(xp, oracle.normals((30, 12)))
    expected = encoded(xp, arrays.to_host(x)[:, ::3].copy())
    flat = xp.empty(30 * 4 + 1, np.int8)
    out = flat[1:].reshape(30, 4), xp.empty(30, np.float32)
    got = int8_encode(x[:, ::3], out=out)
    assert got == out or all(a is b for a, b in zip(got, out, strict=True))
    for a, b in zip(out, expected, strict=True):
        np.testing.assert_array_equal(arrays.to_host(a), b)
    values = xp.empty((30, 4), np.float32)
    assert int8_decode(*out, out=values) is values
    np.testing.assert_array_equal(arrays.to_host(values), decode_in_numpy(*expected))


def test_same_bits_on_the_cpu():
    x = oracle.normals((3000, 10))
    oracle.check_same_bits(lambda: [*int8_encode(x), int8_decode(*int8_encode(x))])


def test_thread_order(xp):
    x = arrays.copy_to(xp, oracle.normals((100, 20)))
    oracle.check_thread_order(xp, lambda: [*int8_encode(x), int8_decode(*int8_encode(x))])


X, CODES, SCALES = np.ones((2, 3), np.float32), np.ones((2, 3), np.int8), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: int8_encode(X.astype(float)), TypeError,
         "int8_encode: 'x' must be float32, got float64."),
        (lambda: int8_encode(X[0]), ValueError,
         "int8_encode: 'x' must have axes (N, D), got shape (3,)."),
        (lambda: int8_encode(X[:, :0]), ValueError,
         "int8_encode: 'x' must have D of at least 1, got shape (2, 0)."),
        (lambda: int8_encode(X, out=(X, SCALES)), TypeError,
         "int8_encode: 'out[0]' must be int8, got float32."),
        (lambda: int8_encode(X, out=(CODES, SCALES[:1])), ValueError,
         "int8_encode: 'out[1]' must have N = 2 like 'x', got shape (1,)."),
        (lambda: int8_decode(X, SCALES), TypeError,
         "int8_decode: 'codes' must be int8, got float32."),
        (lambda: int8_decode(CODES, SCALES.astype(float)), TypeError,
         "int8_decode: 'scales' must be float32, got float64."),
        (lambda: int8_decode(CODES, SCALES, out=X[:, :2].copy()), ValueError,
         "int8_decode: 'out' must have D = 3 like 'codes', got shape (2, 2)."),
    ],
)  # fmt: skip
def test_refuses(call, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        call()


def test_devices_do_not_mix(xp):
    with pytest.raises(TypeError, match=r"int8_decode: arguments must be arrays of one device"):
        int8_decode(arrays.copy_to(xp, CODES), SCALES)


@pytest.mark.parametrize("width", [128, 16])
def test_bytes_and_balance(width):
    sim = arrays.module("sim")
    rows = 1024
    x = sim.asarray(oracle.normals((rows, width)))
    with sim.record() as seen:
        int8_decode(*int8_encode(x))
    ideal = rows * (width * 5 + 4)
    for launch in seen.launches:
        counts = launch.result.counts
        assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
        assert counts["sectors"] * 32 <= 1.1 * ideal
        assert counts["longest_warp"] <= 4 * counts["mean_warp"]
