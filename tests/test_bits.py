"""Shifts, fields and counts of bits against plain Python, or the PTX ISA's own pseudocode."""

import numpy as np
import pytest
from one_instruction import EDGES, NUMPY, execute, pairs, wrap


@pytest.mark.parametrize(("kind", "name"), [("b32", "shl"), ("b64", "shl"), ("u32", "shr"),
                                            ("s32", "shr"), ("s64", "shr"),
                                            ("u64", "shr")])  # fmt: skip
def test_shifts_clamp(kind, name):
    typed = kind.replace("b", "u")
    a, n = pairs(EDGES[typed], np.array([0, 1, 5, 31, 32, 33, 63, 64, 2**32 - 1], np.uint32))
    shift = (lambda x, s: x << min(s, 64)) if name == "shl" else (lambda x, s: x >> min(s, 64))
    truth = [wrap(shift(int(x), int(s)), typed) for x, s in zip(a, n, strict=True)]
    assert execute(f"{name}.{kind}", typed, (typed, a), ("u32", n)).tolist() == truth


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("way", ["l", "r"])
def test_funnel_shift(way, clamp):
    a, n = pairs(EDGES["u32"], np.arange(40, dtype=np.uint32))
    b = np.roll(a, 7)
    both = [int(y) << 32 | int(x) for x, y in zip(a, b, strict=True)]
    count = [min(int(s), 32) if clamp else int(s) % 32 for s in n]
    truth = [
        (v << s >> 32 if way == "l" else v >> s) % 2**32 for v, s in zip(both, count, strict=True)
    ]
    mode = "clamp" if clamp else "wrap"
    got = execute(f"shf.{way}.{mode}.b32", "b32", ("b32", a), ("b32", b), ("u32", n))
    assert got.tolist() == truth


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counts_of_bits(kind):
    typed, bits = kind.replace("b", "u"), int(kind[1:])
    a = np.append(EDGES[typed], np.array([6, 1 << bits - 2], NUMPY[typed]))
    text = [format(int(x), f"0{bits}b") for x in a]
    assert execute(f"popc.{kind}", "u32", (kind, a)).tolist() == [t.count("1") for t in text]
    leading = [bits - int(x).bit_length() for x in a]
    assert execute(f"clz.{kind}", "u32", (kind, a)).tolist() == leading
    assert execute(f"brev.{kind}", kind, (kind, a)).tolist() == [int(t[::-1], 2) for t in text]
    found = [(int(x).bit_length() - 1) % 2**32 for x in a]
    assert execute(f"bfind.{typed}", "u32", (typed, a)).tolist() == found
    shift = [n if n < bits else 2**32 - 1 for n in leading]
    assert execute(f"bfind.shiftamt.{typed}", "u32", (typed, a)).tolist() == shift


def extracted(a, start, length, kind):
    """The PTX ISA's own pseudocode of bfe."""
    msb = int(kind[1:]) - 1
    unsigned = int(a) % (1 << msb + 1)
    if kind[0] == "u" or length == 0:
        sign = 0
    else:
        sign = unsigned >> min(start + length - 1, msb) & 1
    value = 0
    for i in range(msb + 1):
        value |= (unsigned >> start + i & 1 if i < length and start + i <= msb else sign) << i
    return wrap(value, kind)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    start, length = pairs(np.array([0, 1, 8, 31, 32, 40, 63, 64], np.uint32))
    for value in EDGES[kind]:
        truth = [extracted(value, int(s), int(n), kind) for s, n in zip(start, length, strict=True)]
        got = execute(f"bfe.{kind}", kind, (kind, [value]), ("u32", start), ("u32", length))
        assert got.tolist() == truth


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits):
    start, length = pairs(np.array([0, 1, 8, 31, 32, 40, 63, 64], np.uint32))
    a, b = 0x123456789ABCDEF1 % 2**bits, 0xF0F0F0F0F0F0F0F0 % 2**bits
    truth = []
    for s, n in zip(start.tolist(), length.tolist(), strict=True):
        value = b
        for i in range(n):
            if s + i < bits:
                value = value & ~(1 << s + i) | (a >> i & 1) << s + i
        truth.append(value)
    kind = f"b{bits}"
    got = execute(f"bfi.{kind}", kind, (kind, [a]), (kind, [b]), ("u32", start), ("u32", length))
    assert got.tolist() == truth


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0x1B, 0xFF, 0x40])
def test_lop3(table):
    a, b, c = (np.array([v], np.uint32) for v in (0xF0F0FF00, 0xCCCC1234, 0xAAAA9999))
    truth = 0
    for i in range(32):
        row = (int(a[0]) >> i & 1) << 2 | (int(b[0]) >> i & 1) << 1 | int(c[0]) >> i & 1
        truth |= (table >> row & 1) << i
    got = execute(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table}", "b32", ("b32", a), ("b32", b),
                  ("b32", c))  # fmt: skip
    assert got.tolist() == [truth]


def test_permute_bytes():
    choice = np.array([0x3210, 0x7654, 0x0246, 0xFEDC, 0x8000, 0x4444], np.uint32)
    a, b = 0x83828180, 0x07060504
    table = (b << 32 | a).to_bytes(8, "little")
    truth = []
    for c in choice.tolist():
        value = 0
        for i in range(4):
            nibble = c >> 4 * i & 15
            byte = table[nibble & 7]
            value |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
        truth.append(value)
    got = execute("prmt.b32", "b32", ("b32", [a]), ("b32", [b]), ("b32", choice))
    assert got.tolist() == truth


@pytest.mark.parametrize(("first", "second"), [("s32", "s32"), ("u32", "u32"), ("s32", "u32")])
def test_dot_of_four(first, second):
    a, b = pairs(EDGES["u32"])
    c = np.resize(EDGES["s32"], a.size)
    x = a.view(np.int8 if first == "s32" else np.uint8).reshape(-1, 4).astype(object)
    y = b.view(np.int8 if second == "s32" else np.uint8).reshape(-1, 4).astype(object)
    kind = "u32" if first == second == "u32" else "s32"
    truth = [wrap(int(s) + int(z), kind) for s, z in zip((x * y).sum(axis=1), c, strict=True)]
    got = execute(f"dp4a.{first}.{second}", kind, ("b32", a), ("b32", b), (kind, c))
    assert got.tolist() == truth


@pytest.mark.parametrize(("name", "truth"), [("and", 0b1000), ("or", 0b1110), ("xor", 0b0110)])
def test_logic(name, truth):
    got = execute(f"{name}.b32", "b32", ("b32", [0b1100]), ("b32", [0b1010]))
    assert got.tolist() == [truth]
    p, q = pairs([0, 1])
    got = execute(f"{name}.pred", "pred", ("pred", p), ("pred", q))
    assert got.tolist() == [bool(truth >> (2 * a + b) & 1) for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_mask(mode):
    start, length = pairs(np.array([0, 1, 8, 31, 32, 40], np.uint32))
    truth = []
    for s, n in zip(start.tolist(), length.tolist(), strict=True):
        s, n = (s % 32, n % 32) if mode == "wrap" else (s, n)
        truth.append(((1 << n) - 1 << s) % 2**32 if s < 32 else 0)
    got = execute(f"bmsk.{mode}.b32", "b32", ("u32", start), ("u32", length))
    assert got.tolist() == truth


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("second", ["s32", "u32"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_dot_of_pairs(first, second, part):
    a, b = pairs(np.array([0, 0x80007FFF, 0xFFFF0001, 0x12345678, 0xFF80817F], np.uint32))
    c = np.resize(np.array([0, 5, 2**31 - 1], np.int64), a.size)
    kind = "s32" if "s32" in (first, second) else "u32"
    got = execute(f"dp2a.{part}.{first}.{second}", kind, ("b32", a), ("b32", b), (kind, c))

    def parts(word, kind, bits, places):
        return [wrap(word >> bits * i, f"{kind[0]}{bits}") for i in places]

    places = (0, 1) if part == "lo" else (2, 3)
    truth = [
        wrap(sum(p * q for p, q in zip(parts(x, first, 16, (0, 1)), parts(y, second, 8, places),
                                       strict=True)) + z, kind)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]  # fmt: skip
    assert got.tolist() == truth


@pytest.mark.parametrize(
    ("mode", "nibbles"),
    [("f4e", "3210 4321 5432 6543"), ("b4e", "5670 6701 7012 0123"),
     ("rc8", "0000 1111 2222 3333"), ("ecl", "3210 3211 3222 3333"),
     ("ecr", "0000 1110 2210 3210"), ("rc16", "1010 3232 1010 3232")],
)  # fmt: skip
def test_permute_by_mode(mode, nibbles):
    a, b = 0x83828180, 0x87868584
    both = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    got = execute(f"prmt.b32.{mode}", "b32", ("b32", [a]), ("b32", [b]), ("b32", [0, 1, 2, 7]))
    want = [int.from_bytes(bytes(both[int(n)] for n in reversed(row)), "little")
            for row in nibbles.split()]  # fmt: skip
    assert got.tolist() == want


def test_nth_set_bit():
    masks = [0, 1, 0x80000000, 0b101101, 0xFFFFFFFF]
    rows = [(m, b, n) for m in masks for b in (0, 1, 3, 31) for n in (-33, -2, -1, 0, 1, 2, 32)]

    def truth(mask, base, offset):
        if offset == 0:
            return base if mask >> base & 1 else 2**32 - 1
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [i for i in places if mask >> i & 1]
        return found[abs(offset) - 1] if abs(offset) <= len(found) else 2**32 - 1

    kinds = ("b32", "u32", "s32")
    columns = [(kind, list(x)) for kind, x in zip(kinds, zip(*rows, strict=True), strict=True)]
    assert execute("fns.b32", "b32", *columns).tolist() == [truth(*row) for row in rows]


@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_extend(kind, mode):
    a, n = pairs(EDGES[kind], np.array([0, 1, 7, 8, 31, 32, 33, 2**32 - 1], np.uint32))

    def truth(x, count):
        count = count % 32 if mode == "wrap" else min(count, 32)
        x %= 1 << count
        return x - (1 << count) if kind == "s32" and count and x >> count - 1 else x

    got = execute(f"szext.{mode}.{kind}", kind, (kind, a), ("u32", n))
    assert got.tolist() == [truth(x, c) for x, c in zip(a.tolist(), n.tolist(), strict=True)]


def test_kinds_of_numbers():
    x = np.array([0, -0.0, 1, 1e-40, 1.1754944e-38, np.inf, -np.inf, np.nan], np.float32)
    want = {"finite": "11111000", "infinite": "00000110", "number": "11111110",
            "notanumber": "00000001", "normal": "00101000", "subnormal": "00010000"}  # fmt: skip
    for name, bits in want.items():
        got = execute(f"testp.{name}.f32", "pred", ("f32", x))
        assert "".join("01"[int(g)] for g in got) == bits
    got = execute("testp.subnormal.f64", "pred", ("f64", [1e-310, 1e-40]))
    assert got.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["s", "u"])
def test_differences_of_bytes(kind):
    a, b = pairs(np.array([0, 0xFF7F8001, 0x01020304, 0xFFFFFFFF], np.uint32))
    apart = [[abs(wrap(x >> 8 * i, f"{kind}8") - wrap(y >> 8 * i, f"{kind}8")) for i in range(4)]
             for x, y in zip(a.tolist(), b.tolist(), strict=True)]  # fmt: skip
    name = f"vabsdiff4.u32.{kind}32.{kind}32"
    got = execute(name, "b32", ("b32", a), ("b32", b), ("b32", [9]))
    assert got.tolist() == [int.from_bytes(bytes(row), "little") for row in apart]
    got = execute(f"{name}.add", "b32", ("b32", a), ("b32", b), ("b32", [9]))
    assert got.tolist() == [sum(row) + 9 for row in apart]
