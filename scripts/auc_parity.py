"""Test AUC with int8 between ranks minus that without a codec, over paired seeds.

    CUPYREC_DATA=… python scripts/auc_parity.py
    python scripts/auc_parity.py --data FOLDER --sets movielens_1m --seeds 10

A pair is two runs of ``mpirun -n 4 cupyrec train`` that differ in the codec alone: `none`, and
`int8` for rows and gradients in training and for rows in evaluation. All else, seed, first weights
and order of rows, is the same. Settings are those of scripts/configs, and nothing is chosen by the
rows for test. accuracy_sets.py says what the folder holds; a movie's genres are one id here.

A table goes to stderr, and one JSON line ends stdout.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accuracy_sets import criteo, movielens_1m

CONFIGS = Path(__file__).with_name("configs")
TINY = ["--batch-size", 32, "--embedding-dim", 4]
TINY += ["--set", "model.bottom=[8]", "--set", "model.top=[8]"]


def logs(files: dict[str, Path]) -> list[object]:
    """Arguments that name what is trained and tested on: nothing is chosen by valid."""
    return [word for flag, path in files.items() if flag != "--valid" for word in (flag, path)]


SETS = {"criteo": criteo, "movielens_1m": functools.partial(movielens_1m, bags=False)}


def auc(ranks: int, *arguments: object) -> float:
    """Test AUC of a training on so many ranks."""
    command = [Path(sys.executable).with_name("mpirun"), "-n", ranks, "--oversubscribe"]
    command += [sys.executable, "-m", "cupyrec", "train", "--device", "cpu", "--threads", 1]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        list(map(str, [*command, *arguments])), env=os.environ | root | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"auc_parity: {ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])["test_auc"]


def pairs(name: str, given: Sequence[object], seeds: int, ranks: int) -> list[tuple[float, float]]:
    """Test AUC without a codec and with int8, by seed."""
    aucs = []
    for seed in range(1, seeds + 1):
        none, int8 = (
            auc(ranks, *given, "--seed", seed, "--codec", codec) for codec in ("none", "int8")
        )
        tell(name, seed, none, int8, int8 - none)
        aucs.append((none, int8))
    return aucs


def tell(name: str, seed: object, none: float, int8: float, difference: float) -> None:
    row = f"{name:12} {seed!s:>4} {none:.5f} {int8:.5f} {difference:+.5f}"
    print(row, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = os.environ.get("CUPYREC_DATA")
    parser.add_argument("--data", type=Path, default=folder, help="$CUPYREC_DATA by default")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--quick", action="store_true", help="one seed, 2 ranks, tiny model")
    options = parser.parse_args()
    if options.data is None:
        parser.error("argument --data: must name a folder where CUPYREC_DATA does not")
    ranks, seeds = (2, 1) if options.quick else (4, options.seeds)
    print("set          seed    none    int8 difference", file=sys.stderr)
    result: dict[str, object] = {"runs": 0, "ranks": ranks, "mean_difference": {}}
    result |= {"differences": {}, "standard_error": {}, "auc_none": {}, "auc_int8": {}}
    for name in options.sets:
        with tempfile.TemporaryDirectory() as out:
            given = logs(SETS[name](options.data / name, Path(out)))
            given += ["--config", CONFIGS / f"{name}.toml", *(TINY if options.quick else [])]
            none, int8 = zip(*pairs(name, given, seeds, ranks), strict=True)
        differences = [b - a for a, b in zip(none, int8, strict=True)]
        means = list(map(statistics.mean, (none, int8, differences)))
        tell(name, "mean", *means)
        error = statistics.stdev(differences) / len(differences) ** 0.5 if seeds > 1 else None
        result["runs"] += 2 * seeds
        row = {"mean_difference": means[2], "differences": differences, "standard_error": error}
        for key, value in (row | {"auc_none": none, "auc_int8": int8}).items():
            result[key][name] = value
    print(json.dumps(result))


if __name__ == "__main__":
    main()
