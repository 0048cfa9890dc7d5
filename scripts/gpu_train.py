"""Training speed of DLRM on a GPU: a table on stderr, one JSON line on stdout.

    python scripts/gpu_train.py --torch
    python scripts/gpu_train.py --device sim --batch 32 --ids 100 --width 4 --bottom 8 --top 8 \\
        --steps 2 --warmup 1

The defaults are OneFlow's DLRM: 26 tables, width 128, bottom 512-256-128, top 1024-1024-512-256-1,
batch 65,536; ids are Zipf 1.2. It is trained in float32 and in float16. Batches come from host
memory, as from a reader, and then lie on the device already; steps run one behind the other and the
host waits for the last alone.

`--torch` names a Python that has PyTorch, which then trains the same model on the device, eager and
compiled, on row numbers instead of raw ids, which lie on the device.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import cupyrec
from cupyrec import arrays, cublaslt, models, optim
from cupyrec.data import Batch

ZIPF = 1.2


def click_log(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Batches: the k-th most frequent id of a table comes in proportion to k^-1.2."""
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(np.arange(1, options.ids + 1) ** -ZIPF)
    shape = options.batches, options.batch
    ranks = np.searchsorted(cumulative, rng.random((*shape, options.tables)) * cumulative[-1])
    return {
        "dense": rng.standard_normal((*shape, options.dense), np.float32),
        "indices": ranks.astype(np.int64),
        "labels": (rng.random((*shape, 1)) < 0.25).astype(np.float32),
    }


def batches(log: dict[str, np.ndarray]) -> list[Batch]:
    """The log with raw 64-bit ids."""
    ids = (log["indices"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return [Batch(*arrays) for arrays in zip(log["dense"], ids, log["labels"], strict=True)]


def seconds(model: cupyrec.nn.Module, data: list[Batch], optimizer: optim.Optimizer, steps: int):
    """Seconds of a step, and the last loss."""
    start = time.perf_counter()
    for i in range(steps):
        loss = cupyrec.train_step(model, data[i % len(data)], optimizer)
    value = loss.item()  # waits
    return (time.perf_counter() - start) / steps, value


def train(options: argparse.Namespace, log: dict[str, np.ndarray], amp: str) -> dict[str, float]:
    """Train in one type; return its figures."""
    cupyrec.manual_seed(0)
    data = batches(log)
    model = models.DLRM(
        options.dense, options.tables, options.width, bottom=options.bottom, top=options.top
    ).to(options.device)
    model.amp = None if amp == "float32" else amp
    scaler = optim.GradientScaler() if amp == "float16" else None
    optimizer = optim.SGD(model.parameters(), options.lr, scaler=scaler)
    _, first = seconds(model, data, optimizer, options.warmup)
    here = [batch.to(options.device) for batch in data]
    result = {}
    for name, given in (("from_host", data), ("on_device", here)):
        each, loss = seconds(model, given, optimizer, options.steps)
        result[f"samples_per_second_{name}"] = options.batch / each
        tell(f"{amp} {name}", options.batch, each)
    rows = sum(len(group.store) for _, group in model.named_groups())
    print(f"{rows:,} rows; loss {first:.4f} -> {loss:.4f}", file=sys.stderr)
    return result | {"loss": loss}


def tell(name: str, batch: int, each: float) -> None:
    rate = f"{each * 1e3:9.2f} ms a step, {batch / each:13,.0f} samples a second"
    print(f"{name:24}{rate}", file=sys.stderr)


def train_torch(options: argparse.Namespace, log: dict[str, np.ndarray], **kind: object) -> float:
    """Samples a second of PyTorch's DLRM, on row numbers that lie on its device."""
    case = {
        "model": "dlrm", "optimizer": "sgd", "lr": options.lr, "batches": options.batches,
        "tables": options.tables, "ids": options.ids, "width": options.width,
        "num_dense": options.dense, "bottom": options.bottom, "top": options.top, "threads": 1,
        "device": "cuda" if options.device == "cuda" else "cpu", **kind,
    }  # fmt: skip
    peer = Path(__file__).with_name("bench_peer_torch.py")
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/log.npz", **log)
        done = subprocess.run(
            [options.torch, peer, f"{folder}/log.npz", json.dumps(case)],
            input=f"step {options.warmup}\nstep {options.steps}\n", check=True, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
    return options.batch / float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=arrays.DEVICES, default="cuda")
    parser.add_argument("--amp", nargs="*", default=["float32", "float16"], metavar="TYPE")
    about = "train with its PyTorch too; this one's by default"
    parser.add_argument("--torch", nargs="?", const=sys.executable, metavar="PYTHON", help=about)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dense", type=int, default=13)
    parser.add_argument("--ids", type=int, default=1_000_000, help="of a table")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--bottom", type=int, nargs="*", default=[512, 256])
    parser.add_argument("--top", type=int, nargs="*", default=[1024, 1024, 512, 256])
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=8, help="steps that insert ids and compile")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    try:
        arrays.module(options.device)
    except RuntimeError as error:
        parser.exit(3, f"{error}\n")

    log = click_log(options)
    result = {"device": options.device, "batch": options.batch}
    for amp in options.amp:
        result[amp] = train(options, log, amp)
        for compiled in (False, True) if options.torch else ():
            rate = train_torch(options, log, amp=amp, compiled=compiled)
            name = f"torch_{'compiled' if compiled else 'eager'}"
            result[amp][f"samples_per_second_{name}"] = rate
            tell(f"{amp} {name}", options.batch, options.batch / rate)
    result["refused"] = sum(cublaslt.refused.values())  # matmuls that cublasLt left to others
    print(f"cublasLt refused {result['refused']} matmuls", file=sys.stderr)
    print(json.dumps(result))
    sys.exit(not all(math.isfinite(result[amp]["loss"]) for amp in options.amp))


if __name__ == "__main__":
    main()
