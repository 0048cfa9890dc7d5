"""A job of several ranks, one of which does something bad in the midst, and how it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

_PROGRAM = """
import contextlib, os, signal, sys, threading, time
from cupyrec import activity
from cupyrec.interruption import interruption
from cupyrec.parallel import Communicator, world
Communicator.stall_timeout = 10.0  # so often do ranks tell each other where they stand
ranks = world()
for ranks.step in range(1, 4):
    ranks.barrier("keys")
ranks.stall_timeout = {stall_timeout}
with {context}:
    if ranks.rank == {culprit}:
        open({moment!r}, "w").close()
        {fault}
    ranks.barrier("rows")
print("rank", ranks.rank, "is through")
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float  # since the bad moment


def job(
    folder: Path,
    fault: str,
    *,
    ranks: int = 2,
    culprit: int = 1,
    context: str = "contextlib.nullcontext()",
    stall_timeout: float = 60.0,
) -> Ended:
    """Let `culprit` do `fault` after the third step's "keys", when the others go on to "rows".

    Only from then on is it short, since a process may wait long for a core of a busy machine.
    """
    moment = folder / "moment"
    text = _PROGRAM.format(
        fault=fault, culprit=culprit, context=context, moment=str(moment),
        stall_timeout=stall_timeout,
    )  # fmt: skip
    ended = launch(folder, text, ranks)
    return Ended(ended.returncode, ended.stdout, ended.stderr, time.time() - moment.stat().st_mtime)


def launch(
    folder: Path, text: str, ranks: int, *options: str, **environment: str
) -> subprocess.CompletedProcess:
    """Run a Python program on several ranks."""
    program = folder / "program.py"
    program.write_text(text)
    return subprocess.run(
        [Path(sys.executable).with_name("mpirun"), "-n", str(ranks), "--oversubscribe", *options,
         sys.executable, program],
        env=os.environ
        | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        | {"PYTHONPATH": str(Path(__file__).parents[1])}
        | environment,
        capture_output=True, timeout=120, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
