"""The sizes that bench_kernels.py makes its cases at: their own, or those of ``--shape``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import NamedTuple

from kernel_cases import CASES

NAMES = {"batch": "B", "samples": "B", "features": "F", "width": "D"}  # as cases call them


class Shape(NamedTuple):
    """What a case is made with besides the array module; `more` is by keyword."""

    batch: int
    width: int
    more: dict[str, int]


def parsed(text: str) -> dict[str, int]:
    """``B=256,D=64`` by name.

    Raises
    ------
    ValueError
        It has a name that no case has, one twice, or what is no integer of at least 1.
    """
    asked: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in NAMES.values() or name in asked:
            raise ValueError(
                f"bench_kernels: '--shape' must name sizes among B, F and D, each once, as in "
                f"B=256,D=64, got {text!r}."
            )
        if not (size.isascii() and size.isdecimal()) or int(size) < 1:
            raise ValueError(
                f"bench_kernels: '--shape' must give {name} an integer of at least 1, got {size!r}."
            )
        asked[name] = int(size)
    return asked


def sizes(kernel: str) -> dict[str, str]:
    """Which parameter of a case each of its sizes sets."""
    make, widths = CASES[kernel]
    has = [name for name in inspect.signature(make).parameters if name != "width" or any(widths)]
    return {NAMES[name]: name for name in has if name in NAMES}  # samples, if there, are its B


def shapes(kernel: str, asked: dict[str, int], batch: int) -> list[Shape]:
    """The shapes to run a case at: `asked` where it says, else its widths and this batch.

    Raises
    ------
    ValueError
        The kernel has no such size.
    """
    has = sizes(kernel)
    if unknown := [name for name in asked if name not in has]:
        raise ValueError(
            f"bench_kernels: '--shape' must give {kernel} its own sizes alone, "
            f"{' and '.join(sorted(has)) or 'none'}, got {', '.join(unknown)}."
        )
    more = {has[name]: size for name, size in asked.items()}
    batch, width = more.pop("batch", batch), more.pop("width", None)
    return [Shape(batch, one, more) for one in ([width] if width else CASES[kernel][1])]


def having(asked: Iterable[str]) -> list[str]:
    """The kernels that have all of these sizes."""
    return [kernel for kernel in CASES if set(asked) <= sizes(kernel).keys()]
