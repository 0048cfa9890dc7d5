import numpy as np
import pytest

from cupyrec.sim import ptx


@pytest.mark.parametrize(("kind", "size"), [("b8", 1), ("f16x2", 4), ("u64", 8), ("pred", 1)])
def test_width(kind, size):
    assert ptx.width(kind) == size


@pytest.mark.parametrize(
    ("value", "kind", "bits"),
    [
        (-1, "u16", np.uint16(65535)), (1.5, "f32", np.float32(1.5)), (1.5, "b32", 0x3FC00000),
        (0x3FC00000, "f32", np.float32(1.5)), (2, "pred", True), (-2, "s64", -2),
    ],
)  # fmt: skip
def test_constants(value, kind, bits):
    made = ptx.constant(value, kind)
    assert (made, made.dtype) == (bits, ptx.dtype_of(kind))


def test_unknown_is_quoted():
    text = "ld.global.v2.f32\t{%r1,%r2},\n [ %r3 + -8 ] ;"
    instruction = ptx.Instruction("ld.global.v2.f32", (), "", 17, ("own.cu", 8), text)
    error = "got 'ld.global.v2.f32 {%r1, %r2}, [%r3+-8]' (PTX line 17, own.cu:8)."
    assert str(instruction.unknown()) == f"sim: the instruction must be a known one, {error}"


def test_names_in_operands():
    operands = ("%r1", ("%r2", ptx.Address("tile", 4)), 7, 1.5)
    assert ptx.names_in(operands) == ["%r1", "%r2", "tile"]
