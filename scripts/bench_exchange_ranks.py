"""What every rank of bench_exchange.py does; rank 0 prints what was measured as a JSON line.

    mpirun -n 2 python scripts/bench_exchange_ranks.py wire '{"ids": 1000, …}'

`link` runs in a network namespace whose loopback it may limit: rank 0 sets the rate while all ranks
wait, so that one model, built and warm, is timed at every rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_train import raw_ids, zipf_indices

import cupyrec
from cupyrec import models, optim, training
from cupyrec.data import Batch
from cupyrec.ops.messages import CODECS
from cupyrec.parallel import Communicator, Exchange, world


def say(*text: Any) -> None:
    if world().rank == 0:
        print(*text, file=sys.stderr, flush=True)


def seconds(ranks: Communicator, work: Callable[[], Any], repeat: int) -> list[float]:
    """Seconds of each call, the slowest rank's."""
    times = []
    for _ in range(repeat):
        ranks.barrier("a start")
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return ranks.all_gather("seconds", np.array(times)).max(axis=0).tolist()


def sent_since(ranks: Communicator, before: dict[str, int]) -> dict[str, int]:
    """Bytes that all ranks have sent since then, by what they were for."""
    own = {what: n - before.get(what, 0) for what, n in ranks.bytes_sent.items()}
    of_ranks = ranks.all_gather_json("bytes", own)
    return {what: sum(of_rank.get(what, 0) for of_rank in of_ranks) for what in own if own[what]}


def relative_error(rows: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(rows - exact) / np.linalg.norm(exact))


def wire(ranks: Communicator, case: dict) -> list[dict]:
    """What rows and gradients of unique keys take, by width and codec."""
    return [
        there_and_back(ranks, case, width, codec) for width in case["widths"] for codec in CODECS
    ]


def there_and_back(ranks: Communicator, case: dict, width: int, codec: str) -> dict:
    exchange = Exchange(ranks, forward=codec, backward=codec, num_tables=case["tables"])
    values = np.random.default_rng(99).standard_normal((case["ids"], width), np.float32)
    ids = np.random.default_rng(ranks.rank).permutation(case["ids"])[: case["rows"]]
    tables, own = (ids % case["tables"]).astype(np.uint32), values[ids]

    def both() -> None:
        nonlocal rows, gradients
        rows = exchange.rows(route, values, route.ids, training=True)
        gradients = exchange.gradients(route, own)()

    rows = gradients = None
    before = dict(ranks.bytes_sent)
    route = exchange.ask(tables, ids).result()
    keys = sent_since(ranks, before).get("keys", 0)
    both()  # which may have to compile
    moved = sent_since(ranks, before)
    errors = [relative_error(rows, own), relative_error(gradients, values[route.ids])]
    return {
        "ranks": ranks.size, "width": width, "codec": codec, "keys": keys,
        "bytes": moved.get("rows", 0) + moved.get("gradients", 0),
        "milliseconds": 1e3 * statistics.median(seconds(ranks, both, case["repeat"])),
        "error": float(ranks.all_gather("errors", np.array(errors)).max()),
    }  # fmt: skip


class Link:
    """Steps of a DLRM's training over a loopback of some rate, with some codec."""

    def __init__(self, ranks: Communicator, case: dict) -> None:
        cupyrec.manual_seed(0)
        rng = np.random.default_rng(1)  # the same on all ranks: each takes its rows of a batch
        sizes = case["num_dense"], case["tables"], case["width"]
        self.ranks, self.repeat, self.tries = ranks, case["steps"], case["tries"]
        self.model = models.DLRM(*sizes, bottom=case["bottom"], top=case["top"])
        self.exchange = Exchange(ranks, num_tables=case["tables"])
        self.model.embedding.group.exchange = self.exchange
        self.optimizer = optim.SGD(self.model.parameters(), case["lr"])
        shape = case["batch"], case["num_dense"]
        batches = [
            Batch(
                rng.standard_normal(shape, np.float32), ids,
                (rng.random((case["batch"], 1)) < 0.25).astype(np.float32),
            ).of_rank(ranks.rank, ranks.size)
            for ids in raw_ids(zipf_indices(rng, case))
        ]  # fmt: skip
        self.batches = itertools.pairwise(itertools.cycle(batches))
        for _ in batches:  # all ids are known from here on
            self.step()
        self.bytes = {codec: self._bytes(codec) for codec in ("none", "fp16", "int8")}

    def step(self) -> None:
        batch, following = next(self.batches)
        self.model.prepare(following.ids)  # as `fit` does
        training.train_step(self.model, batch, self.optimizer)

    def _bytes(self, codec: str) -> int:
        self.exchange.forward = self.exchange.backward = codec
        self.step()  # which may have to compile
        before = dict(self.ranks.bytes_sent)
        self.step()
        moved = sent_since(self.ranks, before)
        say(f"{codec}: a step sends", {what: f"{n / 1e6:.2f} MB" for what, n in moved.items()})
        return sum(moved.values())

    def times(self, codec: str, rate: float | None) -> list[float]:
        """Seconds of some steps at a rate in bits a second; None: without limit."""
        self.ranks.barrier("a rate")
        if self.ranks.rank == 0:
            limit = ["pfifo", "limit", "100000"]
            if rate is not None:  # a packet of the loopback has up to 64 kB
                limit = ["tbf", "rate", f"{rate:.0f}bit", "burst", "256kb", "latency", "1s"]
            subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *limit], check=True)
        self.ranks.barrier("a rate")
        self.exchange.forward = self.exchange.backward = codec
        self.step()  # what is on its way at the old rate
        return seconds(self.ranks, self.step, self.repeat)

    def seek(self, codec: str, shares: tuple[float, float], rounds: int) -> dict[str, float]:
        """Compare at the rate where communication has its share of a step's time.

        The link adds bytes / rate to a step, less what is hidden behind computation. Each
        comparison tells how much that is, but for noise, and their median gives the next rate: so
        the search closes in though single comparisons err.
        """
        low, high = shares
        wanted = (low + high) / (2 - low - high)  # the time added over the step's own
        full = 8 * self.bytes[codec] / statistics.median(self.times(codec, None))
        hidden, known, rows = 0.0, [], []
        for _ in range(self.tries):
            rate = full / (wanted + max(hidden, -wanted / 2))
            rows.append(self.compare(codec, rate, rounds))
            share = rows[-1]["share"]
            say(f"{codec} at {rate / 1e6:,.0f} Mbit/s: share {share:.3f}")
            if low <= share <= high:
                return rows[-1]
            known.append(full / rate - share / (1 - share))
            hidden = statistics.median(known)
        say(f"{codec}: no rate gave a share of {low} to {high}; the nearest is told")
        return min(rows, key=lambda row: abs(row["share"] - (low + high) / 2))

    def compare(self, codec: str, rate: float, rounds: int) -> dict[str, float]:
        """Share of communication with a codec at a rate, and how much faster int8 is.

        Both are medians over the rounds, each of which times all three runs in turn: what else the
        machine does slows them alike.
        """
        runs = {"unlimited": (codec, None), "limited": (codec, rate), "int8": ("int8", rate)}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            for name in list(runs)[:: -1 if number % 2 else 1]:  # so that a trend cancels out
                times[name].append(statistics.median(self.times(*runs[name])))

        def ratio(above: str, below: str) -> float:
            return statistics.median(map(operator.truediv, times[above], times[below]))

        share = 1 - ratio("unlimited", "limited")
        return {
            "rate": rate, "share": share, "speedup": ratio("limited", "int8"),
            "allowed": 1 / (1 - share * (1 - self.bytes["int8"] / self.bytes[codec])),
            **{name: statistics.median(of_run) for name, of_run in times.items()},
        }  # fmt: skip


def link(ranks: Communicator, case: dict) -> dict[str, dict]:
    """By codec, how int8 compares at the given rate, or at that of the codec's share."""
    trained = Link(ranks, case)
    rate, rounds = case["rate"], case["rounds"]
    return {
        codec: trained.compare(codec, rate, rounds) if rate else trained.seek(codec, shares, rounds)
        for codec, shares in case["shares"].items()
    }


PARTS = {"wire": wire, "link": link}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("case", type=json.loads)
    options = parser.parse_args()
    ranks = world()
    result = PARTS[options.part](ranks, options.case)
    if ranks.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
