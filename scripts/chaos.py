"""Do harm to a random rank at a random moment of a training, and see how the job ends.

    python scripts/chaos.py --runs 50

Each run trains a small DLRM on 2 to 4 ranks, that saves every third step, and within the next
seconds one rank is killed, crashes, is stopped, raises or is asked to end. The job must end, not
with 0, within 30 s or, if the rank was stopped, within the stall timeout and 15 s; a rank must say
why; the last checkpoint must verify, and another number of ranks must go on from it to the end of
its epoch. What happens is told on stderr, and in sum by one JSON line on stdout; exit code 1 if
anything was not as it must be.

    python scripts/chaos.py --stores --kills 100

kills a process at work on a row log instead: see chaos_stores.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chaos_stores

from cupyrec import checkpoint

STALL_TIMEOUT = 5
PATIENCE = 30
LATEST = 4.0  # seconds after the first checkpoint
SMALL = ["--embedding-dim", 4, "--set", "model.bottom=[8]", "--set", "model.top=[8]"]
SMALL += ["--batch-size", 64, "--set", "training.save_every=3"]
HARM = {
    "kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1, "terminate": signal.SIGTERM,
}  # fmt: skip

# Python runs it as each rank starts: it tells the rank's process, and makes it raise on SIGUSR1.
START = """
import os, pathlib, signal
if (rank := os.environ.get("OMPI_COMM_WORLD_RANK")) is not None:
    file = pathlib.Path(os.environ["CHAOS"], rank)
    if not file.exists():
        def harm(number, frame):
            raise RuntimeError("chaos")
        signal.signal(signal.SIGUSR1, harm)
        file.write_text(str(os.getpid()))
"""


class Job:
    """``mpirun cupyrec train`` on so many ranks, whose output goes to a file."""

    def __init__(self, folder: Path, ranks: int, *arguments: object) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(START)
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        path = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        threads = {"OMP_NUM_THREADS": "1", "CHAOS": str(folder)}
        command = [Path(sys.executable).with_name("mpirun"), "-n", ranks, "--oversubscribe"]
        command += [sys.executable, "-m", "cupyrec", "train", "--device", "cpu", *arguments]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=output, stderr=subprocess.STDOUT,
                env=os.environ | root | path | threads,
            )  # fmt: skip

    def harm(self, rank: int, number: int) -> None:
        os.kill(int((self.folder / str(rank)).read_text()), number)

    def output(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")

    def goes_on(self) -> bool:
        """Whether mpirun or a rank is there."""
        return self.process.poll() is None or any(map(_lives, self.folder.glob("[0-9]*")))

    def ended(self, seconds: float) -> bool:
        """Wait so long for its end, which is made if it doesn't come."""
        last = time.monotonic() + seconds
        while self.goes_on():
            if time.monotonic() > last:
                self.process.kill()
                self.process.wait()
                for rank in range(self.ranks):
                    with contextlib.suppress(OSError):
                        self.harm(rank, signal.SIGKILL)
                return False
            time.sleep(0.05)
        return True


def _lives(told: Path) -> bool:
    """Whether the process of that number is there, and no zombie."""
    try:
        state = Path("/proc", told.read_text(), "stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] != "Z"


def run(folder: Path, log: Path, chance: random.Random, sizes: list[int]) -> dict[str, int]:
    """One run; return what went wrong."""
    ranks, resumed = chance.choice(sizes), chance.choice(sizes)
    rank, what = chance.randrange(ranks), chance.choice(list(HARM))
    moment = LATEST * chance.random()
    out = folder / "out"
    job = Job(
        folder / "job", ranks, "--train", log, "--out", out, "--epochs", 10_000,
        "--stall-timeout", STALL_TIMEOUT, *SMALL,
    )  # fmt: skip
    told = f"{ranks} ranks, {what} rank {rank} {moment:.2f} s after the first checkpoint"
    print(told, end=": ", file=sys.stderr, flush=True)
    start = time.monotonic()
    while job.process.poll() is None and not (out / "last").exists():
        if time.monotonic() - start > 300:
            job.ended(0)
        time.sleep(0.05)
    time.sleep(moment)
    if job.process.poll() is not None:
        print(f"chaos: the training must go on until then, got {job.output()}", file=sys.stderr)
        job.ended(PATIENCE)
        return {"hangs": 0, "corruptions": 0, "unexplained": 1}
    start = time.monotonic()
    job.harm(rank, HARM[what])
    ended = job.ended(STALL_TIMEOUT + 15 if what == "stop" else PATIENCE)
    took, code = time.monotonic() - start, job.process.returncode
    why = re.search(r"rank \d+ (of|with)|stopped after step", job.output())
    wrong = {"hangs": int(not ended), "corruptions": 0, "unexplained": int(not code or why is None)}
    try:
        progress = checkpoint.verify(out / "last")["progress"]
        again = Job(
            folder / "again", resumed, "--train", log, "--resume", out,
            "--epochs", progress["epoch"] + 1,
        )  # fmt: skip
        if not again.ended(300) or again.process.returncode:
            raise ValueError(f"chaos: the resumed job must end well, got {again.output()}")
        after = checkpoint.verify(out / "last")["progress"]
        if after["epoch"] != progress["epoch"] + 1:
            raise ValueError(f"chaos: the resumed job must end its epoch, got {after}.")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        wrong["corruptions"] = 1
    where = f"step {progress['step']}, {resumed} ranks went on" if not wrong["corruptions"] else ""
    print(f"ended with {code} in {took:.1f} s, {where}", file=sys.stderr)
    if any(wrong.values()):
        print(f"{wrong}\n{job.output()}", file=sys.stderr)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], metavar="N")
    parser.add_argument("--stores", action="store_true", help="kill those who write row logs")
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    options = parser.parse_args()
    if options.stores:
        total = chaos_stores.kill_stores(options.kills, options.seed)
        print(json.dumps(total))
        sys.exit(bool(total["wrong"] or total["unseen"]))
    chance = random.Random(options.seed)
    total = {"runs": 0, "hangs": 0, "corruptions": 0, "unexplained": 0}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.tsv")
        subprocess.run(
            [sys.executable, "-m", "cupyrec", "data", "synthetic", "--out", log,
             "--rows", "4000", "--ids-per-table", "1000"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        first = Job(Path(folder, "first"), max(options.ranks), "--train", log, *SMALL)
        if not first.ended(600) or first.process.returncode:  # it compiles what others need
            raise SystemExit(f"chaos: an unharmed job must end well, got {first.output()}")
        for number in range(options.runs):
            place = Path(folder, str(number))
            place.mkdir()
            wrong = run(place, log, chance, options.ranks)
            total = {key: value + wrong.get(key, 1) for key, value in total.items()}
    print(json.dumps(total))
    sys.exit(any(total[key] for key in total if key != "runs"))


if __name__ == "__main__":
    main()
