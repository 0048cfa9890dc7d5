"""A kernel and the functions that it calls: what all of its launches have in common."""

from __future__ import annotations

import itertools

from cupyrec.sim import access
from cupyrec.sim.ptx import Function, Instruction, Module, PtxError, names_in

__all__ = ["Program"]


class Program:
    """The code of a kernel, looked through once.

    Attributes
    ----------
    module : Module
    kernel : Function
    code : list of (Function, Instruction)
    start : dict
        Of each function the number of its first instruction.
    classes : list of str
        Of each instruction: the first part of its opcode, of ``cp`` all of it.
    used : set of str
        Registers and variables that the code or other variables name.
    grain : int
        Bytes of the narrowest access to memory.
    """

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.kernel = module, module.functions[name]
        self.functions = _reachable(module, self.kernel)
        starts = itertools.accumulate((len(f.code) for f in self.functions), initial=0)
        self.start = {f.name: at for f, at in zip(self.functions, starts, strict=False)}
        self.code = [(f, i) for f in self.functions for i in f.code]
        self.classes = [_class(i) for _, i in self.code]
        self.used = used = {name for _, i in self.code for name in names_in(i.operands)}
        while more := {n for v in module.variables.values() if v.name in used
                       for _, n in v.names} - used:  # fmt: skip
            used |= more
        widths = [
            access.nbytes(i) for _, i in self.code
            if i.parts[0] in access.MEMORY and ".param" not in i.opcode
        ]  # fmt: skip
        self.grain = min([16, *widths])


def _class(instruction: Instruction) -> str:
    root = instruction.parts[0]
    return instruction.opcode if root == "cp" else root  # copies, and waits for them


def _reachable(module: Module, kernel: Function) -> list[Function]:
    """Return a kernel and what it calls, directly or not; none may call itself.

    Raises
    ------
    PtxError
        A function calls itself, directly or through others.
    """
    calls: dict[str, list[tuple[str, Instruction]]] = {}  # of each function, in their order
    todo = [kernel.name]
    while todo:
        name = todo.pop(0)
        if name not in calls and name in module.functions:
            code = module.functions[name].code
            calls[name] = [(_callee(i), i) for i in code if i.parts[0] == "call"]
            todo += [callee for callee, _ in calls[name]]
    ended: set[str] = set()

    def follow(name: str, callers: tuple[str, ...]) -> None:
        callers = (*callers, name)
        for callee, instruction in calls.get(name, ()):
            if callee in callers:
                file, line = instruction.source
                raise PtxError(
                    f"sim: a function must not call itself, directly or through others, got "
                    f"'{callee}' (PTX line {instruction.line}, {file}:{line})."
                )
            if callee not in ended:
                follow(callee, callers)
        ended.add(name)

    follow(kernel.name, ())
    return [module.functions[name] for name in calls]


def _callee(instruction: Instruction) -> str:
    operands = instruction.operands
    return operands[-2 if len(operands) > 1 and isinstance(operands[-1], tuple) else -1]
