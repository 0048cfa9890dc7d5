"""Comparisons and choices; what is not known."""

import numpy as np
import pytest
from one_instruction import EDGES, FLOATS, execute, pairs

from cupyrec.sim import PtxError


@pytest.mark.parametrize("name", "eq ne lt le gt ge equ neu ltu leu gtu geu num nan".split())
@np.errstate(all="ignore")
def test_compare_floats(name):
    a, b = pairs(FLOATS)
    nan = np.isnan(a) | np.isnan(b)
    base = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    truth = {"num": ~nan, "nan": nan}.get(name)
    if truth is None:
        truth = base[name[:2]] | nan if name.endswith("u") else base[name] & ~nan
    got = execute(f"setp.{name}.f32", "pred", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(got, truth)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_compare_whole_numbers(name, kind):
    a, b = pairs(EDGES[kind])
    truth = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name]
    np.testing.assert_array_equal(
        execute(f"setp.{name}.{kind}", "pred", (kind, a), (kind, b)), truth
    )


def test_compare_joined():
    a = [1, 1, 2, 2]
    got = execute("setp.eq.and.s32", "pred", ("s32", a), ("s32", [1]), ("pred", [0, 1, 0, 1]))
    assert got.tolist() == [False, True, False, False]
    got = execute("setp.eq.or.s32 _|{d}, {a}, {b}, {c}", "pred", ("s32", a), ("s32", [1]),
                  ("pred", [0, 1, 0, 1]))  # fmt: skip
    assert got.tolist() == [False, True, True, True]


def test_choices():
    got = execute("selp.b32", "b32", ("b32", [1, 2]), ("b32", [3, 4]), ("pred", [0, 1]))
    assert got.tolist() == [3, 2]
    got = execute("slct.b32.s32", "b32", ("b32", [1, 2]), ("b32", [3, 4]), ("s32", [-1, 0]))
    assert got.tolist() == [3, 2]
    got = execute("set.lt.u32.s32", "u32", ("s32", [1, 2]), ("s32", [2]))
    assert got.tolist() == [2**32 - 1, 0]


def test_unknown_is_quoted_with_its_line():
    with pytest.raises(PtxError, match=r"got 'add\.sat\.f64 %v0, %v1, %v2' \(PTX line \d+, :0\)"):
        execute("add.sat.f64", "f64", ("f64", [1.0]), ("f64", [1.0]))
    with pytest.raises(PtxError, match=r"'frobnicate\.b32 %v0, %v1'"):
        execute("frobnicate.b32", "b32", ("b32", [1]))
