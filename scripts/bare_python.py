"""Run a script or module where packages are missing that it imports but can do without.

    python scripts/bare_python.py scripts/gpu_train.py --batch 1024
    python scripts/bare_python.py -m pytest -m gpu tests/test_gather_kernels.py

An image with a GPU and no network has CuPy and pytest, but hardly what readers, progress bars and
checkpoints need. What is missing is named on stderr; its place is taken by modules that give any
name. Calling one from them skips the test that does, and stops a script. Hypothesis' tests vanish.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import unittest
from types import ModuleType
from typing import Any
from unittest import mock

NEEDLESS = ["hypothesis", "pyarrow", "safetensors", "threadpoolctl", "tqdm"]
HARMLESS = ["hypothesis", "threadpoolctl"]  # may be called: decorators, limits that nothing has


class NotInstalled(unittest.SkipTest):
    """Something of a missing package was called; pytest skips the test."""


class _Name:
    """Any name of a missing package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> _Name:
        return _Name(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotInstalled(f"{self.name}: {self.name.partition('.')[0]} is not installed.")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = f"{self.__name__}.{name}"
        return mock.MagicMock(name=own) if own.partition(".")[0] in HARMLESS else _Name(own)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, missing: list[str]) -> None:
        self.missing = missing

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    missing = [name for name in NEEDLESS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed, done without: {', '.join(missing)}", file=sys.stderr)
        sys.meta_path.append(_Finder(missing))
    arguments = sys.argv[1:]
    if arguments[:1] == ["-m"]:
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments[:1] == ["-c"]:
        exec(arguments[1], {})
    else:
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
