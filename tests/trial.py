"""Small click logs, and runs of the command over them."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cupyrec import cli, training
from cupyrec.data import Column, Schema

SCHEMA = Schema(
    [
        Column("click", "label"),
        Column("price", "numeric", transform="log", buckets=True),
        Column("user", "categorical", "integer"),
        Column("item", "categorical", "hex"),
    ]
)
SMALL = ["--embedding-dim", "4", "--lr", "0.05", "--set", "training.batch_size=32"]
SMALL += ["--set", "model.bottom=[8]", "--set", "model.top=[8]"]


def planted(rows: int, seed: int = 0, users: int = 40) -> tuple[np.ndarray, ...]:
    """dense (B, 1), ids (B, 2), labels (B,): a click depends on user, item and price."""
    generator = np.random.default_rng(seed)
    weights = np.random.default_rng(99).normal(0, 1.5, (2, users))  # of all seeds the same
    dense = generator.normal(size=(rows, 1)).astype(np.float32)
    ids = generator.integers(0, users, (rows, 2))
    logits = weights[0, ids[:, 0]] + weights[1, ids[:, 1]] + dense[:, 0]
    labels = (generator.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return dense, ids, labels


def write_log(path: Path, rows: int, seed: int = 0, first_user: int = 0) -> Path:
    dense, ids, labels = planted(rows, seed)
    lines = []
    for y, price, (user, item) in zip(labels, dense[:, 0], ids, strict=True):
        number = "" if price < -1 else f"{price:.3f}"
        lines.append(f"{y:.0f}\t{number}\t{user + first_user}\t{item:x}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_logs(folder: Path, rows: int = 300) -> list[str]:
    """Write a schema and three logs; return the arguments that name them.

    300 rows are 9 batches of 32 and one of 12. The last log has users that the others have not.
    """
    SCHEMA.save(folder / "schema.toml")
    train = write_log(folder / "train.tsv", rows)
    valid = write_log(folder / "valid.tsv", 200, seed=1)
    test = write_log(folder / "test.tsv", 200, seed=2, first_user=20)
    files = {"--train": train, "--valid": valid, "--test": test, "--schema": folder / "schema.toml"}
    return [str(word) for pair in files.items() for word in pair]


def command(*arguments: object) -> int:
    """Run ``cupyrec`` in this process; return its exit code."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        return exit.code


def files(folder: Path) -> dict[str, bytes]:
    """Name -> content of each file in a checkpoint."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def steps(run: Path) -> list[dict]:
    """The lines of metrics.jsonl, all but the last, which tells of time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" in line]


def train(logs: list, out: Path, *more: object) -> int:
    return command("train", *logs, *SMALL, "--out", out, *more)


class Killed(BaseException):
    """What kill -9 does to a run, as far as the disk shows."""


def kill() -> None:
    raise Killed


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def at_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Within this, `act` is called when a step of this number begins."""
    patch, step = pytest.MonkeyPatch(), training.train_step

    def acting(model, batch, optimizer):
        if optimizer.t + 1 == number:
            act()
        return step(model, batch, optimizer)

    patch.setattr(training, "train_step", acting)
    try:
        yield
    finally:
        patch.undo()
