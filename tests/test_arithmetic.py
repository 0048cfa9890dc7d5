"""Whole numbers against plain Python, floats against NumPy, 16-bit floats against fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from one_instruction import EDGES, FLOATS, NUMPY, TABLES, check_same, execute, flushed, pairs, wrap


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


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@np.errstate(all="ignore")
def test_halves_clamped(name, kind):
    a, b = pairs(HALVES)
    top = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    nan = [(x & 0x7FFF) > top or (y & 0x7FFF) > top for x, y in zip(a, b, strict=True)]
    plain = execute(f"{name}.{kind}", kind, (kind, a), (kind, b)).tolist()
    got = execute(f"{name}.NaN.{kind}", kind, (kind, a), (kind, b)).tolist()
    assert got == [0x7FFF if n else p for n, p in zip(nan, plain, strict=True)]
    got = execute(f"{name}.relu.{kind}", kind, (kind, a), (kind, b)).tolist()
    assert got == [0 if p >> 15 else p for p in plain]
    got = execute(f"{name}.NaN.xorsign.abs.{kind}x2", f"{kind}x2", (f"{kind}x2", a),
                  (f"{kind}x2", b)).tolist()  # fmt: skip
    sizes = execute(f"{name}.{kind}", kind, (kind, a & 0x7FFF), (kind, b & 0x7FFF)).tolist()
    signs = (a ^ b) & 0x8000
    assert got == [
        0x7FFF if n else s | int(sign) for n, s, sign in zip(nan, sizes, signs, strict=True)
    ]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_saturated_and_positive(kind):
    a, b = pairs(HALVES)
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    top = {"f16": 0x7C00, "bf16": 0x7F80}[kind]

    def saturated(x):
        return 0 if x & 0x7FFF > top or x >> 15 else min(x, one)

    def unsigned_zeros(bits):
        return [x if x != 0x8000 else 0 for x in bits.tolist()]

    for name in ["add", "sub", "mul"]:
        plain = execute(f"{name}.{kind}", kind, (kind, a), (kind, b)).tolist()
        got = execute(f"{name}.sat.{kind}", kind, (kind, a), (kind, b))
        assert unsigned_zeros(got) == [saturated(x) for x in plain]
    operands = (kind, a), (kind, b), (kind, [one])
    plain = execute(f"fma.rn.{kind}", kind, *operands).tolist()
    got = execute(f"fma.rn.sat.{kind}", kind, *operands)
    assert unsigned_zeros(got) == [saturated(x) for x in plain]
    got = execute(f"fma.rn.relu.{kind}", kind, *operands).tolist()
    assert got == [0 if x >> 15 else x for x in plain]


@np.errstate(all="ignore")
def test_sign_by_xor():
    a, b = pairs(FLOATS)
    got = execute("min.xorsign.abs.f32", "f32", ("f32", a), ("f32", b))
    truth = np.copysign(np.fmin(np.abs(a), np.abs(b)), np.copysign(1, a) * np.copysign(1, b))
    check_same(got, truth.astype(np.float32))


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
@pytest.mark.parametrize("ftz", [False, True])
def test_two_floats(name, ftz):
    a, b = pairs(FLOATS)
    flag = (".rn" if name == "fma" else "") + ".ftz" * ftz
    operands = [a, b, a[::-1]][: 3 if name == "fma" else 2]
    one = [execute(f"{name}{flag}.f32", "f32", *(("f32", x) for x in r))
           for r in (operands, [x[::-1] for x in operands])]  # fmt: skip
    both = [np.stack([x, x[::-1]], axis=1).ravel().view(np.uint64) for x in operands]
    got = execute(f"{name}{flag}.f32x2", "b64", *(("b64", x) for x in both))
    want = np.stack(one, axis=1).astype(np.float32).ravel()
    check_same(got.view(np.float32), want)


@pytest.mark.parametrize("name", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["s16", "u16"])
def test_packed_whole_numbers(name, kind):
    a, b = pairs(EDGES[kind])
    both = [np.stack([x, x[::-1]], axis=1).copy().view(np.uint32)[:, 0] for x in (a, b)]
    got = execute(f"{name}.{kind}x2", "b32", *(("b32", x) for x in both))
    truth = [wrap(BINARY[name](int(x), int(y)), kind) for x, y in zip(a, b, strict=True)]
    assert got.view(NUMPY[kind]).reshape(-1, 2).tolist() == [
        [x, y] for x, y in zip(truth, truth[::-1], strict=True)
    ]
    if kind == "s16" and name != "add":
        got = execute(f"{name}.relu.s16x2", "b32", *(("b32", x) for x in both))
        assert got.view(np.int16)[::2].tolist() == [max(x, 0) for x in truth]


def test_relu_of_whole_numbers():
    a, b = pairs(EDGES["s32"])
    got = execute("min.s32.relu", "s32", ("s32", a), ("s32", b))
    assert got.tolist() == [max(min(x, y), 0) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_24_bits(kind):
    a, b = pairs(EDGES[kind])
    c = np.resize(EDGES[kind], a.size)

    def short(x):
        x = int(x) % 2**24
        return x - 2**24 if kind == "s32" and x >> 23 else x

    products = [short(x) * short(y) for x, y in zip(a, b, strict=True)]
    got = execute(f"mul24.lo.{kind}", kind, (kind, a), (kind, b))
    assert got.tolist() == [wrap(p, kind) for p in products]
    got = execute(f"mad24.hi.{kind}", kind, (kind, a), (kind, b), (kind, c))
    truth = [wrap((p >> 16) + int(z), kind) for p, z in zip(products, c, strict=True)]
    assert got.tolist() == truth
