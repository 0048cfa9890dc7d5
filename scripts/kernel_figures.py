"""What can be said of a kernel without running it: occupancy, waves, loads in flight, its bound.

The GPU is an H100 SXM; docs/kernels.md says how each figure is made and how far to trust it.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

ARCH = 90
SMS = 132
CLOCK = 1.755e9  # Hz, boost
ISSUED = 4  # warp instructions a cycle of an SM
FLOPS = SMS * ISSUED * 32 * 2 * CLOCK  # a second: all lanes multiply and add
BANDWIDTH = 3.35e12  # bytes a second, HBM3
L2_BANDWIDTH = 5.5e12  # bytes a second, reads that hit
NEEDED_IN_FLIGHT = 32 << 10  # bytes an SM must have asked for to keep the memory busy

_REGISTERS, _REGISTERS_UNIT = 65536, 256  # of an SM; a warp gets whole units
_THREADS, _BLOCKS, _WARP = 2048, 32, 32
_SHARED, _SHARED_RESERVED, _SHARED_UNIT = 228 << 10, 1 << 10, 128


class Residency(NamedTuple):
    """How a launch lies on the GPU."""

    occupancy: float  # of the warps that an SM can hold
    waves: float  # times that all SMs are filled
    threads: int  # resident on an SM that is as full as this launch makes it


def blocks_per_sm(registers: int, shared: int, block: int) -> int:
    """Blocks of `block` threads that an SM holds at once."""
    warps = -(-block // _WARP)
    unit = -(-max(1, registers) * _WARP // _REGISTERS_UNIT) * _REGISTERS_UNIT
    by_registers = _REGISTERS // unit // 4 * 4 // warps  # a quarter of them to each scheduler
    taken = -(-(shared + _SHARED_RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
    return min(by_registers, _SHARED // taken, _THREADS // (warps * _WARP), _BLOCKS)


def residency(registers: int, shared: int, block: int, blocks: int) -> Residency:
    """A grid of `blocks` on all SMs."""
    held = blocks_per_sm(registers, shared, block)
    if held == 0:
        return Residency(0.0, 0.0, 0)
    warps = -(-block // _WARP)
    here = min(held, -(-blocks // SMS))
    return Residency(held * warps * _WARP / _THREADS, blocks / (held * SMS), here * block)


# Loads in flight

_ASIDE = re.compile(r"//[^\n]*|^\s*\.loc[^\n]*", re.MULTILINE)  # comments, line numbers
_STATEMENT = re.compile(r"(?P<guard>@!?%\w+\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.S)
_GLOBAL_LOAD = re.compile(r"ld(?!\.(param|shared|local|const))[\w.:]*\.[a-z]+(\d+)$")
_NO_RESULT = {"st", "red", "bra", "bar", "barrier", "ret", "cp", "membar", "fence", "prefetch"}


class _Path:
    """Loads that one way through a kernel has asked for and not needed yet."""

    def __init__(self, asked: dict[int, int], waiting: dict[str, int]) -> None:
        self.asked = asked  # number of a load -> bytes
        self.waiting = waiting  # register -> number of the load that fills it

    def __len__(self) -> int:
        return sum(self.asked.values())

    def fork(self) -> _Path:
        return _Path(dict(self.asked), dict(self.waiting))

    def arrive(self, last: int) -> None:
        """Wait for load `last`, and with it for those before."""
        self.asked = {i: size for i, size in self.asked.items() if i > last}
        self.waiting = {register: i for register, i in self.waiting.items() if i > last}

    def step(self, number: int, opcode: str, operands: str, guard: str) -> None:
        """Take one instruction."""
        result, sources = _split(operands) if _kind(opcode) not in _NO_RESULT else ("", operands)
        written = re.findall(r"%\w+", result)
        read = re.findall(r"%\w+", sources + guard)
        needed = max((self.waiting[name] for name in read if name in self.waiting), default=-1)
        if _kind(opcode) == "mov" and needed >= 0:  # another name for what is on its way
            self.waiting |= dict.fromkeys(written, needed)
            return
        self.arrive(number if opcode.startswith("cp.async.wait") else needed)
        for name in written:
            self.waiting.pop(name, None)
        if size := _bytes_loaded(opcode, operands):
            self.asked[number] = size
            self.waiting |= dict.fromkeys(written, number)


def loads_in_flight(ptx: str, name: str) -> int:
    """Bytes that a thread of kernel `name` asks global memory for before it needs any of them.

    Loads add up along a way through the text until an instruction reads one of their results, which
    waits for it and for those before it; `cp.async` until its wait. Branches are followed forward
    alone, so that a loop is gone through once; where ways meet, the one with more under way goes
    on. The largest sum counts.
    """
    body = re.search(rf"\.entry {name}\(.*?^}}", _ASIDE.sub("", ptx), re.DOTALL | re.MULTILINE)
    if body is None:
        raise ValueError(f"loads_in_flight: there must be a kernel '{name}', found none.")
    statements, labels = [], {}
    for text in body[0].split("{", 1)[1].split(";"):
        start = re.match(r"(\s|[{}]|[$\w]+:)*", text)
        labels |= dict.fromkeys(re.findall(r"([$\w]+):", start[0]), len(statements))
        if statement := _STATEMENT.fullmatch(text[start.end() :].strip()):
            statements.append(
                (statement["opcode"], statement["operands"], statement["guard"] or "")
            )
    most, paths = 0, {0: _Path({}, {})}
    for i, (opcode, operands, guard) in enumerate(statements):
        if i not in paths:
            continue
        path = paths.pop(i)
        path.step(i, opcode, operands, guard)
        most = max(most, len(path))
        follow = [i + 1]
        if _kind(opcode) in ("bra", "ret", "exit") and not guard:
            follow = []
        if _kind(opcode) == "bra":
            follow += [at for at in [labels.get(operands.strip(), -1)] if at > i]
        for at in follow:
            if at not in paths or len(paths[at]) < len(path):
                paths[at] = path.fork() if len(follow) > 1 else path
    return most


def copies_in_flight(ptx: str, classes: dict[str, int]) -> float:
    """Bytes of `cp.async` that a thread has under way at each wait, by the counts of a launch.

    A loop that waits only behind it has the copies of all its turns under way.
    """
    waits = sum(n for opcode, n in classes.items() if opcode.startswith("cp.async.wait"))
    total = 0
    for opcode, n in classes.items():
        if opcode.startswith(("cp.async.ca", "cp.async.cg")):
            sizes = re.findall(rf"{re.escape(opcode)}\s+\[[^,]+,[^,]+,\s*(\d+)", ptx)
            total += n * max(map(int, sizes))
    return total / max(1, waits)


def _kind(opcode: str) -> str:
    return opcode.split(".")[0]


def _split(operands: str) -> tuple[str, str]:
    """The result, which may be a vector in braces, and the rest."""
    end = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    return (operands[:end], operands[end:]) if end > 0 else (operands, "")


def _bytes_loaded(opcode: str, operands: str) -> int:
    if opcode.startswith(("cp.async.ca", "cp.async.cg")):  # destination, source, bytes
        return int(operands.split(",")[2])
    load = _GLOBAL_LOAD.fullmatch(opcode)
    if not load:
        return 0
    vector = re.search(r"\.v(\d)\.", opcode)
    return int(load[2]) // 8 * int(vector[1] if vector else 1)


# What bounds it

_FLOPS = dict.fromkeys(
    ["add", "sub", "mul", "div", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"], 1
) | {"fma": 2}  # fmt: skip
_FLOAT = re.compile(r"b?f(16|32|64)(?P<pair>x2)?")
_TILE = re.compile(r"(?:wmma\.)?mma\..*?m(\d+)n(\d+)k(\d+)\.")


def flops(opcode: str) -> float:
    """Floating-point operations of one thread: a product and sum are two, a root or quotient one.

    Comparisons, conversions and signs are none; `mma` is shared by the threads of a warp.
    """
    if tile := _TILE.match(opcode):
        return 2 * math.prod(map(int, tile.groups())) / _WARP
    kind = _FLOAT.fullmatch(opcode.split(".")[-1])
    return _FLOPS.get(_kind(opcode), 0) * (2 if kind["pair"] else 1) if kind else 0


def bound(counts: dict[str, float], in_flight: float) -> str:
    """`memory`, `compute` or `latency`: which of three times by the counts is the longest.

    memory: all bytes at full bandwidth, those that are asked for again from L2. compute: all warp
    instructions, or the wavefronts of shared memory, at full rate. latency: the bytes read, so many
    of them under way at a time as an SM has asked for.

    Parameters
    ----------
    counts : dict
        Of `sim.Result`.
    in_flight : float
        Bytes that an SM has asked for at a time; 0 where a kernel loads nothing.
    """
    read, written = counts["bytes_read"], counts["bytes_written"]
    again = max(0, 32 * counts["sectors"] - read - written)
    cycles = max(counts["instructions"] / ISSUED, counts["shared_wavefronts"])
    seconds = {
        "memory": (read + written) / BANDWIDTH + again / L2_BANDWIDTH,
        "compute": cycles / (SMS * CLOCK),
        "latency": read / BANDWIDTH * NEEDED_IN_FLIGHT / in_flight if in_flight else 0.0,
    }
    return max(seconds, key=seconds.__getitem__)
