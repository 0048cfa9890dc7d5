import numpy as np
import oracle
import pytest

from cupyrec import errors


def test_axes_returns_lengths_in_order_of_first_appearance():
    x, y = np.zeros((2, 3)), np.zeros((3, 4))
    assert errors.axes("f", x=(x, "B D"), y=(y, "D E")) == (2, 3, 4)
    assert errors.axes("f", x=(x, "B 3")) == (2,)
    assert errors.axes("f", x=(np.zeros((0, 0)), "B D")) == (0, 0)
    assert errors.axes("f", x=(np.zeros(()), "")) == ()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": ((2, 3), "B")}, "f: 'x' must have axes (B), got shape (2, 3)."),
        ({"x": ((2,), "B 1")}, "f: 'x' must have axes (B, 1), got shape (2,)."),
        ({"x": ((2, 3), "B 1")}, "f: 'x' must have axes (B, 1), got shape (2, 3)."),
        ({"x": ((2, 3), "B 0")}, "f: 'x' must have axes (B, 0), got shape (2, 3)."),
        ({"x": ((2, 3), "D D")}, "f: 'x' must have D = 2 like 'x', got shape (2, 3)."),
        (
            {"x": ((2, 3), "B D"), "y": ((2, 4), "B D")},
            "f: 'y' must have D = 3 like 'x', got shape (2, 4).",
        ),
    ],
)
def test_axes_says_which_rule(arrays, text):
    named = {name: (np.zeros(shape), spec) for name, (shape, spec) in arrays.items()}
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        errors.axes("f", **named)


def test_dtype():
    assert errors.dtype("f", "x", np.zeros(2, np.float32), np.float64, np.float32) is None
    text = "f: 'x' must be float32 or float64, got int64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        errors.dtype("f", "x", np.zeros(2, np.int64), np.float32, np.float64)
    with pytest.raises(TypeError, match=oracle.sentence("f: 'x' must be int64, got >i8.")):
        errors.dtype("f", "x", np.zeros(2, ">i8"), np.int64)  # the loops read native bytes
    with pytest.raises(TypeError, match=r"f: 'x' must be an array, got list\."):
        errors.dtype("f", "x", [1.0], np.float32)


@pytest.mark.parametrize("value", [1, 7, np.int32(7), np.uint8(7), 2**40])
def test_positive_takes_integers(value):
    result = errors.positive("f", "n", value)
    assert (type(result), result) == (int, value)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, "f: 'n' must be at least 1, got 0."),
        (np.int64(-3), ValueError, "f: 'n' must be at least 1, got -3."),
        (True, TypeError, "f: 'n' must be an integer, got True."),
        (2.0, TypeError, "f: 'n' must be an integer, got 2.0."),
        ("2", TypeError, "f: 'n' must be an integer, got '2'."),
        (None, TypeError, "f: 'n' must be an integer, got None."),
    ],
)
def test_positive_refuses(value, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        errors.positive("f", "n", value)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, np.float32(0.25), 1 - 2**-53])
def test_rate_takes_numbers_below_1(value):
    result = errors.rate("f", "p", value)
    assert (type(result), result) == (float, value)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1, ValueError, "f: 'p' must lie in [0, 1), got 1."),
        (-0.1, ValueError, "f: 'p' must lie in [0, 1), got -0.1."),
        (float("nan"), ValueError, "f: 'p' must lie in [0, 1), got nan."),
        (False, TypeError, "f: 'p' must be a number, got False."),
        ("0.5", TypeError, "f: 'p' must be a number, got '0.5'."),
        (None, TypeError, "f: 'p' must be a number, got None."),
    ],
)
def test_rate_refuses(value, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        errors.rate("f", "p", value)


@pytest.mark.parametrize("value", [0, 0.0, np.float32(0.25), 3, 1e300])
def test_at_least_0_takes_finite_numbers(value):
    result = errors.at_least_0("f", "eps", value)
    assert (type(result), result) == (float, value)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-1e-9, ValueError, "f: 'eps' must be finite and at least 0, got -1e-09."),
        (float("inf"), ValueError, "f: 'eps' must be finite and at least 0, got inf."),
        (float("nan"), ValueError, "f: 'eps' must be finite and at least 0, got nan."),
        (True, TypeError, "f: 'eps' must be a number, got True."),
        ("1", TypeError, "f: 'eps' must be a number, got '1'."),
    ],
)
def test_at_least_0_refuses(value, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        errors.at_least_0("f", "eps", value)


def test_vectors():
    x = np.zeros(3, np.float32)
    assert errors.vectors("f", w=x, g=x) is None
    for other, error, text in [
        (np.zeros(3), TypeError, "f: 'g' must be float32, got float64."),
        (np.zeros(2, np.float32), ValueError, "f: 'g' must have N = 3 like 'w', got shape (2,)."),
        (x[:, None], ValueError, "f: 'g' must have axes (N), got shape (3, 1)."),
    ]:
        with pytest.raises(error, match=oracle.sentence(text)):
            errors.vectors("f", w=x, g=other)


def test_all_arrays_must_have_the_dtype_of_the_first():
    x, wide = np.zeros(3, np.float32), np.zeros(3)
    errors.same_dtype("f", np.float32, np.float64, x=wide, y=wide)
    with pytest.raises(TypeError, match=oracle.sentence("f: 'y' must be float32, got float64.")):
        errors.same_dtype("f", np.float32, np.float64, x=x, y=wide)
    with pytest.raises(TypeError, match=oracle.sentence("f: 'x' must be float32, got float64.")):
        errors.same_dtype("f", np.float32, x=wide, y=wide)
