"""Atomics one lane after the other, against Python's numbers and fractions."""

from fractions import Fraction

import numpy as np
import pytest
from one_instruction import TABLES, kernel

from cupyrec import sim

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

ATOMIC = {
    "add.u32": lambda x, b: (x + b) % 2**32, "min.s32": min, "max.s32": max,
    "and.b32": lambda x, b: x & b, "or.b32": lambda x, b: x | b, "xor.b32": lambda x, b: x ^ b,
    "exch.b32": lambda x, b: b, "inc.u32": lambda x, b: 0 if x >= b else x + 1,
    "dec.u32": lambda x, b: b if x == 0 or x > b else x - 1,
    "add.u64": lambda x, b: (x + b) % 2**64, "min.u64": min, "max.s64": max,
    "exch.b64": lambda x, b: b, "add.f32": lambda x, b: x + b, "add.f64": lambda x, b: x + b,
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMIC)
def test_atomics_one_lane_after_the_other(name):
    kind = name.split(".")[1]
    signed = {"b": "u"}.get(kind[0], kind[0])
    dtype = np.dtype(f"{signed.replace('s', 'i')}{int(kind[1:]) // 8}")
    b = np.array([5, 3, 8, 0, 7, 12, 2, 9], dtype)
    cell, old = np.array([4], dtype), np.zeros(8, dtype)
    text = (
        f"ld.global.{kind} %v0, [%rd1];\natom.global.{name} %v1, [%rd0], %v0;\n"
        f"st.global.{kind} [%rd2], %v1;"
    )
    source = kernel(text, [0, b.itemsize, b.itemsize], f".reg .b{kind[1:]} %v<2>;")
    assert sim.run(source, "f", 1, 8, (cell, b, old)).faults == []
    x, seen = dtype.type(4).item(), []
    for value in b.tolist():
        seen.append(x)
        x = ATOMIC[name](x, value)
    assert (cell.tolist(), old.tolist()) == ([x], seen)
    again = np.array([4], dtype)
    red = kernel(text.replace("atom", "red").replace("%v1, [", "[").split("\nst")[0],
                 [0, b.itemsize], f".reg .b{kind[1:]} %v<2>;")  # fmt: skip
    if "exch" not in name:
        sim.run(red, "f", 1, 8, (again, b))
        assert again.tolist() == [x]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compare_and_swap(bits):
    dtype = np.dtype(f"u{bits // 8}")
    cells, old = np.array([0, 7, 0], dtype), np.zeros(3, dtype)
    text = f"atom.global.cas.b{bits} %v1, [%rd0], 0, 9;\nst.global.b{bits} [%rd1], %v1;"
    source = kernel(text, [dtype.itemsize] * 2, f".reg .b{bits} %v<2>;")
    sim.run(source, "f", 1, 3, (cells, old))
    assert (cells.tolist(), old.tolist()) == ([9, 7, 9], [0, 7, 0])


# 16-bit floats, pairs, vectors


def nearest(kind, x):
    """Bits of a Fraction, ties to even."""
    values, bits = TABLES[kind]
    i = int(np.searchsorted(values, float(x)))
    around = range(max(i - 2, 0), min(i + 2, len(values)))
    return int(bits[min(around, key=lambda j: (abs(Fraction(values[j]) - x), bits[j] & 1))])


def value(kind, bits):
    wide = np.uint16(bits).view(np.float16) if kind == "f16" else np.uint32(bits << 16).view("f4")
    return float(wide)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_16_bit_floats_are_rounded_at_each_lane(kind):
    """Two cells, the second of which grows past all finite values."""
    one, largest = {"f16": (0x3C00, 0x7BFF), "bf16": (0x3F80, 0x7F7F)}[kind]
    top = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    random = np.random.default_rng(0).integers(0, top, 300).astype(np.uint16)
    b = np.concatenate([[1, 2, 0x8001, 0x8000, 0x0400, one, one | 0x8000], random // 2,
                        random % (one + 900) | 0x8000]).astype(np.uint16)  # fmt: skip
    cells, old = np.array([3, largest], np.uint16), np.zeros((2, b.size), np.uint16)
    text = f"""ld.global.b16 %v0, [%rd1];
    atom.global.add.noftz.{kind} %v1, [%rd0], %v0;
    st.global.b16 [%rd2], %v1;
    atom.global.add.noftz.{kind} %v1, [%rd0+2], {one};
    st.global.b16 [%rd3], %v1;"""
    source = kernel(text.replace(f"], {one}", "], %v2").replace("ld", f"mov.b16 %v2, {largest}; ld",
                                                                1),
                    [0, 2, 2, 2], ".reg .b16 %v<3>;")  # fmt: skip
    assert sim.run(source, "f", 1, b.size, (cells, b, *old)).faults == []
    x = 3
    for bits, seen in zip(b.tolist(), old[0].tolist(), strict=True):
        assert seen == x
        exact = Fraction(value(kind, x)) + Fraction(value(kind, bits))
        x = nearest(kind, exact)
    assert cells.tolist() == [x, top]
    assert old[1].tolist() == [largest] + [top] * (b.size - 1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_special_16_bit_floats(kind):
    inf = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    x = np.array([inf, inf, 0x8000, 0, 0x8000, 0x7FFF], np.uint16)
    b = np.array([inf, inf | 0x8000, 0x8000, 0x8000, 0, 1], np.uint16)

    def after(name):
        cells = x.copy()
        text = f"ld.global.b16 %v0, [%rd1];\nred.global.{name}.noftz.{kind} [%rd0], %v0;"
        source = kernel(text, [2, 2], ".reg .b16 %v<1>;")
        assert sim.run(source, "f", 1, x.size, (cells, b)).faults == []
        return cells.tolist()

    assert after("add") == [inf, 0x7FFF, 0x8000, 0, 0, 0x7FFF]
    assert after("min") == [inf, inf | 0x8000, 0x8000, 0x8000, 0x8000, 1]
    assert after("max") == [inf, inf, 0x8000, 0, 0, 1]


SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void halves(__half* h, __half2* h2, __nv_bfloat16* b, __nv_bfloat162* b2,
                                  float* old) {
    float i = threadIdx.x;
    atomicAdd(h, __float2half(i));
    atomicAdd(h2, __floats2half2_rn(1, i));
    atomicAdd(b, __float2bfloat16(1));
    atomicAdd(b2, __floats2bfloat162_rn(2, -1));
    old[threadIdx.x] = __half2float(atomicAdd(h + 1, __float2half(2)))
                       + 1000 * __low2float(atomicAdd(b2 + 1, __floats2bfloat162_rn(1, 0)));
}
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void vectors(float2* x, float4* y, float4* old) {
    float i = threadIdx.x;
    atomicAdd(x, make_float2(i, 1));
    old[threadIdx.x] = atomicAdd(&y[threadIdx.x % 2], make_float4(1, 2, i, -1));
}
#endif
extern "C" __global__ void swaps(unsigned short* x, unsigned short* old) {
    old[threadIdx.x] = atomicCAS(x, (unsigned short)threadIdx.x, (unsigned short)(threadIdx.x + 1));
}
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_cuda_atomics_of_halves(arch, seed):
    h, h2, b, b2 = (np.zeros(n, np.uint16) for n in (2, 2, 1, 4))
    old = np.zeros(32, np.float32)
    result = sim.run(SOURCE, "halves", 1, 32, (h, h2, b, b2, old), arch=arch, seed=seed)
    assert result.faults == []
    assert h.view(np.float16).tolist() == [496, 64]
    assert h2.view(np.float16).tolist() == [32, 496]
    brain = [value("bf16", int(x)) for x in (*b, *b2)]
    assert brain == [32, 64, -32, 32, 0]
    assert sorted(old.tolist()) == [1002 * i for i in range(32)]


@pytest.mark.parametrize("arch", [90, 100])
def test_cuda_atomics_of_vectors(arch):
    x, y, old = np.zeros(2, np.float32), np.zeros((2, 4), np.float32), np.zeros((32, 4), np.float32)
    result = sim.run(SOURCE, "vectors", 1, 32, (x, y, old), arch=arch)
    assert result.faults == []
    assert x.tolist() == [496, 32]
    assert y.tolist() == [[16, 32, 240, -16], [16, 32, 256, -16]]
    assert old[30].tolist() == [15, 30, 210, -15]


def test_vectors_must_be_aligned_as_a_whole():
    x = np.zeros(3, np.float32)
    text = "add.s64 %rd0, %rd0, 4; red.global.add.v2.f32 [%rd0], {%v0, %v0};"
    (fault,) = sim.run(kernel(text, [0], ".reg .b32 %v<1>;"), "f", 1, 1, (x,)).faults
    assert fault.kind == "misaligned"


def test_cuda_compare_and_swap_of_16_bits():
    x, old = np.zeros(2, np.uint16), np.zeros(32, np.uint16)
    assert sim.run(SOURCE, "swaps", 1, 32, (x, old)).faults == []
    assert (x.tolist(), old.tolist()) == ([32, 0], [*range(32)])


def test_policies_of_the_cache_change_nothing():
    text = """mov.b64 %rd5, 1; red.global.add.L2::cache_hint.u32 [%rd0], 2, %rd5;
    atom.global.cas.L2::cache_hint.b32 %r4, [%rd0], 2, 7, %rd5;"""
    x = np.zeros(1, np.uint32)
    assert sim.run(kernel(text, [0]), "f", 1, 1, (x,)).faults == []
    assert x.tolist() == [7]


def test_unknown_atomics():
    with pytest.raises(sim.PtxError, match=r"'red\.global\.xor\.f16"):
        sim.run(kernel("red.global.xor.f16 [%rd0], %v0;", [0], ".reg .b16 %v<1>;"), "f", 1, 1,
                (np.zeros(1, np.uint16),))  # fmt: skip
