"""Compiled loops are kept, known by all sources, and compiled by one of several processes."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

from cupyrec import cpu, loop_cache


def test_every_file_with_loops_has_a_part_in_what_the_cache_is_known_by(monkeypatch):
    """A change of any decorated function, inlined ones too, must change it."""
    folder = Path(cpu.__file__).parent
    names = r"loop|exact_loop|exact_inline|elementwise\(.*\)"
    decorated = re.compile(rf"^@(cpu\.)?({names})$", re.MULTILINE)
    files = [f for f in folder.rglob("*.py") if decorated.search(f.read_text())]
    assert len(files) > 20
    seen = []
    digest = hashlib.sha256

    def watch(text=b""):
        seen.append(text)
        return digest(text)

    monkeypatch.setattr(loop_cache.hashlib, "sha256", watch)
    loop_cache._sources.__wrapped__()
    assert not [file for file in files if file.read_bytes() not in seen[-1]]


INNER = """
from cupyrec import cpu
@cpu.exact_loop
def add(x):
    return x + 1
"""
OUTER = """
from cupyrec import cpu
from cupyrec.inner import add
@cpu.exact_loop
def twice(x):
    return add(add(x))
"""
PROGRAM = """
from cupyrec.outer import twice
print(twice(5), sum(twice.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    """Another cupyrec, of two loops in two files, and how to run it."""
    source = Path(cpu.__file__).parent
    (tmp_path / "cupyrec").mkdir()
    (tmp_path / "cupyrec/inner.py").write_text(INNER)
    (tmp_path / "cupyrec/outer.py").write_text(OUTER)
    for name in ("activity.py", "cpu.py", "errors.py", "loop_cache.py"):
        shutil.copy(source / name, tmp_path / "cupyrec")
    (tmp_path / "cupyrec/__init__.py").touch()
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(home), "HOME": str(home)}

    def run(**more):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=environment | more, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return (*map(int, done.stdout.split()), done.stderr)

    return tmp_path / "cupyrec", run


def test_cache_sees_a_change_of_what_a_loop_inlines(package):
    folder, run = package
    assert [run(), run()] == [(7, 0, ""), (7, 1, "")]
    home = folder.parent / "home"
    kept = sorted(file.suffix for file in home.rglob("*.nb?"))
    assert ".nbc" in kept
    assert not list(folder.rglob("*.nb?"))  # what outlives an uninstall hides the next install
    (folder / "inner.py").write_text(INNER.replace("x + 1", "x + 30"))
    assert run() == (65, 0, "")
    assert sorted(file.suffix for file in home.rglob("*.nb?")) == kept
    (folder / "plain.py").write_text("x = 1")  # holds no loop
    assert run() == (65, 1, "")


def test_cache_goes_where_it_can(package):
    folder, run = package
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    (folder / "__pycache__").touch()  # even root cannot make a folder of that name
    assert [run(), run()] == [(7, 0, ""), (7, 1, "")]  # in the user's cache folder
    other = str(folder.parent / "other")
    assert [run(NUMBA_CACHE_DIR=other)[1] for _ in range(2)] == [0, 1]
    nowhere = str(folder / "__pycache__")
    got = run(XDG_CACHE_HOME=nowhere, HOME=nowhere)
    assert got[:2] == (7, 0)
    assert got[2].count("found no folder to keep the compiled CPU loops in") == 1


WHOLE = """
import numpy as np
import cupyrec.sim, cupyrec.cli
from cupyrec.ops.unique_keys import unique_keys
cupyrec.sim.rounding.multiply_add(2.0, 3.0, 4.0)
unique_keys(np.zeros(3, np.uint32), np.arange(3))
"""


def test_nothing_is_written_into_the_package(tmp_path):
    """What pip did not write it doesn't remove: the folder stays and hides an editable install."""
    source, folder = Path(cpu.__file__).parent, tmp_path / "cupyrec"
    for name in ("cupyrec", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source.parent / name, tmp_path / name, ignore=ignored)
    before = sorted(folder.rglob("*"))
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= {name: str(tmp_path) for name in ("PYTHONPATH", "XDG_CACHE_HOME", "HOME")}
    command = [sys.executable, "-B", "-c", WHOLE]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*")) == before
    kept = {file.name.split("-")[0] for file in tmp_path.rglob("*.nbc")}
    assert len([name for name in kept if name.startswith("cupyrec.sim.rounding.")]) == 3
    assert len(kept) > 3
    sources = [file for file in before if file.suffix == ".py"]
    assert not [file for file in sources if "cache=True" in file.read_text()]


def test_numbas_own_cache_is_left_alone():
    assert numba.core.dispatcher.FunctionCache is not loop_cache.LoopCache
    assert not numba.njit(lambda x: x)._cache.cache_path


def test_one_of_several_processes_compiles(package):
    _, run = package
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run) for _ in range(3)]
    assert sorted(done.result()[:2] for done in runs) == [(7, 0), (7, 1), (7, 1)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Looks for a loop that nobody compiled, as a process of its own would."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    target = numba.njit(lambda: 0).targetctx
    caches = []

    def call():
        caches.append(loop_cache.LoopCache(test_whoever_waits_too_long_compiles_too))
        start = time.monotonic()
        assert caches[-1].load_overload((), target) is None
        return time.monotonic() - start

    yield call
    for cache in caches:
        cache._leave_lock()


def test_whoever_waits_too_long_compiles_too(load, monkeypatch):
    load()
    monkeypatch.setattr(loop_cache, "_PATIENCE", 0.3)
    assert load() >= 0.3


def test_nobody_waits_for_a_process_that_was_killed(load):
    child = os.fork()
    if not child:
        try:
            load()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert load() < loop_cache._PATIENCE / 2


def test_without_locks_every_process_compiles(load, monkeypatch):
    load()
    monkeypatch.setattr(loop_cache.fcntl, "flock", no_locks)
    assert load() < loop_cache._PATIENCE / 2


def no_locks(file, how):
    raise OSError(38, "Function not implemented")
