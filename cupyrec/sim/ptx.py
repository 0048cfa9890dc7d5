"""What PTX consists of: modules, functions, variables, instructions, types and numbers."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

import numpy as np

__all__ = [
    "HALVES", "NUMBER", "TOKEN", "WORD", "Address", "Function", "Instruction", "Module", "PtxError",
    "Variable", "constant", "dtype_of", "names_in", "width",
]  # fmt: skip


class PtxError(RuntimeError):
    """PTX that the simulator does not know, quoted with its line and that of the source."""


NUMBER = r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+U?"
WORD = r"[A-Za-z_$%.](?:[\w$.%]|::)*"
TOKEN = re.compile(
    rf"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<file>\.file\s[^\n]*)|(?P<loc>\.loc\s[^\n]*)
    |(?P<string>"[^"]*")
    |(?P<number>{NUMBER})
    |(?P<word>{WORD})
    |(?P<mark>[{{}}()\[\],;:|<>@!+=-])""",
    re.VERBOSE | re.DOTALL,
)


class Address(NamedTuple):
    """``[base+offset]``: base is a register, the name of a variable, or "" (offset alone)."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """``@guard opcode operands;``

    An operand is a str (register, label, name of a variable or of a special register), an int (bits
    of an immediate), a float (``0f…`` and ``0d…``), an `Address`, or a tuple of operands, ``{…}``.
    """

    opcode: str
    operands: tuple
    guard: str  # predicate register, "!" before it if it must be false, "" for none
    line: int  # of the PTX
    source: tuple[str, int]  # file and line of the CUDA source
    written: str  # the text as it stands there

    @property
    def text(self) -> str:
        """The text with one space between words."""
        words = (m[0] for m in TOKEN.finditer(self.written) if m.lastgroup != "skip")
        return re.sub(r" (?=[,;\]}+|>])|(?<=[\[{+@!|<-]) ", "", " ".join(words)).rstrip(";")

    @property
    def parts(self) -> tuple[str, ...]:
        """``ld.global.f32`` in parts."""
        return _parts(self.opcode)

    def unknown(self) -> PtxError:
        """Return the error that quotes this instruction."""
        file, line = self.source
        return PtxError(
            f"sim: the instruction must be a known one, got '{self.text}' (PTX line {self.line}, "
            f"{file}:{line})."
        )


@functools.cache
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


@dataclasses.dataclass
class Variable:
    """``.shared .align 4 .b8 tile[256]``; `data` are its initial bytes, None where nothing is.

    `names` are those whose addresses belong into the data: where, and of which variable.
    """

    space: str
    name: str
    kind: str
    size: int
    align: int
    data: bytes | None = None
    names: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass
class Function:
    """A kernel (`entry`) or device function; labels are indices into `code`."""

    name: str
    entry: bool
    params: list[Variable]
    returns: list[Variable]
    registers: dict[str, str] = dataclasses.field(default_factory=dict)
    variables: dict[str, Variable] = dataclasses.field(default_factory=dict)
    code: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    limits: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # maxntid, …


@dataclasses.dataclass
class Module:
    """All functions and module-scope variables of one PTX text."""

    functions: dict[str, Function]
    variables: dict[str, Variable]
    arch: int = 0  # of .target sm_<arch>


@functools.cache
def width(kind: str) -> int:
    """Return the bytes of a type: 4 for ``f32`` or ``b32``, 1 for ``pred``."""
    if kind == "pred":
        return 1
    if kind in {"e4m3x2", "e5m2x2"}:
        return 2
    return int(re.sub(r"\D", "", kind.removesuffix("x2"))) // (4 if kind.endswith("x2") else 8)


HALVES = {"f16", "f16x2", "bf16", "bf16x2"}


@functools.cache
def dtype_of(kind: str) -> np.dtype:
    """Return how a lane of type `kind` is held: 16-bit floats as their bits, predicates as bool."""
    if kind == "pred":
        return np.dtype(bool)
    known = {} if kind in HALVES or kind == "f32x2" else {"s": "i", "f": "f"}
    letter = known.get(kind[0], "u")
    return np.dtype(f"{letter}{width(kind)}")


def names_in(operands: tuple) -> list[str]:
    """Return the names of registers and variables in operands."""
    names = []
    for operand in operands:
        if isinstance(operand, Address):
            names.append(operand.base)
        elif isinstance(operand, tuple):
            names += names_in(operand)
        elif isinstance(operand, str):
            names.append(operand)
    return names


def constant(operand: float, kind: str) -> np.ndarray:
    """Return an immediate of type `kind`."""
    dtype = dtype_of(kind)
    if isinstance(operand, float):
        size = max(dtype.itemsize, 4)
        return np.array(operand, f"f{size}").view(dtype if dtype.itemsize == size else f"u{size}")
    if dtype.kind in "bf":
        bits = np.array(operand % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}")
        return bits != 0 if dtype.kind == "b" else bits.view(dtype)
    return np.array(operand % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)
