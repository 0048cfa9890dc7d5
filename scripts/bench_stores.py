"""Speed of tables on an SSD beside tables in memory and RocksDB: one JSON line on stdout.

    python scripts/bench_stores.py --case ssd
    python scripts/bench_stores.py --case insert

Case `ssd`: 20 million rows of width 32 with Adagrad's state in 26 tables, an MLP 64-32-1 on their
vectors, batch 8192, ids of each table by Zipf's law with exponent 1.05; a cache of a tenth of the
rows, the page cache kept out; with `--pages` a second run lets it in. All rows are there, and
`--warm-up` steps have filled the cache before anything is timed; each step's batch is drawn anew,
and told ahead by `prepare`, as `fit` does.

- `ratio_vs_memory`: steps a second over those of the same model with its rows in memory, on the
  same batches in alternating rounds, the median.
- `ratio_allowed`: what it would be if a step took the longer of its time in memory and of the
  disk's for one read for each miss of `hit_rate_ideal`, by as many threads as are fastest.
- `hit_rate`: unique keys of the timed steps' batches that were found in the cache; `hit_rate_ideal`
  those of them that are among the truly most frequent tenth of the rows.
- `ratio_vs_rocksdb`: seconds that RocksDB takes for the rows of a batch over ours, alternating step
  by step, the median. Of the batch's unique keys ours looks up the rows, gathers the vectors and
  updates vectors and state by Adagrad where they lie; the peer gets the rows by one multi-get into
  an array and puts as many, updated before the clock runs, by one write batch. Its block cache has
  as many bytes as our cache and was filled several times, its keys are made before the clock runs.
  It needs the `bench` extra.
- `disk_ratio`: bytes of the store's files over those of its rows, keys and state.
- `disk_reads_per_second`: what the disk itself gives, 4 KB at random places, by threads.

Case `insert`: 100 million new ids, width 8, then look-ups of random ones; `peak_rss_bytes` is the
most memory that the process had.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import numpy as np
from bench_peer_rocksdb import RocksRows, have_rocksdb, keys_of
from bench_train import positive

import cupyrec
from cupyrec import nn, optim
from cupyrec.embedding import CachedSSD, Rows
from cupyrec.ops.adagrad import adagrad_rows
from cupyrec.ops.embedding_rows import gather_rows
from cupyrec.ops.reorder import by_field, repeat
from cupyrec.ops.unique_keys import unique_keys

SSD = dict(tables=26, width=32, top=[64, 32], batch=8192, zipf=1.05, lr=0.01, cached=0.1)
INSERT = dict(tables=26, width=8, batch=1 << 17, cached=0.01, look_ups=100)
BLOCK = 1 << 16  # rows imported at a time
PROBE, READS = 4 << 30, 50_000  # bytes of the file that is read at random, reads by all threads
KEY_BYTES = 12
FILLING = 30  # batches for RocksDB's cache, each of which asks for a fifth of it or more


def say(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """Numbers as 64-bit ids that look like hashes, no two alike: SplitMix64's finalizer."""
    h = numbers.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ h >> np.uint64(shift)) * np.uint64(factor)
    return (h ^ h >> np.uint64(31)).view(np.int64)


class Popularity:
    """Ids of tables by rank, the first being the most frequent, and batches of Zipf's law."""

    def __init__(self, tables: int, rows: int, batch: int, zipf: float) -> None:
        self.tables, self.rows, self.batch = tables, rows // tables, batch
        weights = np.arange(1, self.rows + 1) ** -zipf
        self._cumulative = np.cumsum(weights / weights.sum())

    def ranks(self, step: int) -> np.ndarray:
        """(batch, tables) int64, the same for the same step."""
        uniform = np.random.default_rng([7, step]).random((self.batch, self.tables))
        return np.minimum(np.searchsorted(self._cumulative, uniform), self.rows - 1)

    def ids(self, ranks: np.ndarray, tables: np.ndarray) -> np.ndarray:
        return scrambled(ranks * self.tables + tables)

    def batches(self, first: int, stop: int) -> list[np.ndarray]:
        """Ids (batch, tables) of steps."""
        tables = np.arange(self.tables)
        return [self.ids(self.ranks(step), tables) for step in range(first, stop)]

    def everything(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tables and ids of all rows, some at a time, in an order that says nothing of ranks."""
        for numbers in np.array_split(
            np.random.default_rng(5).permutation(self.rows * self.tables),
            -(-self.rows * self.tables // BLOCK),
        ):
            tables = numbers % self.tables
            yield tables.astype(np.uint32), self.ids(numbers // self.tables, tables)

    def ideal_hit_rate(self, first: int, stop: int, cached: float) -> float:
        """Of the unique keys of steps those that are among the most frequent rows."""
        hits = keys = 0
        for step in range(first, stop):
            for column in self.ranks(step).T:
                ranks = np.unique(column)
                hits, keys = hits + (ranks < cached * self.rows).sum(), keys + ranks.size
        return float(hits / keys)


class Model(nn.Module):
    """An MLP on the vectors of all tables side by side."""

    def __init__(self, case: dict, tier: object) -> None:
        told = {} if tier is None else {"tier": tier}
        self.embedding = nn.MultiTableEmbedding(case["tables"], case["width"], **told)
        self.top = nn.EmbeddingMLP(self.embedding, case["top"], 1, skip_final_activation=True)

    def forward(self, ids):
        return self.top(ids)


class Trainer:
    """The model with all its rows, in a tier."""

    def __init__(self, case: dict, popularity: Popularity, tier: object = None) -> None:
        cupyrec.manual_seed(0)
        self.model, self.lr = Model(case, tier), case["lr"]
        self.optimizer = optim.Adagrad(self.model.parameters(), case["lr"])
        self.labels = (np.random.default_rng(3).random((case["batch"], 1)) < 0.25).astype("float32")
        self.store = self.model.embedding.group.store
        self.width = case["width"]
        for tables, ids in popularity.everything():
            self.store.import_rows(Rows(tables, ids, vectors_of(ids, self.width), {}))

    def train(self, batches: list[np.ndarray]) -> None:
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            if following is not None:
                self.model.prepare(following)
            loss = cupyrec.bce_with_logits(self.model(ids), self.labels)
            loss.backward()
            self.optimizer.step()

    def store_alone(self, tables: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """What a step asks of the store: return the vectors (U, D) of unique keys, update them."""
        offsets = np.concatenate([[0], np.cumsum(counts)])
        places = self.store.find_or_insert(tables, ids, self._none, offsets)
        order, out = np.arange(ids.size), np.empty((ids.size, self.width), np.float32)
        unseen = np.empty((0, self.width), np.float32)
        self.store.read(places, lambda memory, rows: gather_rows(memory, rows, order, unseen, out))
        self.store.update(
            places, lambda memory, rows: adagrad_rows(memory, rows, out, lr=self.lr, eps=1e-10)
        )
        self.store.end_step()
        return out

    @staticmethod
    def _none(tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        raise AssertionError(f"{ids.size} of the ids have no row")


def vectors_of(ids: np.ndarray, width: int) -> np.ndarray:
    """Vectors that ids begin with: anything that is not all alike."""
    low = (ids & 0xFFFF).astype(np.float32)[:, None]
    return (low + np.arange(width, dtype=np.float32)) * np.float32(1e-7)


def unique_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unique tables and ids of a batch, and how often each is asked for."""
    tables = repeat(np.arange(ids.shape[1], dtype=np.uint32), len(ids))
    keys = unique_keys(tables, by_field(ids))
    return keys.tables, keys.ids, np.bincount(keys.inverse, minlength=keys.ids.size)


def bytes_in(folder: Path) -> int:
    """Bytes that files take on the disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


_pread = numba.types.ExternalFunction(
    "pread", numba.int64(numba.int32, numba.uint64, numba.uint64, numba.int64)
)


@numba.njit(nogil=True)
def read_at(file, buffer, offsets):
    """Whether all reads of 4 KB succeed."""
    for offset in offsets:
        if _pread(np.int32(file), np.uint64(buffer), np.uint64(4096), offset) != 4096:
            return False
    return True


def disk_reads(folder: Path, nbytes: int) -> dict[str, float] | None:
    """4 KB reads a second at random places of a file, by threads; None without direct I/O."""
    path, rng = folder / "probe", np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(0, nbytes, 16 << 20):
            file.write(rng.bytes(min(nbytes, 16 << 20)))
        file.flush()
        os.fsync(file.fileno())
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    rates = {}
    with contextlib.closing(mmap.mmap(-1, 32 * 4096)) as pages:
        buffer = np.frombuffer(pages, np.uint8)
        for threads in (1, 8, 32):
            offsets = rng.integers(0, nbytes // 4096, (threads, READS // threads)) * 4096
            places = buffer.ctypes.data + 4096 * np.arange(threads)
            read_at(file, places[0], offsets[0, :1])  # compiles
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                start = time.perf_counter()
                done = list(pool.map(read_at, [file] * threads, places, offsets))
                rates[str(threads)] = offsets.size / (time.perf_counter() - start)
            if not all(done):
                raise OSError(f"{path}: a read of 4 KB failed")
        del buffer
    os.close(file)
    path.unlink()
    return rates


class Contest:
    """Trainers by name, step after step."""

    def __init__(self, case: dict, popularity: Popularity, trainers: dict[str, Trainer]) -> None:
        self.case, self.popularity, self.trainers, self.step = case, popularity, trainers, 0

    def batches(self, steps: int) -> list[np.ndarray]:
        self.step += steps
        return self.popularity.batches(self.step - steps, self.step)

    def warm_up(self, steps: int) -> None:
        for first in range(0, steps, 10):
            batches = self.batches(min(10, steps - first))
            for trainer in self.trainers.values():
                trainer.train(batches)

    def rounds(self, rounds: int, steps: int, reads: dict[str, float] | None) -> dict[str, object]:
        """Steps a second of each, ratios, and hit rates; `reads` is what `disk_reads` says."""
        trainers = self.trainers
        caches = {name: t for name, t in trainers.items() if name != "memory"}
        before, first = {name: t.store.metrics() for name, t in caches.items()}, self.step
        rows = []
        for _ in range(rounds):
            batches = self.batches(steps)
            rows.append(
                {name: seconds(lambda t=t, b=batches: t.train(b)) for name, t in trainers.items()}
            )
            milliseconds = {name: round(1e3 * took / steps, 1) for name, took in rows[-1].items()}
            say("ms a step:", milliseconds)
        result = {
            f"steps_per_second_{name}": steps / statistics.median(row[name] for row in rows)
            for name in trainers
        }
        for name, trainer in caches.items():
            after, end = trainer.store.metrics(), name.removeprefix("ssd")
            hits, misses = (after[what] - before[name][what] for what in ("hits", "misses"))
            ratios = [row["memory"] / row[name] for row in rows]
            result[f"ratio_vs_memory{end}"] = statistics.median(ratios)
            result[f"hit_rate{end}"] = hits / (hits + misses)
            read = after["read_bytes"] - before[name]["read_bytes"]
            result[f"read_bytes_per_step{end}"] = read / (rounds * steps)
        ideal = self.popularity.ideal_hit_rate(first, self.step, self.case["cached"])
        result["hit_rate_ideal"] = ideal
        if reads is not None:
            reading = (1 - ideal) * (hits + misses) / (rounds * steps) / max(reads.values())
            result["ratio_allowed"] = 1 / max(1, reading * result["steps_per_second_memory"])
        return result

    def beside_rocksdb(self, peer: RocksRows, rounds: int) -> float:
        """How many times as long the peer takes for the rows of a batch."""
        ours, ratios = self.trainers["ssd"], []
        for i in range(FILLING + rounds):
            (ids,) = self.batches(1)
            tables, ids, counts = unique_of(ids)
            keys = keys_of(tables, ids)
            got = []
            took_get = seconds(lambda keys=keys, got=got: got.append(peer.get(keys)))
            rows = got[0] * np.float32(0.999)
            took = took_get + seconds(lambda keys=keys, rows=rows: peer.put(keys, rows))
            own = seconds(lambda key=(tables, ids, counts): ours.store_alone(*key))
            if i >= FILLING:
                ratios.append(took / own)
                say(f"rows of a batch, {ids.size:,}: {1e3 * own:.1f} ms, RocksDB {1e3 * took:.1f}")
        return statistics.median(ratios)


def ssd(options: argparse.Namespace, folder: Path) -> dict:
    case, rows = SSD | {"batch": options.batch or SSD["batch"]}, options.rows
    popularity = Popularity(case["tables"], rows, case["batch"], case["zipf"])
    rows, cached = popularity.rows * case["tables"], int(case["cached"] * rows)
    rates = disk_reads(folder, min(PROBE, 1024 * rows // 4096 * 4096))
    say("4 KB reads a second by threads:", rates)
    trainers = {"memory": Trainer(case, popularity)}
    say(f"{rows:,} rows in memory")
    for name, direct in [("ssd", True), ("ssd_warm", False)][: 1 + options.pages]:
        tier = CachedSSD(path=folder / name, cache_rows=cached, direct=direct)
        trainers[name] = Trainer(case, popularity, tier)
        say(f"{rows:,} rows on disk, {cached:,} in a cache")
    contest = Contest(case, popularity, trainers)
    contest.warm_up(options.warm_up)
    result = contest.rounds(options.rounds, options.steps, rates)
    row_bytes = KEY_BYTES + 4 * 2 * case["width"]  # with Adagrad's state
    result["disk_ratio"] = bytes_in(folder / "ssd") / (rows * row_bytes)
    result["disk_reads_per_second"] = rates
    if options.peer == "rocksdb":
        peer = RocksRows(folder, cached * row_bytes, options.threads)
        load(peer, popularity, case["width"])
        say(f"{rows:,} rows in RocksDB")
        result["ratio_vs_rocksdb"] = contest.beside_rocksdb(peer, options.rounds)
        peer.close()
    for name in trainers:
        trainers[name].store.close()
    return result


def load(peer: RocksRows, popularity: Popularity, width: int) -> None:
    """Give the peer all rows, a table at a time, as its keys sort."""
    for table in range(popularity.tables):
        ids = popularity.ids(np.arange(popularity.rows), np.int64(table))
        state = np.zeros((ids.size, width), np.float32)
        rows = np.hstack([vectors_of(ids, width), state])
        peer.load(np.full(ids.size, table, np.uint32), ids, rows)


def peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def insert(options: argparse.Namespace, folder: Path) -> dict:
    case = INSERT | {"batch": options.batch or INSERT["batch"]}
    count = options.ids
    cached = max(case["batch"], int(case["cached"] * count))
    tier = CachedSSD(path=folder / "ssd", cache_rows=2 * cached, direct=True)
    group = nn.MultiTableEmbedding(case["tables"], case["width"], tier=tier).group
    store = group.store

    def look_up(numbers: np.ndarray) -> None:
        tables = (numbers % case["tables"]).astype(np.uint32)
        found = group.look_up(tables, scrambled(numbers), insert=True)
        group.vectors(found)
        store.end_step()

    start = time.perf_counter()
    for first in range(0, count, case["batch"]):
        look_up(np.arange(first, min(first + case["batch"], count)))
        if first // case["batch"] % 50 == 49:
            rate = len(store) / (time.perf_counter() - start)
            say(f"{len(store):,} ids, {rate:,.0f} a second, {peak_rss() / 1e9:.2f} GB")
    store.save()
    inserted, rng = time.perf_counter() - start, np.random.default_rng(1)
    asked = [rng.integers(0, count, case["batch"]) for _ in range(case["look_ups"])]
    looked_up = seconds(lambda: [look_up(numbers) for numbers in asked])
    if len(store) != count:
        raise AssertionError(f"{len(store)} rows of {count} ids")
    result = {
        "ids": count,
        "inserts_per_second": count / inserted,
        "look_ups_per_second": case["look_ups"] * case["batch"] / looked_up,
        "peak_rss_bytes": peak_rss(),
        "disk_bytes_per_id": bytes_in(folder / "ssd") / count,
    }
    store.close()
    return result


CASES = {"ssd": ssd, "insert": insert}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--peer", choices=["rocksdb", "none"], default="rocksdb")
    parser.add_argument("--rows", type=positive, default=20_000_000, help="of case ssd")
    parser.add_argument("--ids", type=positive, default=100_000_000, help="of case insert")
    parser.add_argument("--batch", type=positive)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--warm-up", type=positive, default=300, help="steps")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=6, help="of a round")
    parser.add_argument("--pages", action="store_true", help="once more with the page cache")
    parser.add_argument("--folder", help="in which a folder is made for the time; on the SSD")
    options = parser.parse_args()
    if options.case == "ssd" and options.peer == "rocksdb" and not have_rocksdb():
        sys.exit("rocksdict must be installed: python -m pip install --editable '.[bench]'")
    cupyrec.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = CASES[options.case](options, Path(folder))
    print(json.dumps({"case": options.case, **result}))


if __name__ == "__main__":
    main()
