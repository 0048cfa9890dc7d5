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


@pytest.mark.parametrize(
    "text",
    ["nanosleep.u32 5", "prefetch.global.L2 [%rd0]", "prefetch.global.L2::evict_last [%rd0]",
     "prefetchu.L1 [%rd0]", "membar.gl", "fence.acq_rel.gpu", "discard.global.L2 [%rd0], 128",
     "applypriority.global.L2::evict_normal [%rd0], 128", "griddepcontrol.wait", "brkpt"],
)  # fmt: skip
def test_without_effect_on_values(text):
    x = np.arange(4, dtype=np.uint32)
    assert sim.run(kernel(f"{text};", [4]), "f", 1, 4, (x,)).faults == []
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "policy",
    ["fractional.L2::evict_last.b64 %rd5, 1.0", "cvt.L2.b64 %rd5, 7",
     "fractional.L2::evict_last.L2::evict_unchanged.b64 %rd5, 0.5",
     "range.global.L2::evict_last.L2::evict_unchanged.b64 %rd5, [%rd0], 0x100, 0x200"],
)  # fmt: skip
def test_hints_to_the_cache(policy):
    text = f"""createpolicy.{policy};
    ld.global.nc.L1::no_allocate.L2::128B.u32 %r4, [%rd0];
    ld.global.L1::evict_last.L2::cache_hint.u32 %r5, [%rd0], %rd5; add.u32 %r4, %r4, %r5;
    st.global.L1::no_allocate.L2::cache_hint.u32 [%rd0], %r4, %rd5;"""
    x = np.arange(4, dtype=np.uint32)
    assert sim.run(kernel(text, [4]), "f", 1, 4, (x,)).faults == []
    assert x.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("size", ["16", "16, 8"])
def test_asynchronous_copies_with_a_policy(size):
    """The policy is no number of bytes to be read."""
    text = f""".shared .align 16 .b32 cells[4]; mov.u32 %r4, cells; mov.u64 %rd5, 4;
    cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r4], [%rd0], {size}, %rd5;
    cp.async.wait_all; ld.shared.v2.u32 {{%r5, %r6}}, [%r4+8];
    st.global.u32 [%rd0], %r5; st.global.u32 [%rd0+4], %r6;"""
    x = np.arange(1, 5, dtype=np.uint32)
    assert sim.run(kernel(text, [16]), "f", 1, 1, (x,)).faults == []
    assert x.tolist() == ([3, 4] if size == "16" else [0, 0]) + [3, 4]


def test_bytes_of_shared_memory():
    text = """mov.u32 %r4, %dynamic_smem_size; st.global.u32 [%rd0], %r4;
    mov.u32 %r4, %total_smem_size; st.global.u32 [%rd0+4], %r4; mov.u32 %r5, all;"""
    source = kernel(".shared .align 4 .b32 cell; mov.u32 %r4, cell;" + text, [0])
    source = source.replace(".visible", ".extern .shared .align 16 .b8 all[];\n.visible")
    x = np.zeros(2, np.uint32)
    assert sim.run(source, "f", 1, 1, (x,), shared=128).faults == []
    assert x.tolist() == [128, 144]


GRID = r"""
#include <cooperative_groups.h>
extern "C" __global__ void f(int* x, int* y, int rounds) {
    auto grid = cooperative_groups::this_grid();
    int i = grid.thread_rank(), n = grid.size();
    for (int j = 0; j < rounds; ++j) {
        y[i] = x[n - 1 - i] + 1;
        grid.sync();
        x[i] = y[i];
        grid.sync();
    }
}
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_grid_meets(arch, seed):
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")
    x, y = np.arange(192, dtype=np.int32), np.zeros(192, np.int32)
    result = sim.run(GRID, "f", 3, 64, (x, y, np.int32(3)), arch=arch, seed=seed)
    assert result.faults == []
    assert x.tolist() == (np.arange(192)[::-1] + 3).tolist()
