"""What `cupyrec plan` says beside what happens, on the CPU: one JSON line on stdout.

    python scripts/bench_plan.py
    python scripts/bench_plan.py --case ssd

Three trainings, each in a process of its own with all rows there, ids by Zipf's law with exponent
1.05, Adagrad:

- `mlp`: DLRM with a large perceptron on small tables
- `embedding`: a factorization machine, hardly a matmul, on 26 tables of 100,000 rows of width 65
- `ssd`: DLRM with a small perceptron on 3 million rows in files, with a cache of 4 % of them

Of each:

- `bytes_ratio_CASE`: planned over measured bytes, the one farthest from 1 of memory (how much the
  process grows while it is built, filled and trained), files on the disk and a checkpoint.
- `bottleneck_CASE_planned`, `bottleneck_CASE_measured`: where the time of the fastest step goes.
  Measured are `flops`, the matmuls of its layers alone, forward and for both gradients, by NumPy
  into ready buffers; `ssd_reads`, its spans "read rows"; `memory`, what is left of a step with rows
  in memory; `ssd_writes`, what is left of one with rows in files.
- `seconds_ratio_CASE`: planned over measured seconds of that step.
- `hit_rate_ssd_planned`, `hit_rate_ssd_measured`: of a step's different rows those in the cache.

The plan is by `measure_hardware` of this machine, in the same process after the training.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_stores import Popularity, bytes_in, say, vectors_of
from bench_train import positive

import cupyrec
from cupyrec import checkpoint, config, timeline
from cupyrec.data import Batch, Column, Schema
from cupyrec.embedding import Rows
from cupyrec.from_settings import (
    build_model,
    build_optimizer,
    default_settings,
    keep_tables,
    tier_of,
)
from cupyrec.measure_hardware import measure_hardware
from cupyrec.nn import FusedMLP
from cupyrec.plan import Plan, plan
from cupyrec.training import train_step

TABLES, DENSE, ZIPF = 26, 13, 1.05
CASES = {
    "mlp": dict(rows=26 * 60_000, batch=4096, steps=4, settings={
        "model": {"name": "dlrm", "top": [2048, 2048, 1024]},
    }),
    "embedding": dict(rows=26 * 100_000, batch=8192, steps=8, settings={
        "model": {"name": "fm", "embedding_dim": 64},
    }),
    "ssd": dict(rows=26 * 100_000, batch=8192, steps=40, settings={
        "model": {"name": "dlrm", "top": [32], "bottom": [32]},
        "embedding": {"tier": "cached_ssd", "cache_mb": 16.0, "direct": True},
    }),
}  # fmt: skip
TINY = dict(rows=26 * 200, batch=64, steps=2)


class Training:
    """A training of a case with all its rows there."""

    def __init__(self, case: dict, settings: dict, folder: Path) -> None:
        self.popularity = Popularity(TABLES, case["rows"], case["batch"], ZIPF)
        self.model = build_model(settings, schema(), "cpu")
        self.optimizer = build_optimizer(settings, self.model)
        keep_tables(tier_of(settings, folder), self.model)
        self.stores = [group.store for _, group in self.model.named_groups()]
        self.step = 0
        for tables, ids in self.popularity.everything():
            for store in self.stores:
                store.import_rows(Rows(tables, ids, vectors_of(ids, store.width), {}))

    def batch(self) -> Batch:
        rng = np.random.default_rng(self.step)
        (ids,) = self.popularity.batches(self.step, self.step + 1)
        self.step += 1
        labels = (rng.random((len(ids), 1)) < 0.25).astype(np.float32)
        return Batch(rng.standard_normal((len(ids), DENSE), np.float32), ids, labels)

    def train(self, batch: Batch) -> None:
        train_step(self.model, batch, self.optimizer)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Seconds of the fastest of some steps, and those of them that rows are read in."""
        return min(self._seconds(self.batch()) for _ in range(steps))

    def _seconds(self, batch: Batch) -> tuple[float, float]:
        timeline.start()
        taken = seconds(lambda: self.train(batch))
        spans = [event["dur"] for event in timeline.events(0) if event["name"] == "read rows"]
        return taken, sum(spans) / 1e6

    def metrics(self) -> Counter:
        """What caches have done so far."""
        return sum((Counter(store.metrics()) for store in self.stores), Counter())

    def close(self) -> None:
        for store in self.stores:
            store.close()


def schema() -> Schema:
    numeric = [Column(f"I{i}", "numeric") for i in range(DENSE)]
    tables = [Column(f"C{i}", "categorical", "hex") for i in range(TABLES)]
    return Schema((Column("click", "label"), *numeric, *tables))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def matmuls(model: cupyrec.nn.Module, batch: int) -> float:
    """Seconds of the matmuls of a model's layers alone, the fastest of five."""
    layers = [w.shape for m in model.modules() if isinstance(m, FusedMLP) for w in m.weights]
    buffers = [
        tuple(np.ones(shape, np.float32) for shape in ((batch, n), (m, n), (batch, m)))
        for m, n in layers
    ]

    def work() -> None:
        for x, w, y in buffers:
            np.matmul(x, w.T, out=y)
            np.matmul(y.T, x, out=w)
            np.matmul(y, w, out=x)

    def once() -> float:
        for arrays in buffers:
            for array in arrays:
                array[:] = 0.01
        return seconds(work)

    return min(once() for _ in range(5))


def resident() -> int:
    """Bytes of memory that this process has."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, case: dict, folder: Path) -> dict:
    """A case's figures."""
    settings = config.override(
        default_settings(case["settings"]["model"]["name"]),
        [case["settings"], {"training": {"batch_size": case["batch"]}}],
    )
    Training(case | TINY, settings, folder / "warm-up").close()  # compiles all loops, loads BLAS
    small = Training(case | TINY, settings, folder / "tiny")
    small.train(small.batch())
    small.close()
    before = resident()
    training = Training(case, settings, folder / "tables")
    for _ in range(case["steps"]):
        training.train(training.batch())
    measured = {"host": resident() - before}
    if settings["embedding"]["tier"] == "cached_ssd":
        measured["files"] = bytes_in(folder / "tables")
    filled = training.metrics()
    taken, reading = training.seconds(case["steps"])
    looked_up = training.metrics() - filled
    checkpoint.save(folder / "checkpoint", training.model, training.optimizer)
    measured["checkpoint"] = bytes_in(folder / "checkpoint")
    training.close()
    spent = {"flops": matmuls(training.model, case["batch"])}
    in_memory = taken
    if "files" in measured:
        settings_of_memory = settings | {"embedding": config.DEFAULTS["embedding"]}
        other = Training(case, settings_of_memory, folder)
        other.train(other.batch())
        in_memory = other.seconds(case["steps"])[0]
        spent |= {"ssd_reads": reading, "ssd_writes": max(0.0, taken - in_memory - reading)}
    spent["memory"] = max(0.0, in_memory - spent["flops"])
    ids = [case["rows"] / TABLES] * TABLES
    nbytes = TINY["rows"] * 256 if case["rows"] == TINY["rows"] else 512 << 20
    hardware = measure_hardware(folder, nbytes=nbytes)
    told = plan(settings, schema(), hardware, ids, device="cpu", zipf=ZIPF)
    figures = compared(name, told, measured, spent, taken)
    if total := looked_up["hits"] + looked_up["misses"]:
        rates = told.hit_rate, looked_up["hits"] / total
        say(f"  {'hit rate':<22} {rates[0]:12.3f} {rates[1]:12.3f}")
        for by, rate in zip(("planned", "measured"), rates, strict=True):
            figures[f"hit_rate_{name}_{by}"] = rate
    return figures


def compared(
    name: str, told: Plan, measured: dict[str, int], spent: dict[str, float], taken: float
) -> dict:
    """Print planned beside measured; return a case's figures."""
    say(f"{name:<24} {'planned':>12} {'measured':>12}")
    ratios = {}
    for place, value in measured.items():
        parts = {k: v for k, v in told.bytes[place].items() if k != "room for files"}
        ratios[place] = sum(parts.values()) / value
        say(f"  {place + ', MB':<22} {sum(parts.values()) / 1e6:12.1f} {value / 1e6:12.1f}")
    for resource, value in spent.items():
        say(f"  {resource + ', ms':<22} {told.seconds[resource] * 1e3:12.1f} {value * 1e3:12.1f}")
    say(f"  {'step, ms':<22} {told.step_seconds * 1e3:12.1f} {taken * 1e3:12.1f}")
    return {
        f"bytes_ratio_{name}": max(ratios.values(), key=lambda ratio: abs(ratio - 1)),
        f"bottleneck_{name}_planned": told.bottleneck,
        f"bottleneck_{name}_measured": max(spent, key=spent.__getitem__),
        f"seconds_ratio_{name}": told.step_seconds / taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, help="one alone, in this process")
    parser.add_argument("--tiny", action="store_true", help="few rows: to see that it runs")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--folder", help="for files; the system's folder for such by default")
    options = parser.parse_args()
    if options.case is None:
        figures = {}
        for name in CASES:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", name]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures |= json.loads(told.stdout)
    else:
        cupyrec.set_num_threads(options.threads)
        case = CASES[options.case] | (TINY if options.tiny else {})
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="cupyrec-plan-") as folder:
            figures = measure(options.case, case, Path(folder))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
