"""PTX, as NVRTC writes it, to functions of instructions."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from pathlib import PurePath
from typing import NamedTuple

from cupyrec.sim.ptx import (
    NUMBER,
    TOKEN,
    WORD,
    Address,
    Function,
    Instruction,
    Module,
    PtxError,
    Variable,
    width,
)

__all__ = ["parse"]

SPACES = {".global", ".const", ".shared", ".local", ".param"}
SKIP = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
# Most instructions as a whole: neither labels nor those with a comment or brackets in brackets.
WITHIN = r"[\w\s$%.,|+-]*"
ONE = rf"[!-]?(?:{NUMBER}|{WORD})(?![\w$%.|])|{WORD}\|{WORD}"
OPERAND = rf"(?:{ONE}|\[{WITHIN}\]|{{{WITHIN}}}|\({WITHIN}\))"
STATEMENT = re.compile(
    rf"(?:@(!?{WORD})\s+)?([a-z](?:[\w$.%]|::)*)(?:\s+({OPERAND}(?:\s*,\s*{OPERAND})*))?\s*;"
)
OPERANDS = re.compile(OPERAND)
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)


class Token(NamedTuple):
    """A piece of text, the line on which it stands, and where it begins."""

    kind: str
    text: str
    line: int
    start: int


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.end, self.line = text, 0, 1  # up to where it is read
        self.over = False
        self.ahead: list[Token] = []  # read, but not taken
        self.files = dict(FILE.findall(text))
        self.names = {number: PurePath(path).name for number, path in self.files.items()}
        self.module = Module({}, {})
        self.scopes: list[dict[str, str]] = []  # names that inner braces give registers and labels
        self.scope_count = 0
        self.inlined: dict[tuple[str, str], tuple[str, str] | None] = {}
        self.source = ("", 0)

    # Tokens

    def read(self) -> Token:
        """Read the next token; the last one is empty."""
        text = self.text
        line, start = self.skip()
        match = TOKEN.match(text, start)
        if match is not None:
            self.go_to(match.end())
            return Token(match.lastgroup, match[0], line, start)
        if start < len(text):
            raise PtxError(f"sim: PTX must be readable, got '{text[start:start + 40]}' "
                           f"on PTX line {line}.")  # fmt: skip
        if self.over:
            raise IndexError("no more tokens")
        self.over = True
        return Token("end", "", 0, start)

    def skip(self) -> tuple[int, int]:
        """Go to what is next but space and comments; return its line and where it begins."""
        self.go_to(SKIP.match(self.text, self.end).end())
        return self.line, self.end

    def go_to(self, end: int) -> None:
        self.line += self.text.count("\n", self.end, end)
        self.end = end

    def token(self, i: int = 0) -> Token:
        """Return the next token, or the i-th after it."""
        while len(self.ahead) <= i:
            self.ahead.append(self.read())
        return self.ahead[i]

    def peek(self) -> str:
        return self.token().text

    def take(self) -> str:
        text = self.token().text
        del self.ahead[0]
        return text

    def accept(self, *texts: str) -> bool:
        found = self.peek() in texts
        if found:
            del self.ahead[0]
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise PtxError(f"sim: PTX must have '{text}' on PTX line {self.token().line}, "
                           f"got '{self.peek()}'.")  # fmt: skip

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
                line = self.token().line
                if text == ".target":
                    self.module.arch = int(re.sub(r"\D", "", self.token(1).text) or 0)
                while self.token().line == line:
                    self.take()
            elif text == ".section":
                self.go_to(self.text.index("}", self.end) + 1)
                self.ahead.clear()
            elif text in {".visible", ".extern", ".weak", ".common"} or self.is_location():
                self.take()
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
        token = self.token()
        if token.kind == "loc":
            words = token.text.replace(",", " ").split()
            place = (words[1], words[2])
            outer = words.index("inlined_at") if "inlined_at" in words else 0
            self.inlined[place] = (words[outer + 1], words[outer + 2]) if outer else None
            seen = set()
            while "/include/" in self.files.get(place[0], "") and place not in seen:
                seen.add(place)
                place = self.inlined.get(place) or place
            self.source = (self.names.get(place[0], ""), int(place[1]))
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
        while True:
            while outermost and (instruction := self.statement()):
                function.code.append(instruction)
            if self.accept("}"):
                break
            text = self.peek()
            if self.is_location():
                self.take()
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
            elif self.token(1).text == ":":
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

    def statement(self) -> Instruction | None:
        """An instruction of outer braces, in one go."""
        if self.ahead:
            _, _, line, start = self.ahead[0]
        else:
            line, start = self.skip()
        match = STATEMENT.match(self.text, start)
        if match is None:
            return None
        self.ahead.clear()
        self.go_to(match.end())
        guard, opcode, operands = match.groups()
        parsed = tuple(map(_operand, OPERANDS.findall(operands))) if operands else ()
        return Instruction(opcode, parsed, guard or "", line, self.source, match[0])

    def instruction(self) -> Instruction:
        first, guard = self.token(), ""
        if self.accept("@"):
            guard = "!" if self.accept("!") else ""
            guard += self.named(self.take())
        opcode = self.take()
        operands = self.listed(self.operand, ";")
        text = self.text[first.start : self.end]
        return Instruction(opcode, tuple(operands), guard, first.line, self.source, text)

    def operand(self) -> object:
        kind, text = self.token()[:2]
        del self.ahead[0]
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
        if kind == "number":
            return _number(text)
        name = self.named(text)
        return (name, self.operand()) if self.accept("|") else name


@functools.lru_cache(maxsize=1 << 14)  # kernels call their registers alike
def _operand(text: str) -> object:
    return _Parser(text).operand()


def _number(text: str) -> int | float:
    if text[:2] in {"0f", "0F"}:
        return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
    if text[:2] in {"0d", "0D"}:
        return struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    return int(text.rstrip("U"), 0)


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
