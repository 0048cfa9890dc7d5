"""Execution of PTX: every register is an array over all threads of the grid.

Each step takes the lowest instruction at which a thread stands, executes it for the threads that
stand there and moves them on; divergence, reconvergence and loops follow from that rule. Now and
then others get a turn, so that threads that spin cannot starve the one they wait for. A thread's
place in the arrays, its *lane*, is a permutation of blocks, warps and threads drawn from the seed.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupyrec.sim import access, alu, atomics, barriers, carries, control, copies, mbarriers, moves
from cupyrec.sim.heap import Allocation, Heap
from cupyrec.sim.memory import Table
from cupyrec.sim.operands import Operands
from cupyrec.sim.order import Order
from cupyrec.sim.program import Program
from cupyrec.sim.ptx import Function, Instruction, Variable
from cupyrec.sim.threads import WARP, Group, Threads

__all__ = ["Fault", "Machine"]

TURN = 500  # steps after which waiting threads get a turn
QUANTUM = 60  # steps of such a turn
MAX_STEPS = 200_000  # of a launch; endless ones of few threads end within seconds
MAX_FAULTS = 100

Step = Callable[["Group"], tuple[int, "Group | None"] | None]


class Fault(NamedTuple):
    """What a kernel must not do, and the first thread seen doing it at that line."""

    kind: str
    kernel: str
    file: str
    line: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.kind} at {self.file}:{self.line}, block {self.block}, "
            f"thread {self.thread}: {self.detail}."
        )


class Machine(Operands, Threads):
    """A kernel decoded for launches of up to `capacity` threads, one launch at a time."""

    def __init__(self, program: Program, capacity: int, heap: Heap) -> None:
        super().__init__(program, capacity)
        self.heap, self.code = heap, program.code
        self.steps: list[Step | None] = [None] * len(self.code)
        self.suspects = np.empty((1 << 16, 4), np.int64)
        self.returns: dict[str, np.ndarray] = {}
        self.call_results: dict[int, list] = {}
        self.own: list[Allocation] = []
        self.arguments = np.zeros(sum(v.size + v.align for v in self.kernel.params), np.uint8)

    def begin(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], params: bytes, shared: int,
        seed: int, max_steps: int = MAX_STEPS,
    ) -> None:  # fmt: skip
        """Make ready for a launch; `params` are the bytes of its arguments."""
        Threads.__init__(self, grid, block, seed)
        self.now, self.trace, self.faults, self.max_steps = 0, [0], [], max_steps
        self._fault_keys: set[tuple] = set()
        self._allocate(params, shared)
        self.renew(self.lanes)
        self.order = Order(self.block)
        self.table = Table(self.heap, self.program.grain)
        local = np.searchsorted(self.table.starts, self.local.address)
        self.windows = {"shared": self.shared_base, "local": self.local_base}
        self.allowed = {  # index of the one allocation
            "shared": np.searchsorted(self.table.starts, self.shared_base),
            "local": np.full(self.lanes, local),
        }
        self.any_allowed = np.full(self.lanes, -1)
        self.barriers: dict[int, barriers.Barrier] = {}
        self.copies = copies.Copies(self)
        self.warp_steps = np.zeros(self.lanes // WARP, np.int64)
        # Of each instruction: warps and threads that executed it, and what they asked memory for.
        self.issued, self.threads = [0] * len(self.code), [0] * len(self.code)
        self.costs: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)

    def end(self) -> None:
        """Free what the launch allocated."""
        own, self.own = self.own, []
        for allocation in own:
            self.heap.free(allocation)

    def close(self) -> None:
        """Free all else too: steps and machine refer to each other."""
        self.end()
        vars(self).clear()

    # Memory

    def _allocate(self, params: bytes, shared: int) -> None:
        heap, used = self.heap, self.program.used
        functions = self.program.functions
        inner = {(f.name, v.name): v for f in functions for v in f.variables.values()}
        outer = {("", v.name): v for v in self.module.variables.values() if v.name in used}
        self.address: dict[tuple[str, str], int] = {}
        top, dynamic = {"shared": 0, "local": 0}, []
        for key, variable in (outer | inner).items():
            if variable.space in top and not (variable.size == 0 and variable.space == "shared"):
                start = -(-top[variable.space] // variable.align) * variable.align
                self.address[key], top[variable.space] = start, start + variable.size
            elif variable.space == "shared":
                dynamic.append(key)
            elif variable.space in {"global", "const"}:
                made = heap.allocate(variable.size, variable.name, variable.space)
                self.own.append(made)
                heap.write(made, variable.data)
                self.address[key] = made.address
        for key, variable in (outer | inner).items():
            self._link(key, variable)
        end = -(-top["shared"] // 16) * 16
        self.address |= dict.fromkeys(dynamic, end)
        self.shared_bytes = end + shared if dynamic else top["shared"] + shared
        self.frame = -(-top["local"] // 16) * 16
        blocks = int(self.block.max()) + 1
        first = len(self.own)
        for _ in range(blocks):
            self.own.append(heap.allocate(self.shared_bytes, "shared", "shared"))
        self.shared_base = np.array([w.address for w in self.own[first:]])[self.block]
        self.local = heap.allocate(self.frame * self.lanes, "local", "local")
        self.own.append(self.local)
        self.params = heap.allocate(len(params), "params", "const")
        self.own.append(self.params)
        heap.write(self.params, params)
        self.arguments[: len(params)] = np.frombuffer(params, np.uint8)
        self.special |= {"%dynamic_smem_size": shared, "%total_smem_size": self.shared_bytes}
        if "%envreg2" in used:  # where a cooperative grid meets
            meeting = heap.allocate(64, "grid", "global")
            self.own.append(meeting)
            heap.write(meeting, bytes(64))
            self.special |= {
                "%envreg1": meeting.address >> 32, "%envreg2": meeting.address & 0xFFFFFFFF,
            }  # fmt: skip
        self.local_base = self.local.address + self.frame * np.arange(self.lanes)
        place = 0
        for variable in self.kernel.params:
            place = -(-place // variable.align) * variable.align
            self.address[self.kernel.name, variable.name] = self.params.address + place
            place += variable.size

    def _link(self, key: tuple[str, str], variable: Variable) -> None:
        """Fill in the addresses that a variable begins with; functions have none."""
        for offset, name in variable.names:
            if ("", name) in self.address:
                start = self.address[key] + offset - self.heap.base
                address = np.int64(self.address["", name])
                self.heap.bytes[start : start + 8] = np.frombuffer(address.tobytes(), np.uint8)

    # Steps

    def decode(self, pc: int) -> Step:
        """Make the step of an instruction."""
        function, instruction = self.code[pc]
        try:
            step = self._lane_by_lane(function, instruction)  # most are such
            jump = None if step else control.decode(self, function, instruction, pc)
            step = jump or self._guarded(
                function, instruction,
                step
                or access.decode(self, function, instruction)
                or atomics.decode(self, function, instruction)
                or moves.decode(self, function, instruction)
                or carries.decode(self, function, instruction)
                or mbarriers.decode(self, function, instruction),
            )  # fmt: skip
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise instruction.unknown() from error
        if step is None:
            raise instruction.unknown()
        self.steps[pc] = step
        return step

    def _guarded(
        self, function: Function, instruction: Instruction, step: Step | None
    ) -> Step | None:
        if step is None or not instruction.guard:
            return step
        guard = self.source(function, instruction.guard, "pred")

        def guarded(group: Group) -> tuple | None:
            chosen = group.where(guard[group.t])
            return step(chosen) if chosen else None

        return guarded

    def _lane_by_lane(self, function: Function, instruction: Instruction) -> Step | None:
        rule = alu.decode(instruction)
        if rule is None:
            return None
        results, kinds, compute = rule
        first, *operands = instruction.operands
        targets = first if isinstance(first, tuple) else (first,)
        sinks = [
            self.sink(function, target, kind)
            for target, kind in zip(targets, results, strict=False)
        ]
        sources = [self.source(function, o, k) for o, k in zip(operands, kinds, strict=False)]
        if len(sinks) == 1 and len(sources) == 2:  # most instructions
            (put,), (a, b) = sinks, sources

            def step(group: Group) -> None:
                t = group.t
                put(t, compute(a[t], b[t]))
        elif len(sinks) == 1:
            put = sinks[0]

            def step(group: Group) -> None:
                t = group.t
                put(t, compute(*[s[t] for s in sources]))
        else:

            def step(group: Group) -> None:
                t = group.t
                for put, value in zip(sinks, compute(*[s[t] for s in sources]), strict=True):
                    put(t, value)

        return step

    # The schedule

    def run(self) -> None:
        """Run all threads to their end."""
        self.ready: dict[int, list[np.ndarray]] = {}
        self.queue: list[int] = []
        self.age: dict[int, int] = {}
        self.parked: dict[int, list[np.ndarray]] = {}  # at barriers and .sync instructions
        lanes = np.flatnonzero(self.exists)
        parts = np.zeros(self.alive.size, int)
        if self.seed:  # some blocks start later
            parts = self.random.integers(0, 3, self.alive.size)
        self.later = [lanes[parts[self.block[lanes]] == i] for i in np.unique(parts)]
        with np.errstate(all="ignore"):
            while self.queue or self._start_some() or control.release_stuck(self):
                if self.later and self.random.random() < 0.3:
                    self._start_some()
                pc = heapq.heappop(self.queue)
                if self.seed and self.queue and self.random.random() < 0.1:
                    pc = self._another(pc)
                self._advance(pc, self._take(pc), 0)

    def _start_some(self) -> bool:
        """Let the next blocks begin, if any have not."""
        if self.later:
            self.put(0, self.later.pop())
        return bool(self.queue)

    def put(self, pc: int, lanes: np.ndarray) -> None:
        """Let threads stand at an instruction."""
        if pc not in self.ready:
            self.ready[pc] = []
            self.age[pc] = self.now
            heapq.heappush(self.queue, pc)
        self.ready[pc].append(lanes)

    def _take(self, pc: int, *more: np.ndarray) -> Group:
        parts = [*self.ready.pop(pc), *more]
        lanes = np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]
        return Group(lanes)

    def _another(self, pc: int) -> int:
        """Put `pc` back and take one of those that wait, at random."""
        other = self.queue[int(self.random.integers(len(self.queue)))]
        heapq.heappush(self.queue, pc)
        return self._pull(other)

    def _pull(self, pc: int) -> int:
        self.queue.remove(pc)
        heapq.heapify(self.queue)
        return pc

    def _advance(self, pc: int, group: Group, free: int) -> None:
        """Run a group until it meets, passes or must wait for others.

        For its first `free` steps it may pass them.
        """
        steps, queue, trace = self.steps, self.queue, self.trace
        issued, threads = self.issued, self.threads
        turn, begin = self.now + TURN, self.now
        while True:
            if queue and self.now - begin >= free and pc >= queue[0]:
                self.warp_steps[group.warps] += self.now - begin
                if pc > queue[0]:
                    return self.put(pc, group.lanes)
                heapq.heappop(queue)
                group, begin, free = self._take(pc, group.lanes), self.now, 0
            if self.now >= turn and (queue or self._start_some()):
                self.warp_steps[group.warps] += self.now - begin
                self.put(pc, group.lanes)
                if not free:
                    oldest = min((p for p in queue if p != pc), key=self.age.get, default=pc)
                    self._pull(oldest)
                    self._advance(oldest, self._take(oldest), QUANTUM)
                return None
            self.now += 1
            if self.now > self.max_steps or len(self.faults) >= MAX_FAULTS:
                return self._give_up(pc, group)
            trace.append(pc)
            issued[pc] += group.warps.size
            threads[pc] += group.lanes.size
            step = steps[pc] or self.decode(pc)
            jump = step(group)
            if jump is None:
                pc += 1
            else:
                pc, after = jump
                if after is not group:
                    self.warp_steps[group.warps] += self.now - begin
                    if after is None:
                        return None
                    group, begin, free = after, self.now, max(free - (self.now - begin), 0)

    def _give_up(self, pc: int, group: Group) -> None:
        if self.now > self.max_steps:
            # what a compiler adds has no line
            pc = next((p for p in (pc, *self.trace[:0:-1]) if self.code[p][1].source[1]), pc)
            text = f"no end after {self.max_steps} steps (max_steps)"
            self.fault("endless", pc, int(group.lanes[0]), text)
        self.ready.clear()
        self.queue.clear()
        self.parked.clear()

    # Faults

    def fault(self, kind: str, pc: int, lane: int, detail: str, other: int = -1) -> None:
        """Keep the first fault of a kind at an instruction (and another one)."""
        if (kind, pc, other) in self._fault_keys:
            return
        self._fault_keys.add((kind, pc, other))
        file, line = self.code[pc][1].source
        self.faults.append(
            Fault(kind, self.kernel.name, file, line, *self.coordinates(lane), detail)
        )

    def faulted(self, kind: str, pc: int, other: int = -1) -> bool:
        """Whether such a fault is kept already."""
        return (kind, pc, other) in self._fault_keys
