"""What ``cupyrec doctor`` does: what is there, what is missing, and how to get it.

Whatever is looked at may be broken: an import that hangs, a library that ends its process. So
nothing but the standard library is imported here, and checks run in processes of their own, one for
each of `GROUPS`, all at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable

from cupyrec import doctor_checks as checks
from cupyrec import doctor_gpu_checks as gpu_checks
from cupyrec.doctor_checks import Finding

__all__ = ["GROUPS", "check", "doctor", "examine"]

logger = logging.getLogger("cupyrec")

_PATIENCE = 30.0  # seconds that all checks may take
_LEVELS = {"ok": logging.INFO, "missing": logging.INFO, "wrong": logging.WARNING}
_COLOURS = {"ok": 32, "missing": 33, "wrong": 31}  # green, yellow, red
_LONGEST = 300  # characters of what a library says
_MARK = "cupyrec doctor: "  # before a finding, since libraries write to stdout too
_PROGRAM = "import sys; sys.path[:] = {}; from cupyrec.doctor import check; check({!r})"
#: What launchers tell their processes, by which MPI in a check would take itself for a rank.
_LAUNCHED = "OMPI_COMM_", "OMPI_MCA_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL"
_AGAIN = "pip install --force-reinstall"
_NEEDED = f"nothing works without: {_AGAIN}"
_CUDA = f"for --device cuda and sim: {_AGAIN} 'cupyrec[cuda12]'"
_EXTRAS = {
    "serve": ("for cupyrec serve", ("uvicorn", "starlette", "orjson", "prometheus_client")),
    "plot": ("for cupyrec report", ("matplotlib",)),
    "tensorboard": ("for --tensorboard", ("tensorboardX",)),
    "torch": ("for cupyrec.interop.torch", ("torch",)),
}

#: Process -> name of each thing that it looks at, in order: how, and what to do if that fails.
GROUPS: dict[str, dict[str, tuple[Callable[[], Finding], str]]] = {
    "machine": {
        "cupyrec": (checks.installation, f"{_NEEDED} cupyrec"),
        "Python": (checks.interpreter, "nothing works without: make a new virtual environment"),
        "memory": (checks.memory, "to see how much there is: mount /proc"),
        "huge pages": (checks.huge_pages, "to see whether look-ups can use them: mount /sys"),
        "this folder": (checks.this_folder, "for what is written: go to another folder"),
        "temporary folder": (checks.temporary_folder, "for what is not kept: name one by TMPDIR"),
    },
    "cpu": {
        "packages": (checks.packages, f"{_NEEDED} cupyrec"),
        "NumPy": (checks.blas, f"{_NEEDED} numpy threadpoolctl"),
        "CPU loops": (checks.loops, f"{_NEEDED} numba"),
        "cores": (checks.cores, f"{_NEEDED} numba"),
        "commands": (checks.commands, f"{_NEEDED} cupyrec, and what is named here"),
    },
    "driver": {"GPU": (gpu_checks.gpu, gpu_checks.DRIVER)},
    "cuda": {
        "CuPy": (gpu_checks.cupy_package, _CUDA),
        "cublasLt": (gpu_checks.cublaslt_version, _CUDA),
        "NVRTC": (gpu_checks.nvrtc_compiler, _CUDA),
        "simulator": (gpu_checks.simulator, _CUDA),
        "device cuda": (gpu_checks.cuda_device, _CUDA),
    },
    "mpi": {
        "mpi4py": (checks.mpi4py_package, f"for several ranks: {_AGAIN} mpi4py"),
        "launcher": (checks.launcher, checks.MPI),
        "MPI": (checks.mpi_library, checks.MPI),
    },
    "extras": {
        f"extra {name}": (
            checks.extra(name, needed, packages), f"{needed}: {_AGAIN} 'cupyrec[{name}]'",
        )
        for name, (needed, packages) in _EXTRAS.items()
    },
}  # fmt: skip


def doctor(options: argparse.Namespace) -> int:
    """Tell what there is on stderr, and as a JSON line; return 1 if something is wrong, else 0."""
    findings = examine()
    for name, (state, found, remedy) in findings.items():
        logger.log(_LEVELS[state], "%s %-17s %s", _painted(state), name, found)
        if remedy:
            logger.log(_LEVELS[state], "%-8s%-17s %s", "", "", f"-> {remedy}")
    wrong = [name for name, finding in findings.items() if finding.state == "wrong"]
    told = {name: finding._asdict() for name, finding in findings.items()}
    print(json.dumps({"wrong": wrong, "findings": told}), flush=True)
    return 1 if wrong else 0


def _painted(state: str) -> str:
    """A state in 7 columns, in colour on a terminal that wants it: https://no-color.org."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    text = f"{state:7}"
    return text if plain or not sys.stderr.isatty() else f"\033[{_COLOURS[state]}m{text}\033[0m"


def examine(
    groups: Iterable[str] = tuple(GROUPS), patience: float = _PATIENCE
) -> dict[str, Finding]:
    """Return what was found, by name of what was looked for.

    Parameters
    ----------
    groups : iterable of str
        Which of `GROUPS`.
    patience : float
        Seconds after which what hasn't answered counts as broken.

    Examples
    --------
    >>> examine(["machine"])["cupyrec"].state
    'ok'
    """
    end, findings = time.monotonic() + patience, {}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(contextlib.closing(_Group(group))) for group in groups]
        for group in started:
            findings |= group.findings(end)
    return findings


class _Group:
    """A process that looks at the things of a group, and what it says."""

    def __init__(self, name: str) -> None:
        self._name, self._process, self._why = name, None, ""
        launched = any(key.startswith(_LAUNCHED) for key in os.environ if key.endswith("RANK"))
        environment = {
            key: value for key, value in os.environ.items()
            if not (launched and key.startswith(_LAUNCHED))
        }  # fmt: skip
        program = _PROGRAM.format(sys.path, name)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program], env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            self._why = f"no process to look with: {error}"

    def findings(self, end: float) -> dict[str, Finding]:
        """Return what it has found until a time of `time.monotonic`."""
        out = self._answer(end)
        found = {}
        for line in out.decode(errors="replace").splitlines():
            if line.startswith(_MARK):
                name, *finding = json.loads(line.removeprefix(_MARK))
                found[name] = Finding(*finding)
        for name, (_, remedy) in GROUPS[self._name].items():
            if name not in found:
                found[name] = Finding("wrong", self._why, remedy)
                if self._process is not None:
                    lost = Finding("wrong", f"not looked at: {name} came before", f"see {name}")
                    found |= {other: lost for other in GROUPS[self._name] if other not in found}
        return found

    def _answer(self, end: float) -> bytes:
        if self._process is None:
            return b""
        try:
            out, err = self._process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            self._why = "no answer"
            return late.stdout or b""
        code, lines = self._process.returncode, err.decode(errors="replace").strip().splitlines()
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._why = f"{ended}: {lines[-1].strip()[:_LONGEST]}" if lines else ended
        return out

    def close(self) -> None:
        """End the process and its own, without waiting for one that can't be ended."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for pipe in (self._process.stdout, self._process.stderr):
                pipe.close()


def check(group: str) -> None:
    """Look at the things of a group; print each finding as soon as it is there.

    Parameters
    ----------
    group : str
        One of `GROUPS`.
    """
    for name, (look, remedy) in GROUPS[group].items():
        try:
            finding = look()
        except Exception as error:
            told = "".join(traceback.format_exception_only(error)).splitlines()[0]
            finding = Finding("wrong", told[:_LONGEST], remedy)
        print(f"\n{_MARK}{json.dumps([name, *finding])}", flush=True)
