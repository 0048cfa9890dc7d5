"""Reading single numbers; `test_tsv.py` reads lines."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupyrec.data import fields


def number(text: str) -> float:
    line = np.frombuffer(text.encode() + b"\n", np.uint8)
    end, value = fields._number(line.ctypes.data)
    assert end == line.ctypes.data + len(text)
    return value


def check_number(text: str) -> None:
    """Python's own number: exactly where the documentation says so, else within 4 units."""
    got, expected = number(text), float(text)
    digits, _, power = text.lower().lstrip("+-").partition("e")
    whole, _, decimals = digits.partition(".")
    power = int(power or 0) - len(decimals)
    assert math.copysign(1, got) == math.copysign(1, expected)
    if int(whole + decimals or 0) < 2**53 and abs(power) <= 22:
        assert got == expected
    elif 1e-290 < abs(expected) < 1e290:
        assert abs(got - expected) <= 4 * math.ulp(expected)
    else:
        with np.errstate(over="ignore"):
            assert np.float32(got) == np.float32(expected)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_every_float32_comes_back(x):
    check_number(repr(x))
    assert np.float32(number(repr(x))) == np.float32(x)


@given(st.integers(0, 10**18 - 1), st.integers(-320, 290))
@example(9007199254740993, 0)  # halfway between two floats
@example(9007199254740991, 22)
@example(1, 23)
@example(0, 290)
def test_numbers_with_an_exponent(digits, power):
    for text in (f"{digits}e{power}", f"-{digits}E{power:+d}"):
        check_number(text)


@pytest.mark.parametrize("text", [
    "0", "-0", "+0", "5", "5.", ".5", "-.5", "+5.25", "1e5", "1E+5", "1.5e-5", "00012.5000",
    "0.000000000000000000000000000000000000012345", "1" + "0" * 40, "0" * 40 + "7", "1e0000000001",
    "1e-99999999999999999999", "0e99999999999999999999", "123456789012345678",
    "0." + "0" * 400 + "1", "1" + "0" * 400 + "e-400",
])  # fmt: skip
def test_spellings(text):
    check_number(text)


def test_too_large_is_infinite():
    assert number("1e309") == number("1e99999999999999999999") == math.inf
    assert number("-2e308") == -math.inf


def test_digits_after_the_nineteenth_do_not_count():
    assert number("1234567890123456789" + "999") == 1234567890123456789000.0
    assert number("0.12345678901234567899") == number("0.1234567890123456789")


@pytest.mark.parametrize("text", ["", "+", "-", ".", "-.", "e5", ".e5", "1e", "1e+", "x", "nan"])
def test_no_number(text):
    line = np.frombuffer(text.encode() + b"\n", np.uint8)
    assert math.isnan(fields._number(line.ctypes.data)[1])


@pytest.mark.parametrize(
    "size", [0.0, 1e-300, 0.5, 1.0, 7.0, 4094.5, 4095.0, 4096.0, 1e300, math.inf]
)
def test_logarithms_are_those_of_math(size):
    assert fields.log1p(size) == math.log1p(size)


def test_logarithm_of_no_number():
    assert math.isnan(fields.log1p(math.nan))
