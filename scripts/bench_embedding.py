"""What makes an embedding fast, a part at a time: one JSON line of figures on stdout.

    python scripts/bench_embedding.py --case unique
    python scripts/bench_embedding.py --case growth
    python scripts/bench_embedding.py --case bags

`unique`: unique keys with inverse against np.unique, on one column of 213k Zipf ids; and on a batch
of 8192 samples and 26 tables of 200k ids, with the look-up of their rows, all known. The batch is
put field by field first, as `EmbeddingMLP` does; bags get that order by `take_bags`, and the plain
look-up, DLRM's, goes sample by sample. `growth`: whole training steps whose ids are all new, up to
50M of them, and look-ups of known ids at 1M, 10M and 50M (10 GB of memory). `bags`: forward,
backward and SGD update of 26 features with 1 to 50 ids each, width 64, summed, against PyTorch's
EmbeddingBag. Sides alternate; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from bench_train import Peer, positive, raw_ids, seconds, zipf_indices

import cupyrec
from cupyrec import nn, optim
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.reorder import by_field, repeat
from cupyrec.ops.unique_keys import unique_keys

UNIQUE = dict(tables=26, ids=200_000, batch=8192, zipf=1.1, batches=1)
GROWTH = dict(tables=16, width=16, batch=8192, sizes=[1_000_000, 10_000_000, 50_000_000], lr=0.01)
CALLS = 5  # of ours while NumPy has one: both sides take about as long
BAGS = dict(
    model="bags", optimizer="sgd", tables=26, ids=100_000, width=64, longest=50, batch=1024,
    zipf=1.1, lr=0.01, batches=4,
)  # fmt: skip


def say(*text: Any) -> None:
    print(*text, file=sys.stderr)


def unique(case: dict, options: argparse.Namespace) -> dict:
    rng, keys = np.random.default_rng(1), case["tables"] * case["batch"]
    one = raw_ids(zipf_indices(rng, case | {"tables": 1, "batch": keys}).reshape(-1))
    many = raw_ids(zipf_indices(rng, case)[0])
    table, fields = np.zeros(keys, np.uint32), np.arange(case["tables"], dtype=np.uint32)
    index = HashTable()
    for field in fields:
        index.insert(np.full(case["ids"], field), raw_ids(np.arange(case["ids"])))

    def encode() -> None:
        found = unique_keys(repeat(fields, len(many)), by_field(many))
        index.find_or_insert(found.tables, found.ids)

    combined = raw_ids((many ^ fields.astype(np.int64) << 40).reshape(-1))  # as unlike as keys are
    result, calls = {}, CALLS * options.steps
    for figure, theirs, ours in (
        ("ratio_vs_numpy", one, lambda: unique_keys(table, one)),
        ("encode_ratio_vs_numpy", combined, encode),
    ):
        rows = []
        for i in range(options.rounds + 1):
            numpy = seconds(lambda k=theirs: np.unique(k, return_inverse=True), options.steps)
            row = numpy, seconds(ours, calls)
            times = f"numpy {row[0] * 1e3:.2f} ms, ours {row[1] * 1e3:.2f} ms"
            say(figure, times, *[] if i else ["to warm up, compilation included"])
            if i:
                rows.append(row)
        result[figure] = statistics.median(numpy / ours for numpy, ours in rows)
    return result


def growth(case: dict, options: argparse.Namespace) -> dict:
    cupyrec.manual_seed(0)
    rng, shape = np.random.default_rng(1), (case["batch"], case["tables"])
    embedding = nn.MultiTableEmbedding(case["tables"], case["width"])
    optimizer = optim.Adagrad(embedding.parameters(), case["lr"])
    store, gradient = embedding.group.store, np.ones((*shape, case["width"]), np.float32)

    def ids_of(numbers: np.ndarray) -> np.ndarray:
        return raw_ids(numbers).reshape(shape)  # number n has its table: n % tables

    look_ups, pauses, known, step = [], [], 0, gradient.size // case["width"]
    for size in case["sizes"]:
        while known < size:
            ids = ids_of(np.arange(known, known + step))
            start = time.perf_counter()
            embedding(ids).backward(gradient)
            optimizer.step()
            pauses.append(time.perf_counter() - start)
            known += step
        rows = rng.integers(known // case["tables"], size=shape)
        ids = ids_of(rows * case["tables"] + np.arange(case["tables"]))
        embedding.eval()
        embedding(ids)  # which compiles, the first time
        look_ups.append(min(seconds(lambda i=ids: embedding(i), 1) for _ in range(options.rounds)))
        embedding.train()
        times = look_ups[-1], statistics.median(pauses), max(pauses[2:])
        milliseconds = [round(1e3 * t, 1) for t in times]
        say(f"{known:,} ids: look-up, median and longest step", milliseconds, "ms")
    row = 4 * (store.width + sum(part.columns for part in store.state))
    return {
        "lookup_growth": look_ups[-1] / look_ups[0],
        "bytes_per_id": store.nbytes / len(store) - row,
        "longest_pause": max(pauses[2:]),  # the first steps compile
    }


def ragged(case: dict) -> dict[str, np.ndarray]:
    """Bags of 1 to `longest` Zipf indices: values one after another, lengths (batches, B, F)."""
    rng = np.random.default_rng(1)
    shape = case["batches"], case["batch"], case["tables"]
    lengths = rng.integers(1, case["longest"] + 1, shape)
    column = zipf_indices(rng, case | {"tables": 1, "batches": 1, "batch": lengths.sum()})
    return {"values": column.reshape(-1), "lengths": lengths}


class OurBags:
    """A training step on bags by cupyrec."""

    def __init__(self, case: dict, data: dict[str, np.ndarray]) -> None:
        cupyrec.manual_seed(0)
        tables, width = case["tables"], case["width"]
        self.embedding = nn.MultiTableEmbedding(tables, width, pooling="sum")
        self.optimizer = optim.SGD(self.embedding.parameters(), case["lr"])
        counts = data["lengths"].reshape(case["batches"], -1)
        ends = np.cumsum(counts.sum(axis=1))[:-1]
        values = np.split(raw_ids(data["values"]), ends)
        offsets = [np.concatenate([[0], np.cumsum(c)]) for c in counts]
        self.batches = list(zip(values, offsets, strict=True))
        self.gradient = np.ones((case["batch"], tables, width), np.float32)
        everything = raw_ids(np.arange(case["ids"]))
        self.embedding(np.tile(everything, tables), np.arange(tables + 1) * case["ids"])
        self.at = 0

    def __call__(self) -> None:
        self.at = (self.at + 1) % len(self.batches)
        self.embedding(*self.batches[self.at]).backward(self.gradient)
        self.optimizer.step()


def bags(case: dict, options: argparse.Namespace) -> dict:
    data = ragged(case)
    peer, ours, ratios = Peer(case, data, options.threads), OurBags(case, data), []
    for i in range(options.rounds + 1):
        row = seconds(ours, options.steps), peer.seconds("step", options.steps)
        times = f"ours {row[0] * 1e3:.1f} ms, PyTorch {row[1] * 1e3:.1f} ms"
        say(times, *[] if i else ["to warm up, compilation included"])
        if i:
            ratios.append(row[1] / row[0])
    peer.close()
    return {"bags_ratio_vs_torch": statistics.median(ratios)}


CASES = {"unique": (unique, UNIQUE), "growth": (growth, GROWTH), "bags": (bags, BAGS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=6, help="calls a round")
    options = parser.parse_args()
    cupyrec.set_num_threads(options.threads)
    run, case = CASES[options.case]
    print(json.dumps({"case": options.case, **run(case, options)}))


if __name__ == "__main__":
    main()
