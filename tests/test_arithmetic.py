"""Whole numbers against plain Python, floats against NumPy, 16-bit floats against fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from one_instruction import EDGES, FLOATS, TABLES, check_same, execute, flushed, pairs, wrap


def quotient(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - quotient(a, b) * b,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_whole_numbers(name, kind):
    a, b = pairs(EDGES[kind])
    if name in {"div", "rem"}:
        a, b = a[b != 0], b[b != 0]
    truth = [wrap(BINARY[name](int(x), int(y)), kind) for x, y in zip(a, b, strict=True)]
    assert execute(f"{name}.{kind}", kind, (kind, a), (kind, b)).tolist() == truth


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_multiply_high(kind):
    a, b = pairs(EDGES[kind])
    bits = int(kind[1:])
    truth = [wrap(int(x) * int(y) >> bits, kind) for x, y in zip(a, b, strict=True)]
    assert execute(f"mul.hi.{kind}", kind, (kind, a), (kind, b)).tolist() == truth


@pytest.mark.parametrize(("kind", "wide"), [("s16", "s32"), ("u16", "u32"), ("s32", "s64"),
                                            ("u32", "u64")])  # fmt: skip
def test_wide(kind, wide):
    a, b = pairs(EDGES[kind])
    c = np.resize(EDGES[wide], a.size)
    product = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert execute(f"mul.wide.{kind}", wide, (kind, a), (kind, b)).tolist() == product
    truth = [wrap(p + int(z), wide) for p, z in zip(product, c, strict=True)]
    assert execute(f"mad.wide.{kind}", wide, (kind, a), (kind, b), (wide, c)).tolist() == truth


def test_mad_lo():
    a, b = pairs(EDGES["s32"])
    c = np.resize(EDGES["s32"], a.size)
    truth = [wrap(int(x) * int(y) + int(z), "s32") for x, y, z in zip(a, b, c, strict=True)]
    assert execute("mad.lo.s32", "s32", ("s32", a), ("s32", b), ("s32", c)).tolist() == truth


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_neg_abs_not(kind):
    a = EDGES[kind]
    assert execute(f"neg.{kind}", kind, (kind, a)).tolist() == [wrap(-int(x), kind) for x in a]
    assert execute(f"abs.{kind}", kind, (kind, a)).tolist() == [wrap(abs(int(x)), kind) for x in a]
    bits = f"b{kind[1:]}"
    assert execute(f"not.{bits}", kind, (kind, a)).tolist() == [~int(x) for x in a]


# Floating point


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize(
    ("name", "truth"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)],
)
@np.errstate(all="ignore")
def test_float32(name, truth, ftz):
    a, b = pairs(FLOATS)
    inside = flushed if ftz else np.asarray
    got = execute(f"{name}{'.ftz' * ftz}.f32", "f32", ("f32", a), ("f32", b))
    check_same(got, inside(truth(inside(a), inside(b))))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn"])
@np.errstate(all="ignore")
def test_float64(name):
    a, b = pairs(FLOATS.astype(np.float64) * 1.1)
    truth = {"add": np.add, "sub": np.subtract, "mul": np.multiply}.get(name, np.divide)
    check_same(execute(f"{name}.f64", "f64", ("f64", a), ("f64", b)), truth(a, b))


@pytest.mark.parametrize(("name", "pick"), [("min", min), ("max", max)])
@pytest.mark.parametrize("propagate", [False, True])
def test_min_max(name, pick, propagate):
    a, b = pairs(FLOATS)

    def truth(x, y):
        if math.isnan(x) or math.isnan(y):
            return math.nan if propagate or (math.isnan(x) and math.isnan(y)) else (
                y if math.isnan(x) else x)  # fmt: skip
        return pick((x, math.copysign(1, x)), (y, math.copysign(1, y)))[0]

    got = execute(f"{name}{'.NaN' * propagate}.f32", "f32", ("f32", a), ("f32", b))
    check_same(
        got, np.array([truth(float(x), float(y)) for x, y in zip(a, b, strict=True)], np.float32)
    )


def test_sign_operations():
    for name, truth in [("neg", np.negative), ("abs", np.abs)]:
        check_same(execute(f"{name}.f32", "f32", ("f32", FLOATS)), truth(FLOATS))
        check_same(execute(f"{name}.ftz.f32", "f32", ("f32", FLOATS)), truth(flushed(FLOATS)))
    a, b = pairs(FLOATS[:-1])
    check_same(execute("copysign.f32", "f32", ("f32", a), ("f32", b)), np.copysign(b, a))


@pytest.mark.parametrize(
    ("name", "function", "ulps"),
    [
        ("rcp.rn", lambda x: 1 / x, 0.5), ("sqrt.rn", np.sqrt, 0.5),
        ("rcp.approx", lambda x: 1 / x, 1),
        ("sqrt.approx", np.sqrt, 1), ("rsqrt.approx", lambda x: 1 / np.sqrt(x), 2),
        ("ex2.approx", np.exp2, 2), ("lg2.approx", np.log2, 2), ("sin.approx", np.sin, 2),
        ("cos.approx", np.cos, 2), ("tanh.approx", np.tanh, 2),
    ],
)  # fmt: skip
@np.errstate(all="ignore")
def test_functions(name, function, ulps):
    x = np.concatenate([FLOATS, np.linspace(-3, 3, 50, dtype=np.float32)])
    got, truth = execute(f"{name}.f32", "f32", ("f32", x)), function(x.astype(np.float64))
    single = truth.astype(np.float32)
    special = ~np.isfinite(single) | (single == 0)
    check_same(got[special], single[special])
    error = np.abs(got[~special] - truth[~special]) / np.spacing(np.abs(single[~special]))
    assert error.max() <= ulps


@pytest.mark.parametrize(
    "name", ["add", "mul.ftz", "fma.rn", "min", "min.NaN", "sqrt.rn", "lg2.approx"]
)
def test_there_is_one_nan(name):
    nan = np.array([0x7F800001, 0xFFC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    count = {"fma.rn": 3, "sqrt.rn": 1, "lg2.approx": 1}.get(name, 2)
    got = execute(f"{name}.f32", "f32", *[("f32", nan)] * count)
    assert got.view(np.uint32).tolist() == [0x7FFFFFFF] * 3
    if count == 1:
        got = execute(f"{name}.f32", "f32", ("f32", [-1.0]))
        assert got.view(np.uint32).tolist() == [0x7FFFFFFF]


@np.errstate(all="ignore")
def test_saturation():
    got = execute("add.sat.f32", "f32", ("f32", FLOATS), ("f32", [0.25]))
    truth = np.nan_to_num(FLOATS + np.float32(0.25), nan=0.0, posinf=2, neginf=-1)
    check_same(got, np.clip(truth, np.float32(0), np.float32(1)))


HALVES = np.array(
    [0, 0x8000, 0x3C00, 0x3F80, 0xBC00, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00,
     0x3555, 0x4248, 0x7F7F, 0xFF80, 0x7FC0, 0x0080], np.uint16,
)  # fmt: skip


def half_truth(name, kind, *operands):
    """Each operation in exact fractions of Python, rounded by NumPy's or our plain way."""

    def value(bits):
        if kind == "f16":
            return float(np.uint16(bits).view(np.float16))
        return float(np.uint32(int(bits) << 16).view(np.float32))

    def rounded(x):
        """Nearest of all 65,536 values, ties to even bits."""
        if x != x:
            return None
        table = TABLES[kind]
        i = int(np.searchsorted(table[0], float(x)))
        around = range(max(i - 2, 0), min(i + 2, len(table[0])))
        best = min(around, key=lambda j: (abs(Fraction(table[0][j]) - x), table[1][j] & 1))
        return int(table[1][best])

    results = []
    for bits in zip(*operands, strict=True):
        values = [value(b) for b in bits]
        with np.errstate(all="ignore"):
            rough = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b,
                     "fma": lambda a, b, c: a * b + c}[name](*map(np.float64, values))  # fmt: skip
        if not math.isfinite(rough) or rough == 0:
            results.append(None)
            continue
        exact = [Fraction(v) for v in values]
        x = exact[0] + exact[1] if name == "add" else exact[0] * exact[1]
        results.append(rounded(x + exact[2] if name == "fma" else x))
    return results


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_halves_are_rounded_once(name, kind):
    generator = np.random.default_rng(1)
    random = generator.integers(0x2000, 0x4400, (3, 200)).astype(np.uint16)
    a, b, c = (np.concatenate([np.resize(np.roll(HALVES, 5 * i), 90), r])
               for i, r in enumerate(random))  # fmt: skip
    operands = [a, b, c][: 3 if name == "fma" else 2]
    full = f"{name}{'.rn' * (name == 'fma')}.{kind}"
    got = execute(full, kind, *((kind, x) for x in operands))
    largest = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    for bits, truth in zip(got.tolist(), half_truth(name, kind, *operands), strict=True):
        assert truth is None or bits == truth or bits & 0x7FFF == largest
    packed = [x.astype(np.uint32) << 16 | x for x in operands]
    two = execute(f"{full}x2", f"{kind}x2", *((f"{kind}x2", x) for x in packed))
    np.testing.assert_array_equal(two, got.astype(np.uint32) << 16 | got)
