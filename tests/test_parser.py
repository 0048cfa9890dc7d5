import numpy as np
import oracle
import pytest

from cupyrec.sim.parser import parse
from cupyrec.sim.ptx import Address, PtxError

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"
TEXT = (
    HEADER
    + """
.file 1 "/src/own.cu"
.file\t2 "/opt/include/cuda_fp16.h"
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.const .align 4 .b8 table[8] = {1, 0, 0, 0, 2};
.global .align 4 .u32 counter = 3;
.global .align 8 .f64 third = 0d3FD5555555555555;
.extern .shared .align 16 .b8 dynamic[];
.func (.param .b32 out) helper(.param .b32 in) {
    .reg .f32 %f<3>;
    ld.param.f32 %f1, [in]; // a comment; with a semicolon
    st.param.f32 [out+0], %f1;
    ret;
}
.visible .entry f(.param .u64 .ptr .align 1 p, .param .align 8 .b8 q[24])
.maxntid 128, 1, 1
.minnctapersm 2
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>, %x;
    .local .align 16 .b8 __local_depot0[32];
    .loc 1 7 3
    @!%p1 bra $L__BB0_2;
    .loc 2 55 1, function_name $L__info_string0, inlined_at 1 8 5
    { .reg .b32 t; mov.b32 t, 0f3F800000;
      { .reg .b32 t; mov.b32 t, -5; add.s32 %r1, t, %r2; }
      add.s32 %r2, t, -0x10;
    }
    ld.global.v2.f32 {%r1, %r2}, [%r3+-8];
    ld.shared.u32 %r1, [dynamic+4];
    setp.eq.and.s32 %p0|%p1, %r1, 1, !%p1;
$L__BB0_2:
    ret;
}
.section .debug_str { .b8 65 }
"""
)


@pytest.fixture(scope="module")
def module():
    return parse(TEXT)


def test_module_variables(module):
    facts = {v.name: (v.space, v.size, v.align, v.data) for v in module.variables.values()}
    assert facts == {
        "table": ("const", 8, 4, bytes([1, 0, 0, 0, 2, 0, 0, 0])),
        "counter": ("global", 4, 4, bytes([3, 0, 0, 0])),
        "third": ("global", 8, 8, np.float64(1 / 3).tobytes()),
        "dynamic": ("shared", 0, 16, None),
    }


def test_functions(module):
    helper, kernel = module.functions["helper"], module.functions["f"]
    assert [*module.functions] == ["helper", "f"]  # a declaration alone is none
    assert (helper.entry, [v.name for v in helper.params], [v.name for v in helper.returns]) == (
        False, ["in"], ["out"],
    )  # fmt: skip
    assert kernel.entry
    assert [(v.name, v.size, v.align) for v in kernel.params] == [("p", 8, 8), ("q", 24, 8)]
    assert kernel.variables["__local_depot0"].size == 32
    assert kernel.labels == {"$L__BB0_2": 8}
    assert kernel.registers["%p1"] == "pred"
    assert kernel.registers["%r3"] == kernel.registers["%x"] == "b32"


def test_operands(module):
    code = module.functions["f"].code
    assert (code[0].opcode, code[0].operands, code[0].guard) == ("bra", ("$L__BB0_2",), "!%p1")
    outer, inner, add, last, load, shared, setp = code[1:8]
    assert outer.operands[1] == 1.0
    assert inner.operands[1] == -5
    assert inner.operands[0] == add.operands[1] != outer.operands[0] == last.operands[1]
    assert last.operands[2] == -16
    assert load.operands == (("%r1", "%r2"), Address("%r3", -8))
    assert load.parts == ("ld", "global", "v2", "f32")
    assert shared.operands[1] == Address("dynamic", 4)
    assert setp.operands == (("%p0", "%p1"), "%r1", 1, "!%p1")


def test_lines(module):
    code = module.functions["f"].code
    assert code[0].source == ("own.cu", 7)
    assert code[1].source == ("own.cu", 8)  # the line that calls what a header holds
    assert TEXT.split("\n")[code[0].line - 1].strip().startswith("@!%p1 bra")
    assert parse(TEXT).functions["helper"].code[0].source == ("", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n?", "sim: PTX must be readable, got '?' on PTX line 5."),
        ("\nnonsense", "sim: PTX must have 'a declaration' on PTX line 5, got 'nonsense'."),
    ],
)
def test_unreadable(text, message):
    with pytest.raises(PtxError, match=oracle.sentence(message)):
        parse(HEADER + text)


def test_variables_begin_with_addresses_of_others():
    text = ".global .align 8 .u64 p[3] = {7, generic(other), last};"
    variable = parse(HEADER + text).variables["p"]
    assert variable.names == ((8, "other"), (16, "last"))
    assert variable.data == (7).to_bytes(8, "little") + bytes(16)


def test_places_in_textures_are_operands():
    text = ".entry f() { tex.1d.v4.f32.s32 {%a, %b, %c, %d}, [%t, {%x}]; }"
    (instruction,) = parse(HEADER + text).functions["f"].code
    assert instruction.text == "tex.1d.v4.f32.s32 {%a, %b, %c, %d}, [%t, {%x}]"


def test_instructions_are_the_same_however_they_are_written():
    """In one go, or where comments or inner braces forbid that, word by word."""
    lines = [
        "add.s32 %r1, %r2, -5;", "@!%p1 bra.uni $L;", "ret;", "mov.b64 {%r1, %r2}, %rd1;",
        "setp.lt.and.f32 %p0|%p1, %f1, 0fBF800000, !%p2;", "st.local.v2.u16 [%rd1+-4], {%a, _};",
        "call.uni (out), helper,\n(\nin0,\nin1\n);", "cp.async.ca.shared.global.L2::128B [%r1],"
        " [%rd2], 4;", "ld.const.u64 %rd1, [table + 0x10];", "mov.u32 %r1, 0xFFFFFFFFU;",
    ]  # fmt: skip
    whole = parse(HEADER + ".entry f() {\n" + "\n".join(lines) + "\n$L:\n}").functions["f"]
    broken = [line.replace(";", "/* ; */;") for line in lines]
    words = parse(HEADER + ".entry f() {\n" + "\n".join(broken) + "\n$L:\n}").functions["f"]
    inner = parse(HEADER + ".entry f() {{\n" + "\n".join(lines) + "\n}\n$L:\n}").functions["f"]
    facts = [[(*i[:5], i.text) for i in f.code] for f in (whole, words, inner)]
    assert facts[0] == facts[1] == facts[2]
    assert facts[0][1] == ("bra.uni", ("$L",), "!%p1", 6, ("", 0), "@!%p1 bra.uni $L")
    assert [i.operands for i in whole.code][3:6] == [
        (("%r1", "%r2"), "%rd1"), (("%p0", "%p1"), "%f1", -1.0, "!%p2"),
        (Address("%rd1", -4), ("%a", "_")),
    ]  # fmt: skip
    assert [i.operands for i in whole.code][6:] == [
        (("out",), "helper", ("in0", "in1")), (Address("%r1", 0), Address("%rd2", 0), 4),
        ("%rd1", Address("table", 16)), ("%r1", 2**32 - 1),
    ]  # fmt: skip


def test_what_stands_in_sections_is_no_code():
    text = ".section .debug_str { .b8 1, 2 }\n.entry f() { ret; }\n?"
    with pytest.raises(PtxError, match="got '\\?' on PTX line 6"):
        parse(HEADER + text)
