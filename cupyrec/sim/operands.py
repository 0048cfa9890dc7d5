"""What a kernel's instructions read and set: arrays over lanes, which stay from launch to launch.

A step keeps the arrays of its operands. `renew` gives them the values that the next launch begins
with, so that a kernel is decoded once for all launches of up to `capacity` lanes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from cupyrec.sim.program import Program
from cupyrec.sim.ptx import Function, Variable, constant, dtype_of, width

__all__ = ["Operands"]

_CHUNK = 16  # registers


class Operands:
    """Registers, special registers, addresses and constants of a kernel.

    `special` and `address`, what names stand for, are the launch's.
    """

    now: int
    special: dict[str, object]
    address: dict[tuple[str, str], int]

    def __init__(self, program: Program, capacity: int) -> None:
        self.program, self.module, self.kernel = program, program.module, program.kernel
        self.capacity = capacity
        self.registers: dict[tuple[str, str], np.ndarray] = {}
        self._chunks: list[np.ndarray] = []  # of registers, as one by one they take long to clear
        self._spare: dict[np.dtype, list[np.ndarray]] = collections.defaultdict(list)
        self.stores: dict[tuple[str, str], np.ndarray] = {}  # .param space of calls
        self._named: dict[tuple[str, str, np.dtype], np.ndarray] = {}

    def renew(self, lanes: int) -> None:
        """Begin a launch: registers are 0, names stand for what they do in this launch."""
        for chunk in self._chunks:
            chunk[:, :lanes] = 0
        for array in self.stores.values():
            array[:lanes] = 0
        for (function, name, _), array in self._named.items():
            self._name(array, function, name)

    def register(self, function: Function, name: str) -> np.ndarray:
        """All lanes of a register."""
        made = self.registers.get((function.name, name))
        if made is None:
            kind = function.registers[name]
            kind = kind if kind == "pred" else f"b{8 * width(kind)}"
            made = self.registers[function.name, name] = self._new(dtype_of(kind))
        return made

    def carry(self) -> np.ndarray:
        """All lanes of the bit that sums carry."""
        if ("", "carry") not in self.registers:
            self.registers["", "carry"] = self._new(np.dtype(bool))
        return self.registers["", "carry"]

    def _new(self, dtype: np.dtype) -> np.ndarray:
        spare = self._spare[dtype]
        if not spare:
            self._chunks.append(np.zeros((_CHUNK, self.capacity), dtype))
            spare.extend(self._chunks[-1])
        return spare.pop()

    def source(self, function: Function, operand: object, kind: str) -> np.ndarray:
        """All lanes of an operand, read as `kind`; a view where it is a register."""
        dtype = dtype_of(kind)
        if isinstance(operand, str):
            if operand.startswith("!"):
                return _Inverted(self.register(function, operand[1:]))
            if operand in function.registers:
                register = self.register(function, operand)
                ratio = register.itemsize // dtype.itemsize
                return register.view(dtype)[::ratio] if ratio > 1 else register.view(dtype)
            if operand.startswith("%clock") or operand == "%globaltimer":
                return _Clock(self, dtype)
            return self._source_named(function, operand, dtype)
        return self.everywhere(constant(operand, kind))

    def _source_named(self, function: Function, name: str, dtype: np.dtype) -> np.ndarray:
        """A special register, or the address of a variable."""
        key = (function.name, name, dtype)
        if key not in self._named:
            alike = np.ndim(self._meaning(function.name, name)) == 0
            array = np.empty(() if alike else self.capacity, dtype)
            self._name(array, function.name, name)
            self._named[key] = array
        array = self._named[key]
        return array if array.ndim else self.everywhere(array)

    def _meaning(self, function: str, name: str) -> object:
        """What a name stands for in this launch."""
        value = self.special.get(name)
        return self.place(function, name) if value is None else value

    def _name(self, array: np.ndarray, function: str, name: str) -> None:
        value = np.asarray(self._meaning(function, name)).astype(array.dtype)
        array[(slice(value.size),) if array.ndim else ()] = value

    def everywhere(self, value: np.ndarray) -> np.ndarray:
        """One value for all lanes: `numpy.broadcast_to`, but 50 times faster."""
        return np.ndarray(self.capacity, value.dtype, value, 0, (0,))

    def place(self, function: str, name: str) -> int:
        """Address of a variable, in its own space."""
        for key in ((function, name), ("", name)):
            if key in self.address:
                return self.address[key]
        raise KeyError(name)

    def variable(self, function: Function, name: str) -> Variable | None:
        """Declaration behind a name."""
        return function.variables.get(name) or self.module.variables.get(name)

    def store(self, function: Function, name: str, size: int) -> np.ndarray:
        """(capacity, size) bytes of a variable in the .param space of a call."""
        key = (function.name, name)
        if key not in self.stores:
            self.stores[key] = np.zeros((self.capacity, size), np.uint8)
        return self.stores[key]

    def sink(self, function: Function, name: str, kind: str) -> Callable:
        """Return put(t, values), which sets a register, sign- or zero-extending to its width."""
        if name == "_":
            return lambda t, values: None
        register, dtype = self.register(function, name), dtype_of(kind)
        if register.itemsize > dtype.itemsize:
            wide = np.dtype(f"{dtype.kind.replace('f', 'u')}{register.itemsize}")
            view = register.view(wide)

            def put(t: slice, values: np.ndarray) -> None:
                narrow = np.asarray(values, dtype)
                view[t] = narrow.view(f"u{dtype.itemsize}") if dtype.kind == "f" else narrow

            return put
        view = register.view(dtype)
        return view.__setitem__


class _Inverted:
    """``!%p`` as an array to index."""

    def __init__(self, register: np.ndarray) -> None:
        self.register = register

    def __getitem__(self, t: slice | np.ndarray) -> np.ndarray:
        return ~self.register[t]


class _Clock:
    """``%clock``: the machine's time."""

    def __init__(self, operands: Operands, dtype: np.dtype) -> None:
        self.operands, self.dtype = operands, dtype

    def __getitem__(self, t: slice | np.ndarray) -> np.ndarray:
        return np.full(self.operands.capacity, self.operands.now).astype(self.dtype)[t]
