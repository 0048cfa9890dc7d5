import numpy as np
import pytest

from cupyrec import sim
from cupyrec.sim.operands import Operands
from cupyrec.sim.parser import parse
from cupyrec.sim.program import Program
from cupyrec.sim.ptx import PtxError

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry own(.param .u64 own_x, .param .u32 own_n)
{
.reg .pred %p<2>;
.reg .b16 %rs<2>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
.shared .align 4 .b8 pad[20];
.shared .align 4 .b8 tile[64];
ld.param.u32 %r1, [own_n];
setp.ne.s32 %p1, %r1, 0;
@%p1 mov.u32 %r2, 7;
ld.param.u64 %rd1, [own_x];
mov.u32 %r3, %ctaid.x;
mov.u32 %r4, %ntid.x;
mov.u32 %r5, %tid.x;
mad.lo.s32 %r6, %r3, %r4, %r5;
mul.wide.u32 %rd2, %r6, 8;
add.s64 %rd3, %rd1, %rd2;
st.global.u32 [%rd3], %r2;
mov.u32 %r7, tile;
st.global.u32 [%rd3+4], %r7;
ret;
}
"""


@pytest.fixture
def operands():
    program = Program(parse(PTX), "own")
    operands = Operands(program, 64)
    operands.special = {"%tid.x": np.arange(40), "%ntid.x": 40, "%laneid": np.arange(40)}
    operands.address = {("own", "tile"): 20}
    return operands


def test_registers_are_read_as_any_type_of_their_width(operands):
    kernel = operands.kernel
    operands.sink(kernel, "%rd1", "s32")(slice(0, 2), np.array([-1, 2]))
    assert operands.source(kernel, "%rd1", "s64")[:3].tolist() == [-1, 2, 0]
    assert operands.source(kernel, "%rd1", "u16")[:2].tolist() == [65535, 2]
    operands.sink(kernel, "%rd1", "f32")(slice(0, 1), np.float32([1]))
    assert operands.source(kernel, "%rd1", "u64")[0] == 0x3F800000
    operands.sink(kernel, "_", "s32")(slice(0, 1), np.array([1]))


def test_guards_and_immediates(operands):
    kernel = operands.kernel
    operands.sink(kernel, "%p1", "pred")(slice(0, 2), np.array([True, False]))
    assert operands.source(kernel, "!%p1", "pred")[0:3].tolist() == [False, True, True]
    assert operands.source(kernel, -1, "u32")[5:7].tolist() == [0xFFFFFFFF] * 2


def test_what_is_no_name(operands):
    with pytest.raises(KeyError):
        operands.source(operands.kernel, "nothing", "u32")


def test_a_launch_renews_what_steps_hold(operands):
    kernel = operands.kernel
    register = operands.register(kernel, "%r1")
    held = {name: operands.source(kernel, name, "u32") for name in ("%tid.x", "%ntid.x", "tile")}
    stored = operands.store(kernel, "argument", 4)
    carry = operands.carry()
    register[:], stored[:], carry[:] = 9, 9, True
    operands.special = {"%tid.x": np.arange(64)[::-1], "%ntid.x": 64}
    operands.address = {("own", "tile"): 48}
    operands.renew(64)
    assert not register.any()
    assert not stored.any()
    assert not operands.carry().any()
    assert operands.carry() is carry
    assert held["%tid.x"].tolist() == [*range(64)][::-1]
    assert held["%ntid.x"].tolist() == [64] * 64
    assert held["tile"].tolist() == [48] * 64


def launched(grid, block, n):
    x = np.zeros((grid * block, 2), np.uint32)
    result = sim.run(PTX, "own", grid, block, (x, np.uint32(n)))
    assert not result.faults
    return x


@pytest.mark.parametrize(("grid", "block"), [(1, 32), (3, 40), (9, 96), (2, 1)])
def test_a_launch_finds_nothing_of_the_last_one(grid, block):
    assert (launched(grid, block, 1) == [7, 20]).all()
    assert (launched(grid, block, 0) == [0, 20]).all()


def test_the_clock_goes_on():
    text = PTX.replace("mov.u32 %r2, 7", "mov.u32 %r2, %clock")
    x = np.zeros((2, 2), np.uint32)
    sim.run(text, "own", 1, 2, (x, np.uint32(1)))
    assert x[0, 0] == 3


def test_unknown_names_are_quoted():
    text = PTX.replace("%r7, tile", "%r7, other")
    x = np.zeros((2, 2), np.uint32)
    with pytest.raises(PtxError, match=r"got 'mov.u32 %r7, other'"):
        sim.run(text, "own", 1, 2, (x, np.uint32(1)))
