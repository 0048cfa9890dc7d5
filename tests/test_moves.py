import numpy as np
import pytest
from one_instruction import execute, kernel

from cupyrec import sim


def test_packing():
    got = execute("mov.b32 {d}, {{a}, {b}}", "b32", ("b16", [0x1234]), ("b16", [0xABCD]))
    assert got.tolist() == [0xABCD1234]
    text = """ld.global.u64 %rd5, [%rd0]; mov.b64 {%r4, %r5}, %rd5;
    st.global.v2.u32 [%rd1], {%r5, %r4};"""
    x, y = np.array([0x1111111122222222], np.uint64), np.zeros(1, np.uint64)
    sim.run(kernel(text, [8, 8]), "f", 1, 1, (x, y))
    assert y.tolist() == [0x2222222211111111]


def test_generic_addresses():
    """A shared, a local and a global cell through generic addresses; each knows its space."""
    text = """.shared .align 4 .b32 cell[32]; .local .align 4 .b32 own[2];
    mov.u32 %r4, cell; mad.lo.u32 %r4, %r3, 4, %r4; st.shared.u32 [%r4], %r3;
    cvt.u64.u32 %rd4, %r4; cvta.shared.u64 %rd5, %rd4; ld.u32 %r5, [%rd5];
    add.u32 %r5, %r5, 100; st.u32 [%rd5], %r5; ld.shared.u32 %r6, [%r4];
    mov.u64 %rd6, own; cvta.local.u64 %rd7, %rd6; st.u32 [%rd7+4], %r6;
    ld.local.u32 %r6, [%rd6+4]; st.global.u32 [%rd0], %r6;
    isspacep.shared %p1, %rd5; selp.u32 %r7, 1, 0, %p1;
    isspacep.local %p1, %rd7; selp.u32 %r8, 2, 0, %p1; add.u32 %r7, %r7, %r8;
    isspacep.global %p1, %rd0; selp.u32 %r8, 4, 0, %p1; add.u32 %r7, %r7, %r8;
    isspacep.global %p1, %rd5; selp.u32 %r8, 8, 0, %p1; add.u32 %r7, %r7, %r8;
    cvta.to.shared.u64 %rd8, %rd5; sub.u64 %rd8, %rd8, %rd4; cvt.u32.u64 %r8, %rd8;
    add.u32 %r7, %r7, %r8; st.global.u32 [%rd1], %r7;"""
    cells, spaces = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    assert sim.run(kernel(text, [4, 4]), "f", 2, 32, (cells, spaces)).faults == []
    assert cells.tolist() == [100 + i for i in range(32)] * 2
    assert spaces.tolist() == [7] * 64


@pytest.mark.parametrize("text", ["nanosleep.u32 5", "prefetch.global.L2 [%rd0]", "membar.gl"])
def test_without_effect_on_values(text):
    x = np.arange(4, dtype=np.uint32)
    assert sim.run(kernel(f"{text};", [4]), "f", 1, 4, (x,)).faults == []
    assert x.tolist() == [0, 1, 2, 3]
