"""Training speed beside a peer's, alternating in one run: one JSON line of ratios on stdout.

    python scripts/bench_train.py --case mlp --peer torch

Case `mlp`: DLRM, 26 tables x 100k ids, width 128, bottom 512-256-128, top 1024-1024-512-256-1,
batch 4096, Zipf 1.2 ids, SGD. Case `embedding`: an MLP 64-32-1 on the concatenated vectors of
26 tables x 200k ids, width 32, batch 8192, Zipf 1.1 ids, Adam and then Adagrad (the peer's tables:
SparseAdam, Adagrad).

Ours gets raw 64-bit ids, the peer ready-made row numbers. Each round times our steps, the peer's
steps, and the MLPs' matmuls alone (forward, weight and input gradients, into ready buffers) by
NumPy's and by the peer's BLAS; ratios are medians over the rounds, and of several optimizers the
least favourable one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

import cupyrec
from cupyrec import models, nn, optim

ROOT = Path(__file__).resolve().parent.parent
PEER_VENV = ROOT / ".bench-venv"
PAUSE = 0.1  # seconds before each measurement: OpenBLAS' workers spin on after their last matmul
CASES = {
    "mlp": dict(
        model="dlrm", optimizers=["sgd"], tables=26, ids=100_000, width=128, num_dense=13,
        bottom=[512, 256], top=[1024, 1024, 512, 256], batch=4096, zipf=1.2, lr=0.01, batches=16,
    ),
    "embedding": dict(
        model="concatenation", optimizers=["adam", "adagrad"], tables=26, ids=200_000, width=32,
        num_dense=0, top=[64, 32], batch=8192, zipf=1.1, lr=0.01, batches=16,
    ),
}  # fmt: skip
OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam, "adagrad": optim.Adagrad}


def zipf_indices(rng: np.random.Generator, case: dict) -> np.ndarray:
    """(batches, batch, tables) int64: popular ranks spread over the table by a permutation."""
    weights = np.arange(1, case["ids"] + 1) ** -float(case["zipf"])
    cumulative = np.cumsum(weights / weights.sum())
    shape = case["batches"], case["batch"]
    columns = [
        rng.permutation(case["ids"])[
            np.minimum(np.searchsorted(cumulative, rng.random(shape)), case["ids"] - 1)
        ]
        for _ in range(case["tables"])
    ]
    return np.stack(columns, axis=-1)


def raw_ids(indices: np.ndarray) -> np.ndarray:
    """Row numbers as 64-bit ids that look like hashes."""
    return (indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def layer_shapes(case: dict) -> list[tuple[int, int]]:
    """(in, out) of every layer of the MLPs."""
    if case["model"] == "concatenation":
        sizes = [case["tables"] * case["width"], *case["top"], 1]
        return list(itertools.pairwise(sizes))
    features = case["tables"] + 1
    bottom = [case["num_dense"], *case["bottom"], case["width"]]
    top = [case["width"] + features * (features - 1) // 2, *case["top"], 1]
    return [*itertools.pairwise(bottom), *itertools.pairwise(top)]


class Gemms:
    """The MLPs' matmuls alone, by NumPy, into ready buffers."""

    def __init__(self, case: dict) -> None:
        rng = np.random.default_rng(0)
        self.layers = []
        for n, m in layer_shapes(case):
            x, w, dy = (
                rng.standard_normal(shape, np.float32)
                for shape in ((case["batch"], n), (m, n), (case["batch"], m))
            )
            self.layers.append((x, w, dy, np.empty_like(dy), np.empty_like(w), np.empty_like(x)))

    def __call__(self) -> None:
        for x, w, dy, y, dw, dx in self.layers:
            np.matmul(x, w.T, out=y)
            np.matmul(dy.T, x, out=dw)
            np.matmul(dy, w, out=dx)


class Concatenation(nn.Module):
    """An MLP on the vectors of all tables side by side."""

    def __init__(self, case: dict) -> None:
        self.embedding = nn.MultiTableEmbedding(case["tables"], case["width"])
        self.top = nn.EmbeddingMLP(self.embedding, case["top"], 1, skip_final_activation=True)

    def forward(self, dense, ids):
        return self.top(ids)


def dlrm(case: dict) -> nn.Module:
    sizes = case["num_dense"], case["tables"], case["width"]
    return models.DLRM(*sizes, bottom=case["bottom"], top=case["top"])


MODELS = {"dlrm": dlrm, "concatenation": Concatenation}


class Ours:
    """A training step by cupyrec."""

    def __init__(self, case: dict, data: dict[str, np.ndarray]) -> None:
        cupyrec.manual_seed(0)
        self.model = MODELS[case["model"]](case)
        self.optimizer = OPTIMIZERS[case["optimizer"]](self.model.parameters(), case["lr"])
        self.dense, self.labels = data["dense"], data["labels"]
        self.ids = raw_ids(data["indices"])
        everything = raw_ids(np.arange(case["ids"]))
        for first in range(0, case["ids"], 10_000):  # as many rows as the peer has
            block = everything[first : first + 10_000]
            self.model.embedding(np.repeat(block[:, None], case["tables"], axis=1))
        self.at = 0

    def __call__(self) -> None:
        i = self.at = (self.at + 1) % len(self.labels)
        loss = cupyrec.bce_with_logits(self.model(self.dense[i], self.ids[i]), self.labels[i])
        loss.backward()
        self.optimizer.step()


class Peer:
    """scripts/bench_peer_torch.py in a venv of its own: asleep but when it is asked to run."""

    def __init__(self, case: dict, data: dict[str, np.ndarray], threads: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        np.savez(self.folder.name + "/data.npz", **data)
        case = case | {"threads": threads}
        command = [
            python_with_torch(), ROOT / "scripts/bench_peer_torch.py",
            self.folder.name + "/data.npz", json.dumps(case),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, what: str, repeat: int) -> float:
        """Mean seconds of `step` or `gemms`, as the peer measures itself."""
        time.sleep(PAUSE)
        self.process.stdin.write(f"{what} {repeat}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def python_with_torch() -> Path:
    """Make the peer's venv if it isn't there."""
    python = PEER_VENV / "bin/python"
    if not (PEER_VENV / "complete").exists():
        print(f"installing the peer into {PEER_VENV}", file=sys.stderr)
        venv.create(PEER_VENV, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "-q", "torch==2.13.0", "numpy"]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (PEER_VENV / "complete").touch()
    return python


def seconds(work, repeat: int) -> float:
    """Mean seconds of a call."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


def measure(case: dict, data: dict[str, np.ndarray], options: argparse.Namespace) -> dict:
    """Ratios and speed with one optimizer."""
    peer = Peer(case | {"layers": layer_shapes(case)}, data, options.threads)
    ours, gemms = Ours(case, data), Gemms(case)
    seconds(ours, 2)
    peer.seconds("step", 2)
    rows = []
    for i in range(options.rounds + 1):
        with threadpool_limits(options.threads, user_api="blas"):
            row = {"gemms_numpy": seconds(gemms, options.steps)}
        row["ours"] = seconds(ours, options.steps)
        row["peer"] = peer.seconds("step", options.steps)
        row["gemms_peer"] = peer.seconds("gemms", options.steps)
        milliseconds = {k: round(v * 1e3, 1) for k, v in row.items()}
        print(case["optimizer"], milliseconds, "ms" if i else "ms to warm up", file=sys.stderr)
        if i:
            rows.append(row)
    peer.close()
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    floor = min(("gemms_numpy", "gemms_peer"), key=median.get)
    return {
        "samples_per_second": case["batch"] / median["ours"],
        "ratio_vs_torch": statistics.median(r["peer"] / r["ours"] for r in rows),
        "gemm_ratio": statistics.median(r["ours"] / r[floor] for r in rows),
    }


def positive(text: str) -> int:
    """A number of rounds, steps or threads, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--peer", choices=["torch"], required=True)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=6, help="steps a round")
    options = parser.parse_args()

    case, rng = CASES[options.case], np.random.default_rng(1)
    shape = case["batches"], case["batch"]
    data = {
        "dense": rng.standard_normal((*shape, case["num_dense"]), np.float32),
        "indices": zipf_indices(rng, case),
        "labels": (rng.random((*shape, 1)) < 0.25).astype(np.float32),
    }
    cupyrec.set_num_threads(options.threads)
    measured = {
        name: measure(case | {"optimizer": name}, data, options) for name in case["optimizers"]
    }
    result = {"case": options.case, "peer": options.peer}
    for figure, worst in (
        ("samples_per_second", min),
        ("ratio_vs_torch", min),
        ("gemm_ratio", max),
    ):
        result[figure] = worst(m[figure] for m in measured.values())
    for name, m in measured.items():
        result[f"ratio_vs_torch_{name}"] = m["ratio_vs_torch"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
