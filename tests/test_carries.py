"""Chains of carries against Python's whole numbers, which have no end."""

import numpy as np
import pytest
from one_instruction import EDGES, NUMPY, execute, kernel, pairs, wrap

from cupyrec import sim

KINDS = ["u32", "s32", "u64", "s64"]


def chained(first, second, kind, columns, result="%w"):
    """The results of two instructions, the second of which takes what the first carries.

    In them %a, %b, %c are columns and %v and %w their results.
    """
    size = np.dtype(NUMPY[kind]).itemsize
    names = "abc"[: len(columns)]
    text = "".join(f"ld.global.{kind} %{n}, [%rd{i}];\n" for i, n in enumerate(names, 2))
    text += f"{first};\n{second};\nst.global.{kind} [%rd0], %v;\nst.global.{kind} [%rd1], {result};"
    registers = f".reg .b{8 * size} %a, %b, %c, %v, %w;"
    out = np.zeros((2, columns[0].size), NUMPY[kind])
    source = kernel(text, [size] * (2 + len(columns)), registers)
    assert sim.run(source, "f", 1, columns[0].size, (*out, *columns)).faults == []
    return out.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", ["add", "sub"])
def test_words_of_a_sum(root, kind):
    """(a, b) joined with (b, a), two words each."""
    a, b = pairs(EDGES[kind])
    bits, sign = int(kind[1:]), 1 if root == "add" else -1
    low, high = chained(f"{root}.cc.{kind} %v, %a, %b", f"{root}c.{kind} %w, %b, %a", kind, (a, b))
    for x, y, i, j in zip(a.tolist(), b.tolist(), low, high, strict=True):
        x, y = x % (1 << bits), y % (1 << bits)
        whole = (y << bits | x) + sign * (x << bits | y)
        assert (i, j) == (wrap(whole, kind), wrap(whole >> bits, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", ["add", "sub"])
@pytest.mark.parametrize("carried", [0, 1])
def test_carry_in_and_out(root, carried, kind):
    """What goes on after a sum that took a carry itself."""
    a, b = pairs(EDGES[kind])
    bits, sign = int(kind[1:]), 1 if root == "add" else -1
    first = f"{root}.cc.{kind} %v, {-carried if root == 'add' else 1 - carried}, 1"
    second = f"{root}c.cc.{kind} %v, %a, %b;\n{root}c.{kind} %w, 0, 0"
    value, out = chained(first, second, kind, (a, b))
    for x, y, i, j in zip(a.tolist(), b.tolist(), value, out, strict=True):
        whole = x % (1 << bits) + sign * (y % (1 << bits) + carried)
        assert (i, j) == (wrap(whole, kind), wrap(whole >> bits, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_a_product(kind):
    """a * b + (c, c), two words; the high half of a product of signed words is signed."""
    a, b = pairs(EDGES[kind])
    c = np.resize(EDGES[kind], a.size)
    first = f"mad.lo.cc.{kind} %v, %a, %b, %c"
    low, high = chained(first, f"madc.hi.{kind} %w, %a, %b, %c", kind, (a, b, c))
    bits = int(kind[1:])
    for x, y, z, i, j in zip(a.tolist(), b.tolist(), c.tolist(), low, high, strict=True):
        z %= 1 << bits
        whole = x * y + (z << bits | z)
        assert (i, j) == (wrap(whole, kind), wrap(whole >> bits, kind))


def test_a_difference_carries_where_it_does_not_borrow():
    text = "sub.cc.u32 {d}, {a}, {b}; addc.u32 {d}, 0, 0"
    assert execute(text, "u32", ("u32", [1, 2, 3]), ("u32", [2])).tolist() == [0, 1, 1]


def test_guards_and_words_that_do_not_fit():
    got = execute("@{c} add.cc.u32 {d}, {a}, {b}; addc.u32 {d}, 0, 0", "u32", ("u32", [2**32 - 1]),
                  ("u32", [1]), ("pred", [1, 0]))  # fmt: skip
    assert got.tolist() == [1, 0]
    with pytest.raises(sim.PtxError, match=r"'add\.cc\.u16"):
        execute("add.cc.u16", "u16", ("u16", [1]), ("u16", [1]))


SOURCE = r"""
typedef __int128 wide;
typedef unsigned __int128 uwide;
extern "C" __global__ void f(const wide* a, const wide* b, wide* sum, wide* product, uwide* share,
                             uwide* rest) {
    int i = threadIdx.x;
    sum[i] = a[i] - b[i] + 1;
    product[i] = a[i] * b[i];
    share[i] = (uwide)a[i] / (uwide)b[i];
    rest[i] = (uwide)a[i] % (uwide)b[i];
}
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_128_bit_numbers(arch):
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")
    values = [1, 3, 2**32 - 1, 2**64 - 1, 2**64, 2**127 - 1, 2**128 - 1, 2**128 - 2**63, 10**30]
    a, b = [x for x in values for _ in values], [y for _ in values for y in values]

    def held(numbers):
        raw = b"".join((n % 2**128).to_bytes(16, "little") for n in numbers)
        return np.frombuffer(raw, np.uint64).reshape(-1, 2).copy()

    out = [held([0] * len(a)) for _ in range(4)]
    result = sim.run(SOURCE, "f", 1, len(a), (held(a), held(b), *out), arch=arch,
                     options=("--device-int128",))  # fmt: skip
    assert result.faults == []
    truth = zip(*((x - y + 1, x * y, x // y, x % y) for x, y in zip(a, b, strict=True)),
                strict=True)  # fmt: skip
    for got, want in zip(out, truth, strict=True):
        np.testing.assert_array_equal(got, held(want))
