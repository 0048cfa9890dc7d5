"""Census-Income (KDD), two tasks: MMoE against a shared bottom of as many parameters.

The folder holds census-income.test.gz of https://archive.ics.uci.edu/dataset/117: 99,762 persons,
42 columns. Tasks, as in the paper on MMoE (Ma et al. 2018): whether income is above 50,000 (the
last column), and whether one has never married (column 8). The features are the others but column
25, a weight. Rows are split once at random: 80,000 to train on, the rest for test; what is chosen
is chosen on 20,000 of the 80,000, and configs/census_income.toml has it. Both models have that
file's settings in common, the first weights' seed and the order of rows; the shared bottom is as
wide as gives it no fewer parameters than MMoE has.
"""

from __future__ import annotations

import gzip
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cupyrec
from cupyrec import nn, optim
from cupyrec.data import Arrays, Shuffled
from cupyrec.embedding import InitialVectors, Uniform
from cupyrec.models import MMoE, SharedBottom

COLUMNS, WEIGHT, MARRIED, INCOME = 42, 24, 7, 41  # counted from 0
NUMBERS = 0, 5, 16, 17, 18, 30, 39  # amounts and counts; all else are codes
TASKS = ["income", "never_married"]
TRAIN, VALID = 80_000, 20_000
INCOME_BAR = 0.9496


class Rows(NamedTuple):
    """Features and labels: dense (B, 7), ids (B, 39), labels (B, 2)."""

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray

    def part(self, rows: np.ndarray) -> Rows:
        return Rows(*(column[rows] for column in self))


def read(folder: Path) -> Rows:
    """Return all rows, in the file's order; amounts are ids by value too."""
    path = folder / "census-income.test.gz"
    if not path.is_file():
        raise SystemExit(f"census_income: '{path}' must be a file.")
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.array([line.rstrip(".\n").split(", ") for line in lines])
    if table.ndim != 2 or table.shape[1] != COLUMNS:
        raise SystemExit(f"census_income: '{path}' must have lines of {COLUMNS} columns.")
    features = [c for c in range(COLUMNS) if c not in (WEIGHT, MARRIED, INCOME)]
    codes = [np.unique(table[:, c], return_inverse=True)[1] for c in features]
    dense = np.log1p(table[:, NUMBERS].astype(np.float64))
    labels = [table[:, INCOME] == "50000+", table[:, MARRIED] == "Never married"]
    return Rows(dense, np.stack(codes, axis=1), np.stack(labels, axis=1))


def split(rows: Rows, measured: str) -> tuple[Rows, Rows]:
    """Return what is trained on, and what is measured: ``valid`` or ``test``.

    Dense values are standardised by those that are trained on.
    """
    order = np.random.default_rng(0).permutation(len(rows.ids))
    train = min(TRAIN, len(order) * 4 // 5)
    valid = min(VALID, train // 4)
    own, others = (order[:train], order[train:])
    if measured == "valid":
        own, others = own[valid:], own[:valid]
    mean, std = rows.dense[own].mean(axis=0), rows.dense[own].std(axis=0)
    rows = rows._replace(dense=(rows.dense - mean) / np.where(std > 0, std, 1))
    return rows.part(own), rows.part(others)


def build(name: str, settings: dict[str, Any], rows: Rows, seed: int) -> nn.Module:
    """Return a model by the preset; the bottom is as wide as `bottom_width` says."""
    model, sizes = settings["model"], settings["mmoe"]
    shared = dict(
        num_dense=rows.dense.shape[1], num_tables=rows.ids.shape[1], num_tasks=len(TASKS),
        embedding_dim=model["embedding_dim"], tower=model["tower"], dropout=model["dropout"],
    )  # fmt: skip
    cupyrec.manual_seed(seed)
    if name == "mmoe":
        built = MMoE(**shared, experts=sizes["experts"], expert=sizes["expert"])
    else:
        columns = rows.dense.shape[1] + rows.ids.shape[1] * model["embedding_dim"]
        width = bottom_width(columns, sizes["experts"], sizes["expert"])
        built = SharedBottom(**shared, bottom=[width, *sizes["expert"][1:]])
    span = model["initial_range"]
    for _, group in built.named_groups():
        group.initial = InitialVectors(group.width, Uniform(-span, span), group.initial.seed)
    return built


def bottom_width(columns: int, experts: int, expert: list[int]) -> int:
    """Return the least first layer that gives a bottom as many numbers as experts and gates have.

    Both have the same layers behind the first; towers are alike where they are as wide.
    """
    first, *rest = expert
    later = sum((n + 1) * m for n, m in zip(rest[:-1], rest[1:], strict=True))
    one = (columns + 1) * first + (first + 1) * rest[0] + later if rest else (columns + 1) * first
    wanted = experts * one + len(TASKS) * experts * (columns + 1)
    wanted -= later + (rest[0] if rest else 0)
    return -(-wanted // (columns + 1 + (rest[0] if rest else 0)))


def train(name: str, settings: dict[str, Any], rows: Rows, seed: int) -> nn.Module:
    """Return a model after the preset's epochs, at a rate that falls as a cosine."""
    training = settings["training"]
    model = build(name, settings, rows, seed)
    steps = -(-len(rows.ids) // training["batch_size"]) * training["epochs"]
    optimizer = optim.Adam(
        model.parameters(), training["lr"], weight_decay=training["weight_decay"],
        schedule=optim.Cosine(steps),
    )  # fmt: skip
    cupyrec.fit(
        model, Shuffled(Arrays(*rows), buffer=len(rows.ids), seed=seed), optimizer=optimizer,
        epochs=training["epochs"], batch_size=training["batch_size"],
        task_weights=training["task_weights"],
    )  # fmt: skip
    return model


def size(model: nn.Module) -> int:
    """Return how many numbers a model learns, its tables apart, which are alike."""
    return sum(array.size for array in model.state_dict().values())


def compare(folder: Path, preset: Path, measured: str, seeds: list[int]) -> dict[str, Any]:
    """Return AUCs of both models, of each seed and in the mean; tell of them on stderr."""
    settings = tomllib.loads(preset.read_text("utf-8"))
    rows, others = split(read(folder), measured)
    others = Arrays(*others, task_names=TASKS)
    names, figures = ("mmoe", "shared_bottom"), {}
    aucs: dict[str, list[list[float]]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            model = train(name, settings, rows, seed)
            told = cupyrec.evaluate(model, others)
            aucs[name].append([told[f"auc_{task}"] for task in TASKS])
            figures[f"{name}_parameters"] = size(model)
            print(
                f"seed {seed}  {name:13}  income {aucs[name][-1][0]:.5f}  "
                f"never married {aucs[name][-1][1]:.5f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    for name in names:
        income, never = np.mean(aucs[name], axis=0).tolist()
        figures |= {f"{name}_income_auc": income, f"{name}_never_married_auc": never}
        figures[f"{name}_income_aucs"] = [auc for auc, _ in aucs[name]]
        print(f"mean    {name:13}  income {income:.5f}  never married {never:.5f}", file=sys.stderr)
    difference = figures["mmoe_income_auc"] - figures["shared_bottom_income_auc"]
    figures["income_difference"] = difference
    figures["passed"] = bool(difference > 0 and figures["mmoe_income_auc"] >= INCOME_BAR)
    return figures
