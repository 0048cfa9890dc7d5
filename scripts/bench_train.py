"""Training speed beside a peer's, alternating in one run: one JSON line of ratios on stdout.

    python scripts/bench_train.py --case mlp --peer torch
    python scripts/bench_train.py --case deepfm --peer deepctr-torch

Case `mlp`: DLRM, 26 tables x 100k ids, width 128, bottom 512-256-128, top 1024-1024-512-256-1,
batch 4096, Zipf 1.2 ids, SGD. Case `embedding`: an MLP 64-32-1 on the concatenated vectors of
26 tables x 200k ids, width 32, batch 8192, Zipf 1.1 ids, Adam and then Adagrad (the peer's tables:
SparseAdam, Adagrad). Each round times our steps, the peer's steps, and the MLPs' matmuls alone
(forward, weight and input gradients, into ready buffers) by NumPy's and by the peer's BLAS; ratios
are medians over the rounds, and of several optimizers the least favourable one's.

Cases `deepfm`, `dcn`, `xdeepfm`: our model and DeepCTR-Torch's, 39 tables x 10k ids, width 16, MLP
400-400-400, batch 4096, Zipf 1.1 ids, Adam, no penalties. The peer's Adam moves every row at every
step; so does ours with `dense_updates`, and without it, "lazy", only the rows of the batch. "fit"
is what a user of both would time: `cupyrec.fit` and the peer's `fit` on arrays, with its loader,
and in both with the penalty of embedding rows that it has by default.

Ours gets raw 64-bit ids, the peer ready-made row numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
PENALTY = 1e-5  # times the squares of all rows: DeepCTR-Torch's default
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
DEEPCTR = dict(
    optimizer="adam", tables=39, ids=10_000, width=16, num_dense=0, top=[400] * 3, batch=4096,
    zipf=1.1, lr=0.001, batches=16,
)  # fmt: skip
CASES |= {
    "deepfm": DEEPCTR | dict(model="deepfm"),
    "dcn": DEEPCTR | dict(model="dcn", crosses=2),
    "xdeepfm": DEEPCTR | dict(model="xdeepfm", maps=[256, 128], batches=4),
}
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


def of_deepctr(case: dict) -> nn.Module:
    own = {name: case[name] for name in ("crosses", "maps") if name in case}
    sizes = case["num_dense"], case["tables"], case["width"]
    return OF_DEEPCTR[case["model"]](*sizes, deep=case["top"], **own)


OF_DEEPCTR = {"deepfm": models.DeepFM, "dcn": models.DCN, "xdeepfm": models.XDeepFM}
MODELS = {"dlrm": dlrm, "concatenation": Concatenation} | dict.fromkeys(OF_DEEPCTR, of_deepctr)


class Ours:
    """A training step by cupyrec."""

    def __init__(self, case: dict, data: dict[str, np.ndarray]) -> None:
        cupyrec.manual_seed(0)
        self.model = MODELS[case["model"]](case)
        self.model.embedding.group.dense_updates = case.get("dense_updates", False)
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


class OurFit(Ours):
    """`cupyrec.fit` on all batches, with the penalty of rows that DeepCTR-Torch has by default."""

    def __init__(self, case: dict, data: dict[str, np.ndarray]) -> None:
        super().__init__(case | {"dense_updates": True}, data)
        dense = [parameter for _, parameter in self.model.named_parameters()]
        tables = {"params": [self.model.embedding.group], "l2": 2 * PENALTY}
        kind = OPTIMIZERS[case["optimizer"]]
        self.optimizer = kind([{"params": dense}, tables], case["lr"])
        arrays = self.dense, self.ids, self.labels
        self.rows = [array.reshape(self.labels.size, array.shape[-1]) for array in arrays]
        self.batch = case["batch"]

    def __call__(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            cupyrec.fit(self.model, self.rows, optimizer=self.optimizer, batch_size=self.batch)


class Peer:
    """A script of the peer's in a venv of its own: asleep but when it is asked to run."""

    def __init__(self, case: dict, data: dict[str, np.ndarray], threads: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        np.savez(self.folder.name + "/data.npz", **data)
        case = case | {"threads": threads}
        deepctr = case["model"] in OF_DEEPCTR
        script = "bench_peer_deepctr.py" if deepctr else "bench_peer_torch.py"
        command = [
            peer_python(deepctr), ROOT / "scripts" / script,
            self.folder.name + "/data.npz", json.dumps(case),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, what: str, repeat: int) -> float:
        """Mean seconds of `step`, `gemms` or `fit`, as the peer measures itself."""
        time.sleep(PAUSE)
        self.process.stdin.write(f"{what} {repeat}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def peer_python(deepctr: bool) -> Path:
    """Make the peer's venv if it isn't there, with DeepCTR-Torch if that is asked for."""
    python = PEER_VENV / "bin/python"
    if not (PEER_VENV / "complete").exists():
        print(f"installing the peer into {PEER_VENV}", file=sys.stderr)
        venv.create(PEER_VENV, with_pip=True, clear=True)
        install(python, "torch==2.13.0", "numpy")
        (PEER_VENV / "complete").touch()
    if deepctr and not (PEER_VENV / "complete_deepctr").exists():
        install(python, "scikit-learn", "tqdm")
        install(python, "--no-deps", "deepctr-torch==0.3.0")
        (PEER_VENV / "complete_deepctr").touch()
    return python


def install(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", *what], check=True, stdout=sys.stderr)


def seconds(work, repeat: int) -> float:
    """Mean seconds of a call."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


def alternate(title: str, contest: dict, options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each in each round: `contest` has functions of a number of steps."""
    rows = []
    for i in range(options.rounds + 1):
        row = {name: work(options.steps) for name, work in contest.items()}
        milliseconds = {name: round(v * 1e3, 1) for name, v in row.items()}
        print(title, milliseconds, "ms" if i else "ms to warm up", file=sys.stderr)
        rows.append(row)
    return rows[1:]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(case: dict, data: dict[str, np.ndarray], options: argparse.Namespace) -> dict:
    """Ratios and speed with one optimizer."""
    peer = Peer(case | {"layers": layer_shapes(case)}, data, options.threads)
    ours, gemms = Ours(case, data), Gemms(case)
    seconds(ours, 2)
    peer.seconds("step", 2)

    def numpy(steps: int) -> float:
        with threadpool_limits(options.threads, user_api="blas"):
            return seconds(gemms, steps)

    contest = {
        "gemms_numpy": numpy,
        "ours": lambda steps: seconds(ours, steps),
        "peer": lambda steps: peer.seconds("step", steps),
        "gemms_peer": lambda steps: peer.seconds("gemms", steps),
    }
    rows = alternate(case["optimizer"], contest, options)
    peer.close()
    median = medians(rows)
    floor = min(("gemms_numpy", "gemms_peer"), key=median.get)
    return {
        "samples_per_second": case["batch"] / median["ours"],
        "ratio_vs_torch": statistics.median(r["peer"] / r["ours"] for r in rows),
        "gemm_ratio": statistics.median(r["ours"] / r[floor] for r in rows),
    }


def beside_torch(case: dict, data: dict[str, np.ndarray], options: argparse.Namespace) -> dict:
    measured = {
        name: measure(case | {"optimizer": name}, data, options) for name in case["optimizers"]
    }
    result = {}
    for figure, worst in (
        ("samples_per_second", min),
        ("ratio_vs_torch", min),
        ("gemm_ratio", max),
    ):
        result[figure] = worst(m[figure] for m in measured.values())
    for name, m in measured.items():
        result[f"ratio_vs_torch_{name}"] = m["ratio_vs_torch"]
    return result


def beside_deepctr(case: dict, data: dict[str, np.ndarray], options: argparse.Namespace) -> dict:
    peer = Peer(case, data, options.threads)
    ours, lazy = Ours(case | {"dense_updates": True}, data), Ours(case, data)
    our_fit, batches = OurFit(case, data), case["batches"]
    contest = {
        "ours": lambda steps: seconds(ours, steps),
        "lazy": lambda steps: seconds(lazy, steps),
        "deepctr": lambda steps: peer.seconds("step", steps),
        "fit": lambda steps: seconds(our_fit, 1) / batches,
        "deepctr_fit": lambda steps: peer.seconds("fit", 1) / batches,
    }
    rows = alternate(case["model"], contest, options)
    peer.close()
    speed = {name: case["batch"] / median for name, median in medians(rows).items()}
    return {
        "samples_per_second": speed["ours"],
        "samples_per_second_lazy": speed["lazy"],
        "samples_per_second_deepctr": speed["deepctr"],
        "ratio_vs_deepctr": statistics.median(r["deepctr"] / r["ours"] for r in rows),
        "ratio_lazy": statistics.median(r["deepctr"] / r["lazy"] for r in rows),
        "ratio_fit": statistics.median(r["deepctr_fit"] / r["fit"] for r in rows),
    }


PEERS = {
    "torch": (beside_torch, ["mlp", "embedding"]),
    "deepctr-torch": (beside_deepctr, [*OF_DEEPCTR]),
}


def positive(text: str) -> int:
    """A number of rounds, steps or threads, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, help="steps a round, by default 6, xdeepfm 1")
    options = parser.parse_args()
    beside, cases = PEERS[options.peer]
    if options.case not in cases:
        parser.error(f"--peer {options.peer} must come with --case {' or '.join(cases)}")
    options.steps = options.steps or (1 if options.case == "xdeepfm" else 6)

    case, rng = CASES[options.case], np.random.default_rng(1)
    shape = case["batches"], case["batch"]
    data = {
        "dense": rng.standard_normal((*shape, case["num_dense"]), np.float32),
        "indices": zipf_indices(rng, case),
        "labels": (rng.random((*shape, 1)) < 0.25).astype(np.float32),
    }
    cupyrec.set_num_threads(options.threads)
    result = {"case": options.case, "peer": options.peer}
    print(json.dumps(result | beside(case, data, options)))


if __name__ == "__main__":
    main()
