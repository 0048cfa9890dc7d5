"""Training by ranks that share a GPU: what they must agree on, and one JSON line on stdout.

    mpirun -n 2 --oversubscribe python scripts/gpu_ranks.py
    mpirun -n 2 --oversubscribe python scripts/gpu_ranks.py --device sim --batch 32 --ids 50 \\
        --tables 2 --width 4 --bottom 8 --top 8 --steps 2

A DLRM is trained by SGD, by one rank alone and by all together: tables and dense parameters must
differ by less than 1e-3 of what training changed (norms). Together they then train it twice with
int8 for rows and gradients: that must give the same bits, near what it gives without a codec. A
rank takes the GPU of its number on its host, and begins anew after the last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

import cupyrec
from cupyrec import arrays, models, optim
from cupyrec.data import Arrays, RankSlices
from cupyrec.parallel import Communicator, Exchange, world

NEAR, NEAR_INT8 = 1e-3, 0.03  # of what training changes: to one rank's, to that without a codec


def click_log(options: argparse.Namespace) -> Arrays:
    rng = np.random.default_rng(1)
    rows = options.batch * options.steps
    dense = rng.standard_normal((rows, options.dense), np.float32)
    ids = rng.zipf(1.3, (rows, options.tables)) % options.ids
    odds = np.exp(dense[:, 0] + ids[:, 0] % 3 - 1)
    return Arrays(dense, ids, (rng.random(rows) < odds / (1 + odds)).astype(np.float32))


def train(ranks: Communicator, options: argparse.Namespace, codec: str, lr: float) -> dict:
    """Loss of each step, all vectors, dense parameters; how long a step took from the third on."""
    cupyrec.manual_seed(0)
    model = models.DLRM(
        options.dense, options.tables, options.width, bottom=options.bottom, top=options.top
    )
    exchange = Exchange(ranks, forward=codec, backward=codec, num_tables=options.tables)
    model.embedding.group.exchange = exchange
    model.to(options.device)
    optimizer = optim.SGD(model.parameters(), lr)
    losses, times = [], []
    for batch in RankSlices(click_log(options), ranks.rank, ranks.size).batches(options.batch):
        start = time.perf_counter()
        losses.append(cupyrec.train_step(model, batch, optimizer).item())  # which waits
        times.append(time.perf_counter() - start)
    model.eval()
    xp = model.embedding.group.xp
    ids = np.repeat(np.arange(options.ids)[:, None], options.tables, axis=1)
    vectors = model.embedding(arrays.copy_to(xp, ids)).data
    return {
        "losses": ranks.all_gather("losses", np.array(losses)).sum(axis=0),
        "vectors": arrays.to_host(vectors),
        "dense": arrays.to_host(optimizer.parameter_groups[0].data),
        "milliseconds": 1e3 * float(np.median(times[2:] or times)),
    }


def distance(run: dict, other: dict, start: dict) -> float:
    """Norm of the difference over that of what training changed, the larger one."""

    def norm(name: str, a: dict, b: dict) -> float:
        return float(np.linalg.norm(a[name].astype(float) - b[name]))

    return max(norm(name, run, other) / norm(name, other, start) for name in ("vectors", "dense"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=arrays.DEVICES, default="cuda")
    parser.add_argument("--batch", type=int, default=16_384, help="of all ranks together")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dense", type=int, default=13)
    parser.add_argument("--ids", type=int, default=10_000, help="of a table")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--bottom", type=int, nargs="*", default=[256])
    parser.add_argument("--top", type=int, nargs="*", default=[256, 128])
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    ranks = world()
    try:
        arrays.module(options.device)
    except RuntimeError as error:
        parser.exit(3, f"{error}\n")

    one = Communicator()
    start, alone = (train(one, options, "none", lr) for lr in (0.0, options.lr))
    none, int8, again = (train(ranks, options, c, options.lr) for c in ("none", "int8", "int8"))
    same = all(int8[of].tobytes() == again[of].tobytes() for of in ("losses", "vectors", "dense"))
    far, lost = distance(none, alone, start), distance(int8, none, start)
    good = same and far <= NEAR and 0 < lost <= NEAR_INT8
    told = ranks.all_gather_json("results", {"good": good, "same": same, "far": far, "lost": lost})
    result = {
        "ranks": ranks.size, "device": options.device, "cuda_aware": ranks.cuda_aware,
        "good": all(of_rank["good"] for of_rank in told),
        "same_bits": all(of_rank["same"] for of_rank in told),
        "distance_to_one_rank": max(of_rank["far"] for of_rank in told),
        "distance_int8": max(of_rank["lost"] for of_rank in told),
        "milliseconds_one_rank": alone["milliseconds"],
        "milliseconds_none": none["milliseconds"],
        "milliseconds_int8": again["milliseconds"],
    }  # fmt: skip
    if ranks.rank == 0:
        print(json.dumps(result))
    sys.exit(not result["good"])


if __name__ == "__main__":
    main()
