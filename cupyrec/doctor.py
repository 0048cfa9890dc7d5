"""What ``cupyrec doctor`` does: what is there, what is missing, and how to get it.

Whatever is looked at may be broken: an import that hangs, a library that ends its process. So
nothing but the standard library is imported here, and checks run in processes of their own, one for
each of `doctor_checks.GROUPS`, all at the same time.
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
from typing import NamedTuple

from cupyrec.doctor_checks import GROUPS, Finding

__all__ = ["check", "doctor", "examine"]

logger = logging.getLogger("cupyrec")

_PATIENCE = 30.0  # seconds that all checks may take
_LEVELS = {"ok": logging.INFO, "missing": logging.INFO, "wrong": logging.WARNING}
_COLOURS = {"ok": 32, "missing": 33, "wrong": 31}  # green, yellow, red
_LONGEST = 300  # characters of what a library says
_MARK = "cupyrec doctor: "  # before a finding, since libraries write to stdout too
_PROGRAM = "import sys; sys.path[:] = {}; from cupyrec.doctor import check; check({!r})"
#: What launchers tell their processes, by which MPI in a check would take itself for a rank.
_LAUNCHED = "OMPI_COMM_", "OMPI_MCA_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL"


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


def examine(patience: float = _PATIENCE) -> dict[str, Finding]:
    """Return what was found, by name of what was looked for.

    Parameters
    ----------
    patience : float
        Seconds after which what hasn't answered counts as broken.

    Examples
    --------
    >>> examine()["cupyrec"].state
    'ok'
    """
    end, groups = time.monotonic() + patience, {}
    with contextlib.ExitStack() as stack:
        for group in GROUPS:
            groups[group] = _Group(group)
            stack.callback(groups[group].end)
        return {
            name: finding
            for group in groups.values()
            for name, finding in group.findings(end).items()
        }


class _Group:
    """A process that looks at the things of a group, and what it says."""

    def __init__(self, name: str) -> None:
        self._name, self._process, self._why = name, None, ""
        lost = any(key.startswith(_LAUNCHED) for key in os.environ if key.endswith("RANK"))
        environment = {
            key: value for key, value in os.environ.items()
            if not (lost and key.startswith(_LAUNCHED))
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
                self._why = f"not looked at: {name} came before"
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

    def end(self) -> None:
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
        One of `doctor_checks.GROUPS`.
    """
    for name, (look, remedy) in GROUPS[group].items():
        try:
            finding = look()
        except Exception as error:
            told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            finding = Finding("wrong", told[:_LONGEST], remedy)
        print(f"\n{_MARK}{json.dumps([name, *finding])}", flush=True)
