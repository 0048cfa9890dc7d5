"""Training speed of DLRM on a GPU: a table on stderr, one JSON line on stdout.

    python scripts/gpu_train.py
    python scripts/gpu_train.py --device sim --batch 32 --ids 100 --width 4 --bottom 8 --top 8 \\
        --steps 2 --warmup 1

The defaults are OneFlow's DLRM: 26 tables, width 128, bottom 512-256-128, top 1024-1024-512-256-1,
batch 65,536, fp32; ids are Zipf 1.2. Batches come from host memory, as from a reader, and then lie
on the device already; steps run one behind the other and the host waits for the last alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import numpy as np

import cupyrec
from cupyrec import arrays, cublaslt, models, optim
from cupyrec.data import Batch

ZIPF = 1.2


def batches(options: argparse.Namespace) -> list[Batch]:
    """Batches of raw 64-bit ids: the k-th most frequent of a table in proportion to k^-1.2."""
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(np.arange(1, options.ids + 1) ** -ZIPF)
    made = []
    for _ in range(options.batches):
        size = options.batch, options.tables
        ranks = np.searchsorted(cumulative, rng.random(size) * cumulative[-1])
        ids = (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
        dense = rng.standard_normal((options.batch, options.dense), np.float32)
        labels = (rng.random((options.batch, 1)) < 0.25).astype(np.float32)
        made.append(Batch(dense, ids, labels))
    return made


def seconds(model: cupyrec.nn.Module, data: list[Batch], optimizer: optim.Optimizer, steps: int):
    """Seconds of a step, and the last loss."""
    start = time.perf_counter()
    for i in range(steps):
        loss = cupyrec.train_step(model, data[i % len(data)], optimizer)
    value = loss.item()  # waits
    return (time.perf_counter() - start) / steps, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=arrays.DEVICES, default="cuda")
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

    cupyrec.manual_seed(0)
    data = batches(options)
    model = models.DLRM(
        options.dense, options.tables, options.width, bottom=options.bottom, top=options.top
    ).to(options.device)
    optimizer = optim.SGD(model.parameters(), options.lr)
    _, first = seconds(model, data, optimizer, options.warmup)
    here = [batch.to(options.device) for batch in data]
    result = {"device": options.device, "batch": options.batch}
    for name, given in (("from_host", data), ("on_device", here)):
        each, loss = seconds(model, given, optimizer, options.steps)
        result[f"ms_{name}"] = each * 1e3
        result[f"samples_per_second_{name}"] = options.batch / each
        print(f"{name:10} {each * 1e3:9.2f} ms a step, {options.batch / each:13,.0f} samples a "
              "second", file=sys.stderr)  # fmt: skip
    result["rows"] = sum(len(group.store) for _, group in model.named_groups())
    result["loss"] = loss
    result["refused"] = sum(cublaslt.refused.values())  # matmuls that cublasLt left to others
    print(f"{result['rows']:,} rows; loss {first:.4f} -> {loss:.4f}; cublasLt refused "
          f"{result['refused']} matmuls", file=sys.stderr)  # fmt: skip
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))
    sys.exit(not math.isfinite(loss))


if __name__ == "__main__":
    main()
