from fractions import Fraction

import numpy as np
import pytest

from cupyrec.sim import rounding


def fraction_fma(a, b, c):
    return [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            for x, y, z in zip(a, b, c, strict=True)]  # fmt: skip


def close_sums():
    """Products and sums that almost cancel, or end near the middle of two float32."""
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 2000)).astype(np.float32)
    c = (-a * b).astype(np.float32)
    c[::2] *= np.float32(2.0**-30)
    c[::5] *= np.float32(2.0**24)
    return a, b, c


def test_multiply_add_is_rounded_once():
    a, b, c = close_sums()
    got = rounding.multiply_add(a, b, c)
    for x, y in zip(got, fraction_fma(a, b, c), strict=True):
        error = abs(Fraction(float(x)) - y)
        for other in (np.nextafter(x, np.float32(-np.inf)), np.nextafter(x, np.float32(np.inf))):
            assert error <= abs(Fraction(float(other)) - y)
    double = rounding.multiply_add(*(v.astype(np.float64) for v in (a, a, -a * a)))
    assert double.tolist() == [
        float(Fraction(float(v)) ** 2 - Fraction(float(w)))
        for v, w in zip(a, a * a, strict=True)
    ]  # fmt: skip


def test_odd_sum_is_the_sum_or_odd():
    a, b, c = close_sums()
    got = rounding.odd_product_sum(a, b, c)
    inexact = 0
    for x, y in zip(got.tolist(), fraction_fma(a, b, c), strict=True):
        if Fraction(x) != y:
            inexact += 1
            assert np.float64(x).view(np.int64) & 1
            ulp = Fraction(float(np.spacing(abs(x))))
            assert abs(Fraction(x) - y) < ulp
    assert inexact > 100


@pytest.mark.parametrize("ftz", [False, True])
def test_fused_flushes(ftz):
    tiny = np.float32([1e-40, -1e-40, 2.0**-126])
    one, zero = np.float32(1), np.float32(0)
    got = rounding.fused(ftz)(tiny, one, zero)
    assert got.tolist() == ([0.0, -0.0, 2.0**-126] if ftz else tiny.tolist())
    got = rounding.fused(ftz)(np.float32([2.0**-100]), np.float32(2.0**-30), zero)
    assert got.tolist() == ([0.0] if ftz else [2.0**-130])


def test_flush():
    x = np.float32([1e-40, -1e-40, 0.0, -0.0, 2.0**-126, -np.inf, 1.0])
    with np.errstate(invalid="ignore"):
        got, nan = rounding.flush(x), rounding.flush(np.float32([np.nan]))
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0**-126, -np.inf, 1.0]
    assert np.signbit(got).tolist() == [False, True, False, True, False, True, False]
    assert np.isnan(nan).all()


def test_saturate():
    x = np.float32([-1, 0.5, 2, np.nan, np.inf, -np.inf])
    assert rounding.saturate(x).tolist() == [0, 0.5, 1, 0, 1, 0]


def test_directed_rounding_of_overflow():
    x = np.array([1e39, -1e39])
    largest = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        assert rounding.round_float32(x, "rn").tolist() == [np.inf, -np.inf]
        assert rounding.round_float32(x, "rz").tolist() == [largest, -largest]
        assert rounding.round_float32(x, "rm").tolist() == [largest, -np.inf]
        assert rounding.round_float32(x, "rp").tolist() == [np.inf, -largest]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_round_trip(kind):
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = rounding.from_half(bits, kind)
        again = rounding.to_half(values.astype(np.float64), kind)
        toward_zero = rounding.to_half(values.astype(np.float64), kind, "rz")
    nan = np.isnan(values)
    np.testing.assert_array_equal(again[~nan], bits[~nan])
    np.testing.assert_array_equal(toward_zero[~nan], bits[~nan])
    assert set(again[nan].tolist()) == {0x7FFF}


@pytest.mark.parametrize(("kind", "step"), [("f16", 2.0**-10), ("bf16", 2.0**-7)])
def test_halves_round_to_even_and_to_zero(kind, step):
    x = 1 + step * np.array([0.5, 0.5 + 1e-9, 1.5, 1.5 - 1e-9, 0.999])
    got = rounding.from_half(rounding.to_half(x, kind), kind)
    assert ((got - 1) / step).tolist() == [0, 1, 2, 1, 1]
    got = rounding.from_half(rounding.to_half(-x, kind, "rz"), kind)
    assert ((-got - 1) / step).tolist() == [0, 0, 1, 1, 0]
