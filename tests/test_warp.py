"""What lanes of a warp do together, against loops over lanes."""

import numpy as np
import pytest
from one_instruction import execute, kernel

from cupyrec import sim

X = np.random.default_rng(0).integers(0, 9, 64).astype(np.int32)
FULL = 0xFFFFFFFF


def shuffled(mode, lane, step, control):
    """The PTX ISA's pseudocode: (source lane, whether it is in range)."""
    clamp, segment = control & 31, control >> 8 & 31
    last = lane & segment | clamp & ~segment
    source = {"up": lane - step, "down": lane + step, "bfly": lane ^ step,
              "idx": lane & segment | step & ~segment}[mode]  # fmt: skip
    inside = source >= last if mode == "up" else source <= last
    return (source if inside else lane), inside


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("control", [31, 0, (32 - 8) << 8 | 31, (32 - 8) << 8])
@pytest.mark.parametrize("step", [0, 1, 5, 16])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode, step, control, seed):
    text = f"""ld.global.u32 %r4, [%rd0];
    shfl.sync.{mode}.b32 %r5|%p1, %r4, {step}, {control}, -1;
    selp.u32 %r6, 1, 0, %p1;
    st.global.u32 [%rd1], %r5; st.global.u32 [%rd2], %r6;"""
    value, inside = np.zeros(64, np.int32), np.zeros(64, np.int32)
    result = sim.run(kernel(text, [4, 4, 4]), "f", 1, 64, (X, value, inside), seed=seed)
    truth = [shuffled(mode, i % 32, step, control) for i in range(64)]
    assert result.faults == []
    assert value.tolist() == [X[i // 32 * 32 + source] for i, (source, _) in enumerate(truth)]
    assert inside.tolist() == [ok for _, ok in truth]


def test_shuffle_of_a_lane_outside_the_mask():
    text = """mov.u32 %r4, %laneid;
    setp.lt.u32 %p1, %r4, 8;
    @%p1 shfl.sync.bfly.b32 %r5, %r4, 8, 31, 255;
    st.global.u32 [%rd0], %r5;"""
    (fault,) = sim.run(kernel(text, [4]), "f", 1, 32, (np.zeros(32, np.int32),)).faults
    assert (fault.kind, fault.thread) == ("shuffle", (0, 0, 0))


def ballot(chosen, warp):
    return sum(1 << i for i in range(32) if chosen[32 * warp + i])


@pytest.mark.parametrize("seed", [0, 3])
def test_votes(seed):
    for x in (X, np.ones(64, np.int32), np.zeros(64, np.int32)):
        text = "".join(
            f"vote.sync.{mode}.pred %p2, %p1, -1; selp.u32 %r5, 1, 0, %p2;\n"
            f"st.global.u32 [%rd{i}], %r5;\n"
            for i, mode in [(1, "any"), (2, "all"), (3, "uni")]
        )
        text = (
            "ld.global.s32 %r4, [%rd0]; setp.gt.s32 %p1, %r4, 0;\n" + text
            + "vote.sync.ballot.b32 %r5, %p1, -1; st.global.u32 [%rd4], %r5;"
        )  # fmt: skip
        some, all_, uniform, bits = (np.zeros(64, np.uint32) for _ in range(4))
        args = x, some, all_, uniform, bits
        sim.run(kernel(text, [4] * 5), "f", 1, 64, args, seed=seed)
        truth = [ballot(x > 0, i // 32) for i in range(64)]
        assert bits.tolist() == truth
        assert some.tolist() == [t > 0 for t in truth]
        assert all_.tolist() == [t == FULL for t in truth]
        assert uniform.tolist() == [t in {0, FULL} for t in truth]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_match(kind, seed):
    register = "%r4" if kind == "b32" else "%rd5"
    text = f"""ld.global.{kind} {register}, [%rd0];
    match.any.sync.{kind} %r5, {register}, -1; st.global.u32 [%rd1], %r5;
    match.all.sync.{kind} %r5|%p1, {register}, -1; selp.u32 %r6, 7, %r5, %p1;
    st.global.u32 [%rd2], %r6;"""
    x = X.astype(kind.replace("b32", "i4").replace("b64", "i8"))
    x[32:] = 5
    some, every = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    source = kernel(text, [x.itemsize, 4, 4])
    assert sim.run(source, "f", 1, 64, (x, some, every), seed=seed).faults == []
    assert some.tolist() == [ballot(x == x[i], i // 32) for i in range(64)]
    assert every.tolist() == [0] * 32 + [7] * 32


JOINS = {"add": sum, "min": min, "max": max}


@pytest.mark.parametrize("name", ["add", "min", "max", "and", "or", "xor"])
def test_reduce_by_masks(name):
    kind = "s32" if name in JOINS else "b32"
    text = f"""ld.global.u32 %r4, [%rd0]; ld.global.u32 %r5, [%rd1];
    redux.sync.{name}.{kind} %r6, %r4, %r5; st.global.u32 [%rd2], %r6;"""
    mask = np.where(np.arange(64) % 3 == 0, 0x49249249, FULL ^ 0x49249249).astype(np.uint32)
    mask[32:] = FULL
    result = np.zeros(64, np.int32)
    assert sim.run(kernel(text, [4] * 3), "f", 1, 64, (X - 4, mask, result)).faults == []
    truth = []
    for i in range(64):
        lanes = [j for j in range(32) if mask[i] >> j & 1]
        values = [int(X[i // 32 * 32 + j]) - 4 for j in lanes]
        joined = np.array(values, np.int32)
        bits = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.get(name)
        truth.append(JOINS[name](values) if bits is None else int(bits.reduce(joined)))
    assert result.tolist() == truth


def test_active_lanes_and_special_registers():
    text = """mov.u32 %r4, %laneid; setp.lt.u32 %p1, %r4, 5;
    @%p1 activemask.b32 %r5; st.global.u32 [%rd0], %r5;
    mov.u32 %r6, %lanemask_lt; st.global.u32 [%rd1], %r6;
    mov.u32 %r6, %warpid; st.global.u32 [%rd2], %r6;"""
    active, before, warp = (np.zeros(40, np.uint32) for _ in range(3))
    sim.run(kernel(text, [4] * 3), "f", 1, 40, (active, before, warp), seed=2)
    assert active.tolist() == ([31] * 5 + [0] * 27) + [31] * 5 + [0] * 3
    assert before.tolist() == [2 ** (i % 32) - 1 for i in range(40)]
    assert warp.tolist() == [0] * 32 + [1] * 8


def test_elect_and_unknown():
    text = "elect.sync %r4|%p1, -1; selp.u32 %r5, 1, 0, %p1; st.global.u32 [%rd0], %r5;"
    x = np.zeros(32, np.uint32)
    sim.run(kernel(text, [4]), "f", 1, 32, (x,))
    assert x.tolist() == [1] + [0] * 31
    with pytest.raises(sim.PtxError, match=r"'redux\.sync\.add\.f32"):
        execute("redux.sync.add.f32 {d}, {a}, -1", "f32", ("f32", [1.0]))


def test_lanes_that_meet_may_be_others_than_those_that_came_last():
    """16 lanes of warp 0 wait; then its others come with 16 of warp 1, which must go on waiting."""
    text = """extern "C" __global__ void f(int* x) {
        const int t = threadIdx.x;
        int y = t;
        for (int i = t < 16 ? 0 : t < 48 ? 600 : 3000; i > 0; --i) y = y * 1664525 + x[t];
        x[t] = __shfl_xor_sync(0xFFFFFFFFu, t, 16) + (y == 12345 ? 64 : 0);
    }"""
    x = np.zeros(64, np.int32)
    assert sim.run(text, "f", 1, 64, (x,)).faults == []
    assert x.tolist() == [i ^ 16 for i in range(64)]
