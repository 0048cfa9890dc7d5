import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cupyrec import control_groups, loop_cache
from cupyrec import doctor_checks as checks


def unreadable(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_proc_that_can_not_be_read(monkeypatch):
    monkeypatch.setattr(Path, "read_text", unreadable)
    assert checks.memory().state == "missing"
    assert checks.huge_pages().found == "unknown"
    assert checks.cores().state == "ok"


@pytest.mark.parametrize(
    ("free", "limit", "state", "part"),
    [
        (8_000_000, 2**50, "ok", "8.2 of 16.4 GB available"),
        (8_000_000, 4e9, "ok", "available, 4.0 GB to this process by its control group"),
        (500_000, 2**50, "missing", "0.5 of 16.4 GB available"),
        (8_000_000, 5e8, "missing", "0.5 GB to this process"),
    ],
)
def test_memory(free, limit, state, part, monkeypatch):
    text = f"MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   {free} kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    monkeypatch.setattr(control_groups, "memory", lambda: limit)
    finding = checks.memory()
    assert finding.state == state
    assert part in finding.found


@pytest.mark.parametrize(
    ("text", "state"),
    [("always [madvise] never", "ok"), ("[always] madvise never", "ok"),
     ("always madvise [never]", "missing"), ("", "missing")],
)  # fmt: skip
def test_huge_pages(text, state, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert checks.huge_pages().state == state


def test_cores_say_what_a_control_group_gives(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(control_groups, "cores", lambda: 1.5)
    assert "4 of" in checks.cores().found
    assert checks.cores().found.endswith("of which a control group gives 1.5")


def test_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finding = checks.this_folder()
    assert finding.found.startswith(f"{tmp_path}: ")
    assert finding.state == ("ok" if finding.found.endswith(", direct reads") else "missing")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_writable(monkeypatch):
    monkeypatch.chdir("/proc")
    finding = checks.this_folder()
    assert finding.state == "missing"
    assert "not writable" in finding.found


def test_a_folder_that_refuses_direct_reads(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    finding = checks.this_folder()
    assert (finding.state, finding.found[-17:]) == ("missing", ", no direct reads")


def test_a_full_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert checks.temporary_folder().state == "missing"
    assert "0.0 GB free" in checks.temporary_folder().found


def test_packages_that_lack_or_are_too_old(monkeypatch):
    def version(name):
        if name == "tqdm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.26.4"

    required = ["numpy>=2.0", "tqdm>=4.66", "torch>=2.4; extra == 'torch'", "wheel"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = checks.packages()
    assert finding[:2] == ("wrong", "numpy 1.26.4 is older than 2.0; tqdm is not there")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["wheel"])
    assert checks.packages() == checks.ok("wheel 1.26.4")


def test_a_folder_of_sources_that_is_not_installed(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert checks.packages().state == "missing"


def test_loops_that_are_kept_nowhere(monkeypatch):
    def nowhere(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(loop_cache, "LoopCache", nowhere)
    finding = checks.loops()
    assert finding.state == "missing"
    assert "NUMBA_CACHE_DIR" in finding.remedy


def test_what_training_needs_is_here():
    assert checks.blas().state == "ok"
    assert checks.loops().state == "ok"
    assert checks.commands().state == "ok"


def write_launcher(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty PATH, but for the shell and what it needs."""
    for name in ("sh", "sleep"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_launcher(path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/bin/python")
    finding = checks.launcher()
    assert (finding.state, finding.remedy) == ("missing", checks.MPI)
    write_launcher(path, "mpirun", "")
    (path / "other").mkdir()
    monkeypatch.setenv("PATH", str(path / "other"))
    monkeypatch.setattr("sys.executable", str(path / "python"))
    assert checks.launcher().remedy == f"for several ranks: export PATH={path}:$PATH"


def test_a_launcher_that_hangs(path, monkeypatch):
    write_launcher(path, "mpirun", "exec sleep 60")
    monkeypatch.setattr(checks, "_ANSWER", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        checks.launcher()


@pytest.mark.parametrize(
    ("body", "library", "root", "state", "part"),
    [
        ("echo 'mpirun (Open MPI) 5.0.11'", "Open MPI", "1", "ok", "mpirun (Open MPI) 5.0.11"),
        ("echo 'mpirun (Open MPI) 5.0.11'", "MPICH", "1", "wrong", "but the library is MPICH"),
        ("echo 'mpirun (Open MPI) 5.0.11'", "Open MPI", "", "missing", "refuses root"),
        ("echo HYDRA build details:", "MPICH", "", "ok", "HYDRA"),
        ("echo HYDRA build details:", "Open MPI", "", "wrong", "but the library is Open MPI"),
        ("echo HYDRA build details:", "", "", "ok", "HYDRA"),
        ("echo no such library >&2; exit 3", "MPICH", "", "wrong", "no such library"),
        ("", "MPICH", "", "ok", "tells no version"),
    ],
)
def test_launchers(body, library, root, state, part, path, monkeypatch):
    write_launcher(path, "mpirun", body)
    monkeypatch.setattr(checks, "_vendor", lambda: library)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, root) if root else monkeypatch.delenv(name, raising=False)
    finding = checks.launcher()
    assert finding.state == state
    assert part in finding.found


def test_mpi_is_not_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert checks.mpi4py_package().state == "missing"
    assert checks.mpi_library() == checks.missing("mpi4py is not installed", checks.MPI)


def test_mpi4py_without_a_library(monkeypatch):
    def fail():
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setattr(checks, "_mpi", fail)
    assert checks.mpi_library() == checks.missing("cannot load MPI library", checks.MPI)
    assert checks._vendor() == ""


def test_extras():
    finding = checks.extra("plot", "for cupyrec report", ("matplotlib", "no_such_package"))()
    assert finding.state == "missing"
    assert finding.found == "no_such_package not installed"
    assert finding.remedy == "for cupyrec report: pip install 'cupyrec[plot]'"
    assert checks.extra("x", "for x", ("numpy",))().found.startswith("numpy ")
