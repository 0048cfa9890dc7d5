"""PTX, as NVRTC writes it, to functions of instructions."""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

__all__ = [
    "Function", "Instruction", "Module", "PtxError", "Variable", "constant", "dtype_of", "names_in",
    "parse", "width",
]  # fmt: skip


class PtxError(RuntimeError):
    """PTX that the simulator does not know, quoted with its line and that of the source."""


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
    text: str

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


SPACES = {".global", ".const", ".shared", ".local", ".param"}
TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<file>\.file\s[^\n]*)|(?P<loc>\.loc\s[^\n]*)
    |(?P<string>"[^"]*")
    |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+U?)
    |(?P<word>[A-Za-z_$%.](?:[\w$.%]|::)*)
    |(?P<mark>[{}()\[\],;:|<>@!+=-])""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A piece of text and the line on which it stands."""

    kind: str
    text: str
    line: int


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


def _tokens(text: str) -> Iterator[Token]:
    position, line = 0, 1
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise PtxError(f"sim: PTX must be readable, got '{text[position:position + 40]}' "
                           f"on PTX line {line}.")  # fmt: skip
        if match.lastgroup != "skip":
            yield Token(match.lastgroup, match[0], line)
        line += match[0].count("\n")
        position = match.end()


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = [*_tokens(text), Token("end", "", 0)]
        self.next = 0
        self.files = {}
        for token in self.tokens:
            if token.kind == "file":
                _, number, name = token.text.split(maxsplit=2)
                self.files[number] = name.split('"')[1]
        self.module = Module({}, {})
        self.scopes: list[dict[str, str]] = []  # names that inner braces give registers and labels
        self.scope_count = 0
        self.inlined: dict[tuple[str, str], tuple[str, str] | None] = {}
        self.source = ("", 0)

    # Tokens

    def peek(self) -> str:
        return self.tokens[self.next].text

    def take(self) -> str:
        self.next += 1
        return self.tokens[self.next - 1].text

    def accept(self, *texts: str) -> bool:
        found = self.peek() in texts
        self.next += found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise PtxError(f"sim: PTX must have '{text}' on PTX line "
                           f"{self.tokens[self.next].line}, got '{self.peek()}'.")  # fmt: skip

    def listed(self, item: Callable, end: str) -> list:
        """Items between commas, up to `end`."""
        items = []
        while not self.accept(end):
            items.append(item())
            self.accept(",")
        return items

    # Declarations

    def parse(self) -> Module:
        while (text := self.peek()) != "":
            if text in {".version", ".target", ".address_size"}:
                line = self.tokens[self.next].line
                if text == ".target":
                    self.module.arch = int(re.sub(r"\D", "", self.tokens[self.next + 1].text) or 0)
                while self.tokens[self.next].line == line:
                    self.next += 1
            elif text == ".section":
                while self.take() != "}":
                    pass
            elif text in {".visible", ".extern", ".weak", ".common"} or self.is_location():
                self.next += 1
            elif text in {".entry", ".func"}:
                self.function()
            elif text in SPACES:
                variable = self.variable()
                self.expect(";")
                self.module.variables[variable.name] = variable
            else:
                self.expect("a declaration")
        return self.module

    def is_location(self) -> bool:
        """Whether a ``.loc`` or ``.file`` is next; keeps which line of the source it names.

        Of code inlined from a header that is the line that calls it.
        """
        token = self.tokens[self.next]
        if token.kind == "loc":
            words = token.text.replace(",", " ").split()
            place = (words[1], words[2])
            outer = words.index("inlined_at") if "inlined_at" in words else 0
            self.inlined[place] = (words[outer + 1], words[outer + 2]) if outer else None
            seen = set()
            while "/include/" in self.files.get(place[0], "") and place not in seen:
                seen.add(place)
                place = self.inlined.get(place) or place
            self.source = (PurePath(self.files.get(place[0], "")).name, int(place[1]))
        return token.kind in {"loc", "file"}

    def variable(self) -> Variable:
        space, align, pointer = self.take()[1:], 0, False
        while (word := self.take()).startswith("."):
            if word == ".align":
                value = int(self.take())
                align = align if pointer else value  # that of what a pointer points to is no matter
            elif word == ".ptr":
                pointer = True
            elif word not in SPACES:
                kind = word[1:]
        name, size = word, width(kind)
        if self.accept("["):
            length = self.take() if self.peek() != "]" else "0"  # extern __shared__ x[]
            size *= int(length)
            self.expect("]")
        variable = Variable(space, name, kind, size, align or width(kind))
        if self.accept("="):
            many = self.accept("{")
            values = self.listed(self.initial, "}") if many else [self.initial()]
            names = [(i * width(kind), v) for i, v in enumerate(values) if isinstance(v, str)]
            raw = b"".join(_bytes(0 if isinstance(v, str) else v, kind) for v in values)
            variable.data, variable.names = raw.ljust(size, b"\0"), tuple(names)
        elif space in {"global", "const"}:
            variable.data = bytes(size)
        return variable

    def initial(self) -> object:
        """A number, or the name of a variable, ``generic(name)`` too, or of a function."""
        value = self.operand()
        return self.operand()[0] if value == "generic" else value

    def function(self) -> None:
        entry = self.take() == ".entry"
        returns = self.listed(self.variable, ")") if self.accept("(") else []
        name = self.take()
        params = self.listed(self.variable, ")") if self.accept("(") else []
        function = Function(name, entry, params, returns)
        while not self.accept("{"):
            if (word := self.take()) == ";":
                return  # a declaration alone
            if word.startswith("."):
                limit = function.limits.setdefault(word[1:], [])
            elif word.isdecimal():
                limit.append(int(word))
        self.inlined.clear()
        self.module.functions[name] = function
        self.block(function)

    def block(self, function: Function) -> None:
        """Statements up to the brace that closes this block."""
        outermost = not self.scopes
        self.scope_count += not outermost
        self.scopes.append({})
        while not self.accept("}"):
            text = self.peek()
            if self.is_location():
                self.next += 1
            elif self.accept("{"):
                self.block(function)
            elif self.accept(";"):
                pass
            elif text == ".reg" or text.startswith(".reg."):  # ".reg.b32 x", as headers write it
                kind = self.take().removeprefix(".reg").removeprefix(".")
                kind = kind or self.take()[1:]
                for name in self.listed(self.register, ";"):
                    function.registers.update(dict.fromkeys(name, kind))
            elif text in SPACES:
                variable = self.variable()
                self.expect(";")
                variable.name = self.declare(variable.name)
                function.variables[variable.name] = variable
            elif text == ".pragma":
                while self.take() != ";":
                    pass
            elif self.tokens[self.next + 1].text == ":":
                label = self.declare(self.take())
                self.expect(":")
                if self.accept(".branchtargets"):
                    function.tables[label] = tuple(self.listed(self.take, ";"))
                else:
                    function.labels[label] = len(function.code)
            else:
                function.code.append(self.instruction())
        self.scopes.pop()

    def declare(self, name: str) -> str:
        """Give a name declared in inner braces one of its own."""
        if len(self.scopes) > 1:
            self.scopes[-1][name] = f"{name}@{self.scope_count}"
        return self.named(name)

    def named(self, name: str) -> str:
        return next((s[name] for s in reversed(self.scopes) if name in s), name)

    def register(self) -> list[str]:
        name = self.take()
        if self.accept("<"):
            count = int(self.take())
            self.expect(">")
            return [f"{name}{i}" for i in range(count)]
        return [self.declare(name)]

    # Instructions

    def instruction(self) -> Instruction:
        start, guard = self.next, ""
        if self.accept("@"):
            guard = "!" if self.accept("!") else ""
            guard += self.named(self.take())
        opcode = self.take()
        operands = self.listed(self.operand, ";")
        tokens = self.tokens[start : self.next]
        text = re.sub(r" (?=[,;\]}+|>])|(?<=[\[{+@!|<-]) ", "", " ".join(t.text for t in tokens))
        return Instruction(
            opcode, tuple(operands), guard, tokens[0].line, self.source, text.rstrip(";")
        )

    def operand(self) -> object:
        token = self.tokens[self.next]
        text = self.take()
        if text == "{":
            return tuple(self.listed(self.operand, "}"))
        if text == "(":
            return tuple(self.listed(self.operand, ")"))
        if text == "[":
            address = self.operand()
            offset = 0
            if not isinstance(address, str):
                address, offset = "", address
            while not self.accept("]"):
                if self.accept(","):  # the place in a texture
                    self.operand()
                    continue
                sign = -1 if self.accept("-") else 1
                self.accept("+")
                sign = -1 if self.accept("-") else sign
                offset += sign * self.operand()
            return Address(address, offset)
        if text == "-":
            return -self.operand()
        if text == "!":
            return "!" + self.operand()
        if token.kind == "number":
            return _number(text)
        name = self.named(text)
        return (name, self.operand()) if self.accept("|") else name


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


def _number(text: str) -> int | float:
    if text[:2] in {"0f", "0F"}:
        return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
    if text[:2] in {"0d", "0D"}:
        return struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    return int(text.rstrip("U"), 0)


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


def _bytes(value: float, kind: str) -> bytes:
    if isinstance(value, float):
        return struct.pack("<f" if width(kind) == 4 else "<d", value)
    return (value % (1 << 8 * width(kind))).to_bytes(width(kind), "little")


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """Parse one PTX text.

    Raises
    ------
    PtxError
        The text is not the PTX that NVRTC emits.
    """
    return _Parser(text).parse()
