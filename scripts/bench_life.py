"""What rules on ids cost in AUC and save in rows, on the CPU: one JSON line on stdout.

    python scripts/bench_life.py --case days
    python scripts/bench_life.py --case days --kept 1
    CUPYREC_DATA=… python scripts/bench_life.py --case admission

Case `days`: ten days of a synthetic click log, trained on day after day by a DLRM with Adagrad,
twice: with `Life(expire_after=…)` of `--kept` days, checked four times a day, and without rules. A
day's ids are a window that has moved on by a fifth of them, so that each day a fifth is new and
each id stays for five days. Within a day they follow Zipf's law, in an order that is theirs for
life. Log-odds of a click are planted as in `cupyrec.data.write_synthetic`: weights of ids are
hashes of them. Each day is predicted before it is trained on.

- `auc`, `auc_no_expiry`: of days 4 to 10 together, with rules and without, mean of seeds;
  `auc_difference` the first less the second, `auc_differences` of each seed; `best_auc` that of the
  planted probabilities.
- `ids_growth_last_days`, `bytes_growth_last_days`: ids and the store's bytes after the last day
  over those four days before, with rules; `…_no_expiry`: without.
- `ids`, `bytes`, and `…_no_expiry`: after each day.

Case `admission`: ``cupyrec train`` on the sample of the Criteo log in the folder `criteo` of
$CUPYREC_DATA, by the committed preset, where ids get rows when they are looked up first, k = 1, and
second, k = 2. Test is not read.

- `rows_k1`, `rows_k2`: of all tables, after training, mean of seeds.
- `auc_k1`, `auc_k2`: on valid, mean of seeds; `aucs_k1`, `aucs_k2`: of each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_stores import Popularity, say, scrambled
from bench_train import positive

import cupyrec
from cupyrec.data import Arrays
from cupyrec.embedding import Life
from cupyrec.metrics import auc
from cupyrec.models import DLRM
from cupyrec.optim import Adagrad
from cupyrec.training import train_step

DAYS, LIVED = 10, 5  # LIVED: how many an id stays
JUDGED, LAST = 3, 4  # days after which AUC counts; those over which growth is
DENSE, WIDTH, ZIPF = 4, 16, 1.05
LR = 0.02  # of .01, .02, .05 and .1 the best without rules
BIAS, MAIN, PRODUCT, SLOPE = -1.4, 0.4, 0.4, 0.2  # a quarter of the rows are clicks
PRESET = Path(__file__).with_name("configs") / "criteo" / "dlrm.toml"


class Day(NamedTuple):
    """A day's rows, and the planted log-odds of a click."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    logits: np.ndarray


class Log:
    """Days of a click log, each the same whenever it is asked for."""

    def __init__(self, tables: int, live: int, rows: int) -> None:
        self.new = -(-live // LIVED)  # a day and table
        self.rows, self.live = rows, self.new * LIVED
        self.popularity = Popularity(tables, self.live * tables, rows, ZIPF)

    def day(self, day: int) -> Day:
        tables = np.arange(self.popularity.tables)
        known = np.arange(self.live)[:, None] + day * self.new  # numbers of ids, the oldest first
        known = self.popularity.ids(known, tables)
        known = np.take_along_axis(known, scrambled(known).argsort(axis=0), 0)  # by popularity
        ids = np.take_along_axis(known, self.popularity.ranks(day), 0)
        rng = np.random.default_rng([8, day])
        dense = rng.standard_normal((self.rows, DENSE), np.float32)
        logits = BIAS + SLOPE * dense.sum(axis=1) + MAIN * weights(ids, 1).sum(axis=1)
        factors = weights(ids, 2)
        logits += PRODUCT * (factors[:, :-1:2] * factors[:, 1::2]).sum(axis=1)
        clicks = rng.random(self.rows) < 1 / (1 + np.exp(-logits))
        return Day(dense, ids, clicks.astype(np.float32), logits)


def weights(ids: np.ndarray, kind: int) -> np.ndarray:
    """A fixed random weight of mean 0 and variance 1 for each id."""
    return scrambled(ids + kind) * (math.sqrt(12) * 2.0**-64)


class Trained:
    """A model that is trained day after day."""

    def __init__(self, tables: int, life: Life | None, seed: int) -> None:
        cupyrec.manual_seed(seed)
        self.model = DLRM(DENSE, tables, WIDTH)
        self.model.embedding.group.keep_account(life)
        self.optimizer = Adagrad(self.model.parameters(), LR)
        self.ids: list[int] = []
        self.bytes: list[int] = []
        self.scores: list[np.ndarray] = []  # of each day before it was trained on

    def pass_through(self, day: Day, batch_size: int) -> None:
        self.scores.append(cupyrec.predict(self.model, (day.dense, day.ids)))
        for batch in Arrays(day.dense, day.ids, day.labels).batches(batch_size):
            train_step(self.model, batch, self.optimizer)
        store = self.model.embedding.group.store
        self.ids.append(len(store))
        self.bytes.append(store.nbytes)


def days(options: argparse.Namespace) -> dict[str, object]:
    steps = -(-options.rows // options.batch)
    life = Life(expire_after=options.kept * steps, check_every=max(1, steps // 4))
    log = Log(options.tables, options.live, options.rows)
    lived = [log.day(number) for number in range(DAYS)]
    say(f"{life}, then without rules")
    say("seed day      ids    MB    AUC      ids    MB    AUC")
    aucs = []
    for seed in options.seeds:
        both = [Trained(options.tables, by, seed) for by in (life, None)]
        for number, day in enumerate(lived):
            row = f"{seed:4} {number + 1:3}"
            for each in both:
                each.pass_through(day, options.batch)
                of_day = auc(day.labels, each.scores[-1])
                row += f" {each.ids[-1]:8} {each.bytes[-1] / 1e6:5.1f} {of_day:.4f}"
            say(row)
        aucs.append([judged(lived, each.scores) for each in both])
    result: dict[str, object] = {"rows": DAYS * options.rows, "seeds": options.seeds}
    of_both = zip(*aucs, strict=True)
    for name, trained, of_seeds in zip(("", "_no_expiry"), both, of_both, strict=True):
        for what, after in (("ids", trained.ids), ("bytes", trained.bytes)):  # of seeds the same
            result[f"{what}_growth_last_days{name}"] = after[-1] / after[-1 - LAST]
            result[f"{what}{name}"] = after
        result[f"auc{name}"] = statistics.mean(of_seeds)
    differences = [rules - none for rules, none in aucs]
    return result | {
        "auc_difference": statistics.mean(differences),
        "auc_differences": differences,
        "best_auc": judged(lived, [day.logits for day in lived]),
    }


def judged(lived: list[Day], scores: list[np.ndarray]) -> float:
    """AUC of the days that count, together."""
    labels = np.concatenate([day.labels for day in lived[JUDGED:]])
    return auc(labels, np.concatenate(scores[JUDGED:]))


def admission(options: argparse.Namespace) -> dict[str, object]:
    if options.data is None:
        raise SystemExit("bench_life: give --data where CUPYREC_DATA names no folder")
    result: dict[str, object] = {"seeds": options.seeds}
    say("k seed    rows valid AUC")
    for k in (1, 2):
        rows, aucs = [], []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as out:
                of_run, of_valid = train(options, Path(out, "run"), k, seed)
            say(f"{k} {seed:4} {of_run:7} {of_valid:.5f}")
            rows.append(of_run)
            aucs.append(of_valid)
        result |= {f"rows_k{k}": statistics.mean(rows), f"auc_k{k}": statistics.mean(aucs)}
        result[f"aucs_k{k}"] = aucs
    return result


def train(options: argparse.Namespace, run: Path, k: int, seed: int) -> tuple[int, float]:
    """Rows of all tables, and AUC on valid, of a run that goes to a folder."""
    command = [sys.executable, "-m", "cupyrec", "train", "--device", "cpu"]
    for split in ("train", "valid"):
        command += [f"--{split}", options.data / "criteo" / f"{split}.tsv.gz"]
    command += ["--config", options.preset, "--seed", seed, "--out", run]
    command += ["--threads", options.threads, "--set", f"embedding.admit_after={k}"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"bench_life: {ended.stderr}")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    tables = [line["tables"] for line in lines if "tables" in line][-1]
    rows = sum(sum(numbers["ids"]) for numbers in tables.values())
    return rows, json.loads(ended.stdout.splitlines()[-1])["valid_auc"]


CASES = {"days": days, "admission": admission}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = os.environ.get("CUPYREC_DATA")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--seeds", type=positive, nargs="+", default=[1, 2, 3], help="of models")
    parser.add_argument("--kept", type=positive, default=3, help="days; of case days, as these:")
    parser.add_argument("--tables", type=positive, default=8)
    parser.add_argument("--live", type=positive, default=5000, help="ids of a table and day")
    parser.add_argument("--rows", type=positive, default=32_768, help="of a day")
    parser.add_argument("--batch", type=positive, default=1024)
    parser.add_argument("--data", type=Path, default=folder, help="of case admission, as this:")
    parser.add_argument("--preset", type=Path, default=PRESET)
    options = parser.parse_args()
    cupyrec.set_num_threads(options.threads)
    print(json.dumps({"case": options.case, **CASES[options.case](options)}))


if __name__ == "__main__":
    main()
