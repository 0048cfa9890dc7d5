import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupyrec

ROOT = Path(__file__).parents[1]


def python(script: str) -> list[str]:
    """Words that a script prints in an interpreter of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_import_alone_loads_nothing_heavy():
    loaded = python("import sys, cupyrec; print(*{name.split('.')[0] for name in sys.modules})")
    assert "cupyrec" in loaded
    assert not {"numpy", "numba", "cupy", "mpi4py", "pyarrow"} & set(loaded)


def test_what_a_run_in_python_needs_is_there_at_first():
    names = "fit Progress RunFolder checkpoint metrics data models optim nn Tensor".split()
    assert set(names) <= set(dir(cupyrec))
    for name in ("checkpoint.save", "checkpoint.load", "RunFolder", "Progress", "metrics.auc"):
        assert python(f"import cupyrec; print(callable(cupyrec.{name}))") == ["True"]


def test_every_public_name_is_what_its_module_has():
    for name in cupyrec.__all__:
        value = getattr(cupyrec, name)
        if name in cupyrec._HOME:
            home = importlib.import_module(f"cupyrec.{cupyrec._HOME[name]}")
            assert value is getattr(home, name)
        else:
            assert value is sys.modules[f"cupyrec.{name}"]


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"^module 'cupyrec' has no attribute 'fitt'\.$"):
        _ = cupyrec.fitt
