"""What sim.run takes as arguments, and what it brings home."""

import numpy as np
import oracle
import pytest
from one_instruction import HEADER, kernel

from cupyrec import sim
from cupyrec.sim import heap

ADD = kernel(
    "ld.global.u32 %r4, [%rd0]; ld.global.u32 %r5, [%rd1]; add.u32 %r4, %r4, %r5;"
    "st.global.u32 [%rd1], %r4;", [4, 4],
)  # fmt: skip
SCALE = kernel("ld.global.f32 %f0, [%rd0]; ld.param.f32 %f1, [s0]; mul.f32 %f0, %f0, %f1;"
               "st.global.f32 [%rd0], %f0;", [4], ".reg .f32 %f<2>;", ["f32"])  # fmt: skip
COUNT = kernel("ld.param.u32 %r4, [s0]; st.global.u32 [%rd0], %r4;", [4], scalars=["u32"])
DOUBLES = f"""{HEADER}.visible .entry f(.param .u64 p, .param .f64 x) {{
.reg .b64 %rd<2>; .reg .f64 %d<1>;
ld.param.u64 %rd0, [p]; cvta.to.global.u64 %rd1, %rd0;
ld.param.f64 %d0, [x]; st.global.f64 [%rd1], %d0; ret; }}"""


def test_an_array_given_twice_is_one():
    x = np.arange(4, dtype=np.int32)
    assert sim.run(ADD, "f", 1, 4, (x, x)).faults == []
    assert x.tolist() == [0, 2, 4, 6]
    assert sim.run(ADD, "f", 1, 4, (x[:], x[:4])).faults == []
    assert x.tolist() == [0, 4, 8, 12]


def test_races_through_an_array_given_twice_are_seen():
    reverse = kernel(
        "ld.global.u32 %r4, [%rd0]; mov.u32 %r5, 3; sub.u32 %r5, %r5, %r0;"
        "ld.param.u64 %rd3, [p1]; mad.wide.u32 %rd3, %r5, 4, %rd3; st.global.u32 [%rd3], %r4;",
        [4, 4],
    )
    x = np.arange(4, dtype=np.int32)
    assert sim.run(reverse, "f", 1, 4, (x, x.copy())).faults == []
    assert {f.kind for f in sim.run(reverse, "f", 1, 4, (x, x)).faults} == {"race"}


@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x[1:], x[:-1]),
        lambda x: (x, x.view(np.uint32)),
        lambda x: (x[::-1], x),
        lambda x: (x, x.reshape(2, 4)),
    ],
)
def test_views_that_overlap_are_refused(views):
    before = len(heap.the_heap().live)
    text = (
        "sim.run: 'args[1]' must be the array that 'args[0]' is or share no memory with it, "
        "got another view of it."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        sim.run(ADD, "f", 1, 4, views(np.zeros(8, np.int32)))
    assert len(heap.the_heap().live) == before


def test_views_that_lie_between_each_other_are_two():
    x = np.arange(8, dtype=np.int32)
    assert sim.run(ADD, "f", 1, 4, (x[::2], x[1::2])).faults == []
    assert x.tolist() == [0, 1, 2, 5, 4, 9, 6, 13]


def test_an_array_that_is_only_read_may_be_read_only():
    x, y = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    x.flags.writeable = False
    assert sim.run(ADD, "f", 1, 4, (x, y)).faults == []
    assert y.tolist() == [1, 2, 3, 4]
    assert sim.run(ADD, "f", 1, 4, (np.broadcast_to(np.int32(5), 4), y)).faults == []
    assert y.tolist() == [6, 7, 8, 9]


def test_a_read_only_array_that_is_written_is_refused():
    both = kernel("st.global.u32 [%rd0], %r0; st.global.u32 [%rd1], %r0;", [4, 4])
    x, y = np.zeros(4, np.int32), np.zeros(4, np.int32)
    x.flags.writeable = False
    text = (
        "sim.run: 'args[0]' must be writeable, as the kernel writes to it, got a read-only array."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        sim.run(both, "f", 1, 4, (x, y))
    assert (x.tolist(), y.tolist()) == ([0] * 4, [0, 1, 2, 3])  # the others are home


def test_what_a_mask_hides_is_unwritten():
    x = np.ma.masked_all(4, np.int32)
    assert sim.run(kernel("st.global.u32 [%rd0], %r0;", [4]), "f", 1, 2, (x,)).faults == []
    assert x.tolist() == [0, 1, None, None]
    y = np.zeros(4, np.int32)
    assert sim.run(ADD, "f", 1, 2, (x, y)).faults == []  # what is written stays so
    (fault,) = sim.run(ADD, "f", 1, 3, (x, y)).faults
    assert (fault.kind, fault.thread) == ("uninitialized", (2, 0, 0))
    record = np.ma.masked_all(1, [("a", np.int32), ("b", np.int32)])
    assert sim.run(ADD, "f", 1, 1, (record, y)).faults[0].kind == "uninitialized"


@pytest.mark.parametrize(
    ("source", "args", "error", "text"),
    [
        (ADD, (np.zeros(4, ">i4"), np.zeros(4)), TypeError,
         "sim.run: 'args[0]' must have the byte order of this machine, got dtype '>i4'."),
        (ADD, (np.zeros(4, object), np.zeros(4)), TypeError,
         "sim.run: 'args[0]' must hold numbers, got dtype object."),
        (COUNT, (np.zeros(4, np.int32), np.zeros(1, np.int32)), TypeError,
         "sim.run: 'args[1]' must be a scalar of the 4 bytes that the kernel takes, got an array."),
        (COUNT, (np.zeros(4, np.int32), sim.zeros(1, np.int32)), TypeError,
         "sim.run: 'args[1]' must be a scalar of the 4 bytes that the kernel takes, got an array."),
        (DOUBLES, (np.zeros(1), np.zeros(1)), TypeError,
         "sim.run: 'args[1]' must be a scalar of the 8 bytes that the kernel takes, got an array."),
        (DOUBLES, (np.float64(3), np.float64(3)), TypeError,
         "sim.run: 'args[0]' must be an array, as the kernel takes an address, got float64."),
        (DOUBLES, (np.int32(3), np.float64(3)), TypeError,
         "sim.run: 'args[0]' must be an array, as the kernel takes an address, got int32."),
        (SCALE, (np.zeros(4, np.float32), np.int32(3)), TypeError,
         "sim.run: 'args[1]' must be a floating-point number, as the kernel takes one, got int32."),
        (COUNT, (np.zeros(4, np.int32), np.float32(3)), TypeError,
         "sim.run: 'args[1]' must be an integer, as the kernel takes one, got float32."),
        (COUNT, (np.zeros(4, np.int32), np.int64(3)), TypeError,
         "sim.run: 'args[1]' must have the 4 bytes that the kernel takes, got 8."),
        (COUNT, (np.zeros(4, np.int32), 3), TypeError,
         "sim.run: 'args[1]' must be an array or a NumPy scalar, got int."),
        (COUNT, (), ValueError, "sim.run: 'args' must have 2 values, got 0."),
    ],
)  # fmt: skip
def test_arguments_are_checked(source, args, error, text):
    before = len(heap.the_heap().live)
    with pytest.raises(error, match=oracle.sentence(text)):
        sim.run(source, "f", 1, 1, args)
    assert len(heap.the_heap().live) == before


def test_scalars_keep_their_type():
    x, n = np.ones(2, np.float32), np.zeros(2, np.int32)
    assert sim.run(SCALE, "f", 1, 2, (x, np.float32(2.5))).faults == []
    assert sim.run(COUNT, "f", 1, 2, (n, np.int32(-3))).faults == []
    y = np.zeros(1)
    assert sim.run(DOUBLES, "f", 1, 1, (y, np.float64(0.1))).faults == []
    assert (x.tolist(), n.tolist(), y.tolist()) == ([2.5] * 2, [-3] * 2, [0.1])
    device = sim.zeros(1)
    address = np.uint64(device.__cuda_array_interface__["data"][0])
    assert sim.run(DOUBLES, "f", 1, 1, (address, np.float64(0.1))).faults == []
    assert device.get().tolist() == [0.1]


def test_a_hard_mask_is_refused_since_it_would_hide_results():
    x = np.ma.masked_all(4, np.int32)
    x.harden_mask()
    text = "sim.run: 'args[0]' must have a soft mask, got a hard one."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        sim.run(kernel("st.global.u32 [%rd0], %r0;", [4]), "f", 1, 2, (x,))
    assert x.mask.all()
