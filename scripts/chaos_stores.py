"""Kill a process at work on a row log, and damage its files; see what is there afterwards.

    python scripts/chaos.py --stores --kills 100

A child writes, truncates and commits rows that follow from a seed and the number of a step, in
small files, so that its compaction is busy too. It is killed within a random one of its phases:
writing, waiting for the disk, replacing the manifest, removing files. The folder must then open
as of the last commit that was told, or the one that was under way, with just its rows. Now and then
a copy of it is damaged: a bit, a truncated file, or one that is gone. Opening it must say so, and
with salvage give rows as they once were written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cupyrec.embedding import row_log_files, row_log_state, row_log_streams
from cupyrec.embedding.row_log import RowLog

WORDS = 8
MOST = 4000  # rows
PHASES = ("write", "sync", "write_manifest", "drop_unneeded", "commit")
DAMAGE_EVERY = 3  # kills


def shrink() -> None:
    """Small files, so that little work makes many."""
    row_log_files._LEAST, row_log_streams._BUFFER = 16 << 10, 4 << 10


def payloads(rows: np.ndarray, versions: np.ndarray | int) -> np.ndarray:
    """What rows hold in a version: both are told by the first words, the others follow."""
    first = rows.astype(np.uint64) << np.uint64(24) | np.asarray(versions, np.uint64)
    words = first[:, None] * (2 * np.arange(WORDS // 2, dtype=np.uint64) + np.uint64(1))
    return words.view(np.uint32)


def changes(seed: int, step: int, count: int) -> list[tuple[int, np.ndarray]]:
    """What a step does to `count` rows: (rows there are then, rows that are written) each."""
    rng, made = np.random.default_rng([seed, step]), []
    for _ in range(rng.integers(1, 6)):
        if rng.random() < 0.15:
            count = int(rng.integers(0, count + 1))
            made.append((count, np.empty(0, np.int64)))
            continue
        more = int(rng.integers(0, 1 + min(600, MOST - count)))
        old = np.flatnonzero(rng.random(count) < rng.random())
        rows = rng.permutation(np.concatenate([old, np.arange(count, count + more)]))
        count += more
        made.append((count, rows))
    return made


def work(folder: Path, seed: int, direct: bool) -> None:
    """The child: go on for ever, and tell each phase as it begins."""
    shrink()

    def told(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def wrapped(self: object, *given: object, **named: object) -> object:
            os.write(1, f"{name}\n".encode())
            return method(self, *given, **named)

        setattr(owner, name, wrapped)

    for name in ("sync", "write_manifest"):
        told(row_log_files.Files, name)
    for name in ("write", "drop_unneeded", "commit"):
        told(row_log_state.LogState, name)
    log = RowLog(folder, WORDS, direct=direct)
    step = log.meta.get("step", 0)
    while True:
        step += 1
        for version, (count, rows) in enumerate(changes(seed, step, len(log))):
            if count < len(log):
                log.truncate(count)
            log.write(rows, payloads(rows, 8 * step + version))
        os.write(1, f"begin {step}\n".encode())
        log.commit({"step": step})
        os.write(1, f"done {step}\n".encode())


class Truth:
    """What the rows are after a step."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.versions = seed, 0, np.empty(0, np.int64)

    def go_to(self, step: int) -> None:
        while self.step < step:
            self.step += 1
            for version, (count, rows) in enumerate(
                changes(self.seed, self.step, self.versions.size)
            ):
                self.versions = np.resize(self.versions, count)
                self.versions[rows] = 8 * self.step + version

    def payloads(self) -> np.ndarray:
        return payloads(np.arange(self.versions.size), self.versions)


def run_and_kill(command: list[str], chance: random.Random) -> tuple[str, int, int]:
    """Return the phase it was killed in, and the last steps whose commit was begun and done."""
    phase, left = chance.choice(PHASES), chance.randrange(1, 40)
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    begun = done = 0

    def note(line: bytes) -> None:
        nonlocal begun, done
        what, _, number = line.decode().strip().partition(" ")
        begun = int(number) if what == "begin" else begun
        done = int(number) if what == "done" else done

    while left and (line := child.stdout.readline()):
        note(line)
        left -= line.decode().strip() == phase
    time.sleep(chance.choice([0, 1e-4, 1e-3, 1e-2]) * chance.random())
    child.send_signal(signal.SIGKILL)
    for line in child.stdout.read().splitlines():
        note(line)
    if child.wait() != -signal.SIGKILL:
        raise SystemExit(f"chaos: the child must go on until it is killed, got {child.returncode}")
    return phase, begun, done


def check(folder: Path, truth: Truth, begun: int, done: int, direct: bool) -> str:
    """What is wrong with a folder after a kill, or nothing."""
    try:
        with RowLog(folder, WORDS, direct=direct) as log:
            step = log.meta.get("step", 0)
            may = {done or truth.step, begun or truth.step}
            if step not in may:
                return f"step must be one of {may}, got {step}"
            truth.go_to(step)
            want, out = truth.payloads(), np.zeros((len(log), WORDS), np.uint32)
            log.read(np.arange(len(log)), out)
            seen = sum(len(rows) for rows, _ in log.records())
            if len(log) != len(want) or seen != len(want) or not np.array_equal(out, want):
                return f"rows of step {step} must be there, got others"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def damage(folder: Path, chance: random.Random) -> Path | None:
    """Damage something that the last commit needs; return it."""
    told = json.loads((folder / "manifest.json").read_text())["log"]
    if not told["files"] or chance.random() < 0.2:
        path, size = folder / "manifest.json", (folder / "manifest.json").stat().st_size
    else:
        serial, records = chance.choice(told["files"])
        path, size = folder / f"{serial:012d}.rows", records * (16 + 4 * WORDS)
    what = chance.choice(["bit", "bit", "truncate", "remove"])
    if what == "remove":
        path.unlink()
    elif what == "truncate":
        os.truncate(path, chance.randrange(size))
    else:
        data = bytearray(path.read_bytes())
        data[chance.randrange(size - (path.suffix == ".json"))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    return path


def check_damaged(folder: Path, chance: random.Random) -> str:
    """What is wrong with how a damaged folder opens, or nothing."""
    path = damage(folder, chance)
    try:
        RowLog(folder, WORDS).close()
        return f"damage of {path.name} must be seen"
    except ValueError as error:
        if path.name not in str(error) and str(folder) not in str(error):
            return f"{path.name} must be named, got {error}"
    with RowLog(folder, WORDS, salvage=True) as log:
        held = _held(log)
        log.commit({"saved": True})
        lost = log.lost
    with RowLog(folder, WORDS) as log:
        if log.lost or log.meta != {"saved": True} or not np.array_equal(_held(log), held):
            return "what was saved must stay"
    first = held.view(np.uint64)[:, 0]
    rows, versions = first >> np.uint64(24), first & np.uint64((1 << 24) - 1)
    if not np.array_equal(payloads(rows, versions), held) or np.unique(rows).size != rows.size:
        return f"{lost} rows are lost, but others must be as they were"
    return ""


def _held(log: RowLog) -> np.ndarray:
    out = np.zeros((len(log), WORDS), np.uint32)
    log.read(np.arange(len(log)), out)
    return out


def kill_stores(kills: int, seed: int) -> dict[str, int]:
    """Kill so often; return what came of it."""
    chance, truth = random.Random(seed), Truth(seed)
    shrink()
    total = {"kills": 0, "commits": 0, "wrong": 0, "damaged": 0, "unseen": 0}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "log")
        for number in range(kills):
            direct = chance.random() < 0.5
            command = [sys.executable, __file__, str(folder), str(seed), str(int(direct))]
            before = truth.step
            phase, begun, done = run_and_kill(command, chance)
            wrong = check(folder, truth, begun, done, direct)
            total["kills"] += 1
            total["commits"] += truth.step - before
            total["wrong"] += bool(wrong)
            told = f"killed in {phase}, at step {truth.step}, {truth.versions.size} rows"
            print(f"{told}: {wrong or 'well'}", file=sys.stderr)
            if wrong:
                break
            if number % DAMAGE_EVERY == 0:
                copy = Path(place, f"copy{number}")
                shutil.copytree(folder, copy)
                unseen = check_damaged(copy, chance)
                total["damaged"] += 1
                total["unseen"] += bool(unseen)
                if unseen:
                    print(unseen, file=sys.stderr)
                shutil.rmtree(copy)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("direct", type=int)
    options = parser.parse_args()
    work(options.folder, options.seed, bool(options.direct))


if __name__ == "__main__":
    main()
