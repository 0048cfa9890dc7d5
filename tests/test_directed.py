"""Floats rounded up, down and to zero, against fractions of whole numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from one_instruction import check_same, execute, flushed, pairs

MODES = ["rz", "rm", "rp"]
DOUBLES = np.array(
    [0.0, -0.0, 1.0, -1.0, 3.0, 0.1, -7.25, 2**53 + 2.0, 1e300, -1e300, 1.7976931348623157e308,
     2.2250738585072014e-308, -2.3e-308, 5e-324, -1e-320, 1e-200, -3e-162, 1e-290, np.inf, -np.inf,
     np.nan],
)  # fmt: skip
SINGLES = np.array(
    [0.0, -0.0, 1.0, -1.0, 3.0, 0.1, -7.25, 16777218.0, 3e38, -3.4028235e38, 1.1754944e-38, 1e-45,
     -1e-40, 1e-30, -3e-20, np.inf, -np.inf, np.nan], np.float32,
)  # fmt: skip


def rounded(compare, near, mode):
    """The float by `near`, whose exact value is bigger than x where compare(x) < 0."""
    infinity = near.dtype.type(np.inf)
    x = near
    for _ in range(3):  # to the largest that is not above
        if compare(x) < 0:
            x = np.nextafter(x, -infinity)
    below = x
    above = x if compare(x) == 0 else np.nextafter(x, infinity)
    toward_zero = above if np.signbit(near) else below
    return {"rm": below, "rp": above, "rz": toward_zero}[mode]


def comparison(name, values):
    """x -> the sign of the exact result less x."""
    a, *more = [Fraction(float(v)) for v in values]

    def compare(x):
        if math.isinf(x):
            return -1 if x > 0 else 1
        x = Fraction(float(x))
        if name == "sqrt":
            return (a > x * x) - (a < x * x) if x >= 0 else 1
        exact = {
            "add": lambda: a + more[0],
            "sub": lambda: a - more[0],
            "mul": lambda: a * more[0],
            "fma": lambda: a * more[0] + more[1],
            "div": lambda: a / more[0],
            "rcp": lambda: 1 / a,
        }[name]()
        return (exact > x) - (exact < x)

    return compare


PLAIN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def truth(name, values, mode):
    with np.errstate(all="ignore"):
        near = PLAIN[name](*values)
        divides = name in {"div", "rcp"} and values[-1] == 0
        if not all(map(np.isfinite, values)) or divides or np.isnan(near):
            return near
        if name == "fma":  # within some ulp of it, and its own sign
            exact = Fraction(float(values[0])) * Fraction(float(values[1]))
            exact += Fraction(float(values[2]))
            if exact:
                try:
                    near = type(near)(float(exact))
                except OverflowError:
                    near = type(near)(math.inf if exact > 0 else -math.inf)
                near = near if near else type(near)(0.0 if exact > 0 else -0.0)
        compare = comparison(name, values)
        if compare(near) == 0 and near == 0 and name in {"add", "sub", "fma"} and mode == "rm":
            p = values[0] * values[1] if name == "fma" else values[0]
            last = -values[-1] if name == "sub" else values[-1]
            return near if np.signbit(p) == np.signbit(last) else -abs(near)
        result = rounded(compare, near, mode)
        return result if result else np.copysign(result, near)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_rounding(kind, name, mode):
    edges = SINGLES if kind == "f32" else DOUBLES
    generator = np.random.default_rng(3)
    random = generator.standard_normal((3, 200)).astype(edges.dtype)
    random[2, ::2] = -random[0, ::2] * random[1, ::2]
    a, b = pairs(edges)
    c = np.resize(np.roll(edges, 3), a.size)
    count = {"fma": 3, "sqrt": 1, "rcp": 1}.get(name, 2)
    columns = [np.append(x, y) for x, y in zip((a, b, c), random, strict=True)][:count]
    got = execute(f"{name}.{mode}.{kind}", kind, *((kind, x) for x in columns))
    want = [truth(name, row, mode) for row in zip(*columns, strict=True)]
    check_same(got, np.array(want, edges.dtype))


@pytest.mark.parametrize("mode", MODES)
def test_flushing(mode):
    a, b = pairs(SINGLES)
    for name in ["add", "div"]:
        plain = execute(f"{name}.{mode}.f32", "f32", ("f32", flushed(a)), ("f32", flushed(b)))
        got = execute(f"{name}.{mode}.ftz.f32", "f32", ("f32", a), ("f32", b))
        check_same(got, flushed(plain))


def test_exact_where_parts_underflow():
    """Products and remainders whose lower half no float64 holds."""
    a = np.array([1 + 2.0**-52, 3e-160, 1e-154, 7e-309])
    b = np.array([2.0**-1022, 7e-160, 1e-154, 3.0])
    for mode in MODES:
        for name in ["mul", "div"]:
            got = execute(f"{name}.{mode}.f64", "f64", ("f64", a), ("f64", b))
            want = [truth(name, row, mode) for row in zip(a, b, strict=True)]
            check_same(got, np.array(want))
