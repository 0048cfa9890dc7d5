"""What the launches of a kernel have in common."""

from cupyrec.sim.parser import parse
from cupyrec.sim.program import Program

SOURCE = """
.version 8.0
.target sm_80
.address_size 64
.global .align 8 .u64 pointer = generic(values);
.global .align 4 .u32 values[4];
.global .align 4 .u32 others[4];
.func first() { call second; ret; }
.func second() { ret; }
.func third() { ret; }
.visible .entry own(.param .u64 own_x) {
    .reg .b64 %rd<3>;
    .reg .b16 %rs<2>;
    ld.param.u64 %rd1, [own_x];
    ld.global.u64 %rd2, [pointer];
    st.global.u16 [%rd2], %rs1;
    call first;
    call second;
    ret;
}
"""


def test_functions_that_are_called_follow_the_kernel():
    program = Program(parse(SOURCE), "own")
    assert [f.name for f in program.functions] == ["own", "first", "second"]
    assert program.start == {"own": 0, "first": 6, "second": 8}
    assert [i.opcode for _, i in program.code[5:]] == ["ret", "call", "ret", "ret"]


def test_names_are_those_of_the_code_and_of_what_it_reaches():
    used = Program(parse(SOURCE), "own").used
    assert {"%rd2", "own_x", "pointer", "values"} <= used
    assert "others" not in used


def test_the_narrowest_access_is_that_of_memory():
    module = parse(SOURCE)
    assert Program(module, "own").grain == 2
    assert Program(module, "third").grain == 16
