"""Arguments of a launch: the bytes that its kernel takes; NumPy's arrays are buffers meanwhile."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyrec.sim.array import ndarray
from cupyrec.sim.heap import Allocation, Heap
from cupyrec.sim.ptx import Address, Function, Variable

__all__ = ["Arguments"]


class _Buffer(NamedTuple):
    """A NumPy array, which is argument `index` and perhaps others, in the simulator's memory."""

    index: int
    value: np.ndarray
    made: Allocation

    def holds(self, value: np.ndarray) -> bool:
        """Whether another argument is the same array."""
        if np.ma.isMaskedArray(self.value) or np.ma.isMaskedArray(value):
            return self.value is value
        return _layout(self.value) == _layout(value)

    def overlaps(self, value: np.ndarray) -> bool:
        """Whether another array has bytes of this one."""
        try:
            return np.shares_memory(self.value, value, max_work=1 << 20)
        except np.exceptions.TooHardError:
            return True


class Arguments:
    """Arguments of one launch; `params` are their bytes."""

    def __init__(self, heap: Heap, kernel: Function, args: tuple[Any, ...]) -> None:
        if len(args) != len(kernel.params):
            raise ValueError(
                f"sim.run: 'args' must have {len(kernel.params)} values, got {len(args)}."
            )
        self.heap, self.params = heap, b""
        self._buffers: list[_Buffer] = []
        try:
            for i, (value, param) in enumerate(zip(args, kernel.params, strict=True)):
                if isinstance(value, (ndarray, np.ndarray)):
                    raw = np.int64(self._address(i, value, param)).tobytes()
                else:
                    raw = _scalar(f"'args[{i}]'", value, param, kernel)
                place = -(-len(self.params) // param.align) * param.align
                self.params = self.params.ljust(place, b"\0") + raw
        except BaseException:
            self.close()
            raise

    def _address(self, index: int, value: ndarray | np.ndarray, param: Variable) -> int:
        where = f"'args[{index}]'"
        if param.size != 8 or param.kind[0] == "f":
            raise TypeError(
                f"sim.run: {where} must be a scalar of the {param.size} bytes that the kernel "
                "takes, got an array."
            )
        if isinstance(value, ndarray):
            if not value.flags.c_contiguous:
                raise ValueError(
                    f"sim.run: {where} must be C-contiguous, got strides {value.strides}."
                )
            return value.__cuda_array_interface__["data"][0]
        if value.dtype.hasobject:
            raise TypeError(f"sim.run: {where} must hold numbers, got dtype {value.dtype}.")
        if not value.dtype.isnative:
            raise TypeError(
                f"sim.run: {where} must have the byte order of this machine, "
                f"got dtype '{value.dtype.str}'."
            )
        if np.ma.isMaskedArray(value) and value.hardmask:  # which would hide what a kernel writes
            raise ValueError(f"sim.run: {where} must have a soft mask, got a hard one.")
        for buffer in self._buffers:
            if buffer.holds(value):
                return buffer.made.address
            if buffer.overlaps(value):
                raise ValueError(
                    f"sim.run: {where} must be the array that 'args[{buffer.index}]' is or share "
                    "no memory with it, got another view of it."
                )
        return self._buffer(index, value).address

    def _buffer(self, index: int, value: np.ndarray) -> Allocation:
        made = self.heap.allocate(value.nbytes, f"argument {index}")
        self._buffers.append(_Buffer(index, value, made))
        data = np.ma.getdata(value)
        self.heap.write(made, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        if isinstance(value, np.ma.MaskedArray):
            hidden = np.ma.getmaskarray(value)
            if hidden.dtype == bool:  # of records each field has a mask
                self._written(made, value)[hidden] = 0
            else:
                self._written(made, value)[...] = 0
        return made

    def _written(self, made: Allocation, value: np.ndarray) -> np.ndarray:
        """Whether each byte is written: one more axis, of the bytes of an item."""
        start = made.address - self.heap.base
        written = self.heap.written[start : start + made.size]
        return written.reshape(*value.shape, value.itemsize)

    def collect(self, changed: set[int]) -> None:
        """Copy home the buffers at these addresses, which the launch wrote."""
        fixed = []
        for index, value, made in self._buffers:
            if made.address not in changed:
                continue
            if not value.flags.writeable:
                fixed.append(index)
                continue
            data = self.heap.view(made).view(value.dtype).reshape(value.shape)
            np.copyto(np.ma.getdata(value), data)
            if isinstance(value, np.ma.MaskedArray):
                value.mask = ~self._written(made, value).astype(bool).all(axis=-1)
        if fixed:
            raise ValueError(
                f"sim.run: 'args[{fixed[0]}]' must be writeable, as the kernel writes to it, "
                "got a read-only array."
            )

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers:
            self.heap.free(buffer.made)


def _layout(value: np.ndarray) -> tuple:
    return value.ctypes.data, value.shape, value.strides, value.dtype


def _scalar(where: str, value: Any, param: Variable, kernel: Function) -> bytes:
    if not isinstance(value, np.generic):
        raise TypeError(
            f"sim.run: {where} must be an array or a NumPy scalar, got {type(value).__name__}."
        )
    raw = value.tobytes()
    kind, theirs = value.dtype.kind, param.kind[0]
    alike = {"f": kind == "f", "u": kind in "biu", "s": kind in "biu"}.get(theirs, True)
    if len(raw) == param.size and alike:
        return raw
    if _is_address(kernel, param.name):
        raise TypeError(
            f"sim.run: {where} must be an array, as the kernel takes an address, got {value.dtype}."
        )
    if len(raw) != param.size:
        raise TypeError(
            f"sim.run: {where} must have the {param.size} bytes that the kernel takes, "
            f"got {len(raw)}."
        )
    word = "a floating-point number" if theirs == "f" else "an integer"
    raise TypeError(f"sim.run: {where} must be {word}, as the kernel takes one, got {value.dtype}.")


def _is_address(kernel: Function, name: str) -> bool:
    """Whether a parameter is used as an address of global memory."""
    registers = set()
    for instruction in kernel.code:
        operands = instruction.operands
        if "param" in instruction.parts and operands[1:] == (Address(name, 0),):
            registers.add(operands[0])
        elif instruction.parts[0] == "cvta" and operands[-1] in registers:
            return True
        elif any(isinstance(o, Address) and o.base in registers for o in operands):
            return True
    return False
