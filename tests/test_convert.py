"""cvt against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from one_instruction import EDGES, FLOATS, NUMPY, TABLES, TINY, check_same, execute, flushed, wrap

from cupyrec.sim import PtxError

WHOLE = ["s16", "u16", "s32", "u32", "s64", "u64"]
REAL = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.75, -2.75, 1e10, -1e10, 1e20, -1e20, 1e40,
                 2147483520.0, 4294967040.0, 9.2233714e18, np.inf, -np.inf, np.nan])  # fmt: skip
ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("source", WHOLE)
@pytest.mark.parametrize("to", ["u8", "s8", *WHOLE])
def test_between_whole_numbers(to, source):
    a = EDGES[source]
    kind = {"u8": "u16", "s8": "s16"}.get(to, to)
    got = execute(f"cvt.{to}.{source}", kind, (source, a))
    assert got.tolist() == [wrap(int(x), to) for x in a]
    info = np.iinfo(NUMPY[to])
    got = execute(f"cvt.sat.{to}.{source}", kind, (source, a))
    assert got.tolist() == [min(max(int(x), info.min), info.max) for x in a]


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("to", WHOLE)
def test_floats_to_whole_numbers(to, mode, source):
    with np.errstate(over="ignore"):
        a = REAL.astype(NUMPY[source])
    info = np.iinfo(NUMPY[to])

    def truth(x):
        if math.isnan(x):
            return wrap(1 << info.bits - 1, to) if source == "f64" or info.bits == 64 else 0
        if math.isinf(x):
            return info.max if x > 0 else info.min
        return min(max(ROUND[mode](Fraction(x)), info.min), info.max)

    got = execute(f"cvt.{mode}.{to}.{source}", to, (source, a))
    assert got.tolist() == [truth(float(x)) for x in a]


def nearest_or_directed(x, mode):
    """float32 of a Fraction."""
    y = np.float32(float(x))  # good to one ulp
    around = [np.nextafter(y, np.float32(-np.inf)), y, np.nextafter(y, np.float32(np.inf))]
    around = [v for v in around if np.isfinite(v)]
    below = [v for v in around if Fraction(float(v)) <= x]
    above = [v for v in around if Fraction(float(v)) >= x]
    if mode == "rn":
        distance = lambda v: (abs(Fraction(float(v)) - x), int(v.view(np.uint32)) & 1)  # noqa: E731
        return min(around, key=distance)
    down = mode == "rm" or (mode == "rz" and x > 0)
    return max(below) if down else min(above)


@pytest.mark.parametrize("source", WHOLE)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_whole_numbers_to_float32(mode, source):
    a = np.append(EDGES[source], np.array([2**15 - 1, 12345], NUMPY[source]))
    if a.itemsize == 8:
        a = np.append(a, np.array([2**53 + 1, 2**62 - 3, 2**40 + 1, 16777217], a.dtype))
    truth = [nearest_or_directed(Fraction(int(x)), mode) for x in a]
    assert execute(f"cvt.{mode}.f32.{source}", "f32", (source, a)).tolist() == truth


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_whole_numbers_to_float64(source):
    a = EDGES[source]
    got = execute(f"cvt.rn.f64.{source}", "f64", (source, a))
    assert got.tolist() == [float(int(x)) for x in a]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_float64_to_float32(mode):
    a = np.array(
        [0.1, -0.1, 1 / 3, 1e-40, 16777217.0, -16777219.0, 1 + 2**-24, 1 + 2**-24 + 2**-50]
    )
    truth = [nearest_or_directed(Fraction(float(x)), mode) for x in a]
    assert execute(f"cvt.{mode}.f32.f64", "f32", ("f64", a)).tolist() == truth


@pytest.mark.parametrize("mode", ROUND)
def test_floats_to_integral_floats(mode):
    x = np.append(FLOATS, np.float32([0.5, 1.5, -2.5, 2.5, 8388609.0]))
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    check_same(execute(f"cvt.{mode}.f32.f32", "f32", ("f32", x)), function(x))


def test_flush_and_saturate():
    check_same(execute("cvt.ftz.f32.f32", "f32", ("f32", FLOATS)), flushed(FLOATS))
    got = execute("cvt.ftz.f64.f32", "f64", ("f32", FLOATS))
    check_same(got, flushed(FLOATS).astype(np.float64))
    got = execute("cvt.rn.ftz.f32.f64", "f32", ("f64", [TINY / 2, -TINY / 2, TINY]))
    check_same(got, np.array([0.0, -0.0, TINY], np.float32))
    got = execute("cvt.sat.f32.f32", "f32", ("f32", FLOATS))
    check_same(got, np.clip(np.nan_to_num(FLOATS, nan=0.0), np.float32(0), np.float32(1)))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves(kind):
    values, bits = TABLES[kind]
    got = execute(f"cvt.f32.{kind}", "f32", (kind, bits[::97]))
    assert got.tolist() == values[::97].tolist()
    middle = (values[200:-200:301] + values[201:-199:301]) / 2
    middle = middle[np.abs(middle) > 2.0**-120]
    x = np.concatenate([middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf))])
    x = x.astype(np.float32)

    def truth(v):
        i = int(np.searchsorted(values, v))
        around = range(max(i - 2, 0), min(i + 2, len(values)))
        best = min(around, key=lambda j: (abs(Fraction(values[j]) - Fraction(float(v))),
                                          bits[j] & 1))  # fmt: skip
        return int(bits[best])

    want = [truth(v) for v in x]
    assert execute(f"cvt.rn.{kind}.f32", kind, ("f32", x)).tolist() == want
    pair = execute(f"cvt.rn.{kind}x2.f32", f"{kind}x2", ("f32", x), ("f32", x[::-1]))
    assert pair.tolist() == [h << 16 | low for h, low in zip(want, want[::-1], strict=True)]
    special = execute(f"cvt.rn.{kind}.f32", kind, ("f32", [np.inf, -np.inf, np.nan, 0.0, -0.0]))
    top = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    assert special.tolist() == [top, top | 0x8000, 0x7FFF, 0, 0x8000]


def test_tf32():
    x = np.array(
        [1.0, 1 + 2**-11, 1 + 2**-10, 1 + 2**-11 + 2**-20, -1 - 2**-11, np.inf], np.float32
    )
    got = execute("cvt.rna.tf32.f32", "b32", ("f32", x)).view(np.float32)
    up = 1 + 2**-10
    assert got.tolist() == [1.0, up, up, up, -up, np.inf]


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_whole_numbers_to_float64_directed(source, mode):
    a = np.append(EDGES[source], np.array([3, 2**31 - 5], NUMPY[source]))
    if a.itemsize == 8:
        a = np.append(a, np.array([2**53 + 1, 2**62 - 3, 2**62 + 1, 2**54 + 2**32 + 1], a.dtype))
    got = execute(f"cvt.{mode}.f64.{source}", "f64", (source, a))
    for x, y in zip(a.tolist(), got.tolist(), strict=True):
        down = mode == "rm" or (mode == "rz" and x > 0)
        assert Fraction(y) <= x if down else Fraction(y) >= x
        assert abs(Fraction(y) - x) < Fraction(float(np.spacing(abs(y)))) or x == 0


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_directed(kind, mode):
    values, bits = TABLES[kind]
    inside = values[300:-300:397]
    x = np.concatenate([inside, np.nextafter(inside, np.inf), [1e-45, -1e-45, 3e38, -3e38]])
    x = x.astype(np.float32)
    x = x[np.abs(x) <= values[-1]]
    got = execute(f"cvt.{mode}.{kind}.f32", kind, ("f32", x))
    for v, code in zip(x.tolist(), got.tolist(), strict=True):
        down = mode == "rm" or (mode == "rz" and v > 0)
        i = int(np.searchsorted(values, v, side="right" if down else "left")) - down
        assert code in ({0, 0x8000} if values[i] == 0 else {int(bits[i])})
    top = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    got = execute(f"cvt.{mode}.{kind}.f64", kind, ("f64", [1e300, -1e300, np.inf, np.nan]))
    up, down = top - (mode != "rp"), (top - (mode != "rm")) | 0x8000
    assert got.tolist() == [up, down, top, 0x7FFF]


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_to_integral_halves(kind, mode):
    values, bits = TABLES[kind]
    chosen = np.abs(values) < 3000
    values, bits = values[chosen][::53], bits[chosen][::53]
    got = execute(f"cvt.{mode}.{kind}.{kind}", kind, (kind, bits))
    back = execute(f"cvt.f32.{kind}", "f32", (kind, got)).tolist()
    nearest = dict(zip(*TABLES[kind], strict=True))  # larger ones may not be held exactly
    truth = [ROUND[mode](Fraction(v)) for v in values.tolist()]
    assert [b for b, t in zip(back, truth, strict=True) if t in nearest] == [
        t for t in truth if t in nearest
    ]


def test_relu():
    x = [-1.5, -0.0, 0.25, np.inf, -np.inf, np.nan]
    want = [0, 0, 0x3400, 0x7C00, 0, 0x7FFF]
    assert execute("cvt.rn.relu.f16.f32", "f16", ("f32", x)).tolist() == want
    got = execute("cvt.rn.relu.f16x2.f32", "f16x2", ("f32", x), ("f32", [1.0]))
    assert got.tolist() == [w << 16 | 0x3C00 for w in want]


def eight_bits(kind):
    """Finite values and codes of an 8-bit float, by its definition."""
    fraction, bias, codes = (3, 7, 0x7F) if kind == "e4m3x2" else (2, 15, 0x7C)
    table = []
    for code in range(codes):
        exponent, rest = divmod(code, 1 << fraction)
        whole = Fraction(rest, 1 << fraction) + (exponent > 0)
        table.append((whole * Fraction(2) ** (max(exponent, 1) - bias), code))
    return table + [(-v, c | 0x80) for v, c in table]


@pytest.mark.parametrize("kind", ["e4m3x2", "e5m2x2"])
def test_8_bit_floats(kind):
    table = eight_bits(kind)
    got = execute(f"cvt.rn.f16x2.{kind}", "f16x2", ("b16", [c << 8 | c ^ 0x80 for _, c in table]))
    for (v, _), pair in zip(table, got.tolist(), strict=True):
        both = np.array([pair], np.uint32).view(np.float16).tolist()
        assert both == [-float(v), float(v)]
    special = execute(f"cvt.rn.f16x2.{kind}", "f16x2", ("b16", [0x7F]))
    assert special.tolist() == [0x7FFF]

    largest = max(v for v, _ in table)
    generator = np.random.default_rng(0)
    middle = sorted(float(v) for v, _ in table)
    middle = (np.array(middle[1:]) + middle[:-1]) / 2
    x = np.concatenate(
        [middle, generator.standard_normal(200) * 2.0 ** generator.integers(-12, 9, 200)]
    )
    x = np.append(x, [1e30, -1e30, np.inf, 1e-30, -1e-30, -0.0]).astype(np.float32)

    def nearest(v):
        near = max(min(Fraction(v), largest), -largest) if np.isfinite(v) else largest
        sign = 0x80 * bool(np.signbit(np.float32(v)))
        same = [(t, c) for t, c in table if c & 0x80 == sign]
        return min(same, key=lambda p: (abs(p[0] - near), p[1] & 1))[1]

    want = [nearest(v) for v in x.tolist()]
    got = execute(f"cvt.rn.satfinite.{kind}.f32", "b16", ("f32", x), ("f32", [1.0]))
    one = nearest(1.0)
    assert got.tolist() == [w << 8 | one for w in want]
    halves = execute("cvt.rn.f16x2.f32", "f16x2", ("f32", [2.0, np.nan]), ("f32", [1.0]))
    got = execute(f"cvt.rn.satfinite.{kind}.f16x2", "b16", ("f16x2", halves))
    assert got.tolist() == [nearest(2.0) << 8 | one, 0x7F00 | one]


def test_unknown_rounding():
    with pytest.raises(PtxError, match=r"'cvt\.rna\.f64\.s64"):
        execute("cvt.rna.f64.s64", "f64", ("s64", [1]))
