"""Train by FuxiCTR's published settings, and compare with the figures of its logs.

    python scripts/accuracy_gate.py --data DIR --model deepfm
    python scripts/accuracy_gate.py --data DIR --model dcn --epochs 2

DIR is MovielensLatest_x1 or Frappe_x1 of https://huggingface.co/reczoo: train.csv, valid.csv and
test.csv with a header, of which columns tell which of the two it is. accuracy_published.json has
the settings and figures of the BARS benchmark's logs. What is compared:

- the number of parameters, which must be the published one;
- AUC of valid after epochs 1 and 2, which must be near those of the log; others stand beside it;
- AUC of test once the run has ended by itself, which must not be below a bound: about three
  standard deviations under the mean of five published runs. These bounds are ours, not BARS'.

As there: Adam with L2 of all rows of all tables in each step, gradients clipped to a norm of 10
with those of L2, batches of 4096 in an order drawn in each epoch, Xavier-normal weights, rows of
N(0, 1e-4), a tenth of the rate after each epoch that isn't better by 1e-6, the best epoch at last.
All ids of train have their rows from the start, since L2 moves those that no batch has had yet.

What differs: ids that train lacks have initial vectors of their own, which no step changes, where
FuxiCTR has one row a field for all of them, which L2 alone moves; these rows are counted as
parameters.

Text goes to stderr, and one JSON line ends stdout; the exit status is 1 if something is off.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

import cupyrec
from cupyrec import inference, models, nn, optim
from cupyrec.data import Arrays, Shuffled
from cupyrec.embedding import InitialVectors, Normal
from cupyrec.run_folder import RunFolder

PUBLISHED = json.loads(Path(__file__).with_name("accuracy_published.json").read_text("utf-8"))
SETS = "movielenslatest_x1", "frappe_x1"
SPLITS = "train", "valid", "test"
BATCH, RATE, LARGEST_NORM, STD = 4096, 1e-3, 10.0, 1e-4


MODELS = {
    "lr": models.LR, "fm": models.FM, "deepfm": models.DeepFM, "dcn": models.DCN,
    "dcn_v2": models.DCNv2, "xdeepfm": models.XDeepFM, "pnn": models.PNN, "dlrm": models.DLRM,
}  # fmt: skip


def read(folder: Path) -> tuple[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the set's name, and of each split ids (N, F), numbered by column, and labels (N,)."""
    tables = []
    for split in SPLITS:
        path = folder / f"{split}.csv"
        if not path.is_file():
            raise SystemExit(f"accuracy_gate: '{path}' must be a file.")
        with path.open(encoding="utf-8") as lines:
            names = next(lines, "").strip().split(",")
        texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        tables.append(csv.read_csv(path, convert_options=texts))
    found = [name for name in SETS if {"label", *PUBLISHED[name]["fields"]} == set(names)]
    if not found or any(set(table.column_names) != set(names) for table in tables):
        rule = " or ".join(f"label, {', '.join(PUBLISHED[name]['fields'])}" for name in SETS)
        raise SystemExit(f"accuracy_gate: columns must be {rule}, got {', '.join(names)}.")
    together = pa.concat_tables(tables)
    columns = [
        together[name].combine_chunks().dictionary_encode().indices.to_numpy()
        for name in PUBLISHED[found[0]]["fields"]
    ]
    ids = np.stack(columns, axis=1).astype(np.int64)
    labels = together["label"].cast(pa.float64()).to_numpy()
    ends = np.cumsum([len(table) for table in tables])[:-1]
    parts = zip(np.split(ids, ends), np.split(labels, ends), strict=True)
    return found[0], dict(zip(SPLITS, parts, strict=True))


def build(which: str, name: str, seed: int) -> nn.Module:
    """Return a model with the published sizes and distributions of first values."""
    cupyrec.manual_seed(seed)
    options, fields = PUBLISHED[which]["models"][name]["options"], PUBLISHED[which]["fields"]
    model = MODELS[name](num_dense=0, num_tables=len(fields), **options)
    generator = np.random.default_rng(seed)
    for layer in model.modules():
        if isinstance(layer, nn.FusedMLP):
            weights, biases = layer.weights, layer.biases
        elif isinstance(layer, nn.FusedCrossInteraction):
            weights, biases = [layer.weight], [layer.bias]
        elif isinstance(layer, nn.CompressedInteraction):  # PyTorch's of a convolution
            for weight, bias in zip(layer.weights, layer.biases, strict=True):
                bound = 1 / math.sqrt(weight[0].size)  # of the weights that there are already too
                bias.data[...] = generator.uniform(-bound, bound, bias.shape)
            continue
        else:
            continue
        for weight, bias in zip(weights, biases, strict=True):
            std = math.sqrt(2 / sum(np.atleast_2d(weight.data).shape))  # Xavier's
            weight.data[...] = generator.normal(0, std, weight.shape)
            bias.data[...] = 0
    for _, group in model.named_groups():
        group.initial = InitialVectors(group.width, Normal(std=STD), group.initial.seed)
        group.dense_updates = True
    return model


def insert(model: nn.Module, ids: np.ndarray) -> None:
    """Give all ids their rows."""
    columns = [np.unique(column) for column in ids.T]
    most = max(map(len, columns))
    every = np.stack([np.resize(column, most) for column in columns], axis=1)
    for start in range(0, most, BATCH):
        model.embedding(model.embedding.group.xp.asarray(every[start : start + BATCH]))


def parameters(model: nn.Module, rows: int) -> int:
    """Numbers that are learnt, of so many rows of all tables together."""
    dense = sum(parameter.size for _, parameter in model.named_parameters())
    return dense + rows * model.embedding.group.width


def optimizer_of(model: nn.Module, name: str, l2: float) -> optim.Optimizer:
    """Adam, with L2 of tables; FuxiCTR gives it to the bias of LR and FM too."""
    tables = [group for _, group in model.named_groups()]
    dense = [parameter for _, parameter in model.named_parameters()]
    groups = [{"params": dense, "l2": l2 if name in ("lr", "fm") else 0.0}]
    return optim.Adam(
        [*groups, {"params": tables, "l2": l2}], RATE, clip_norm=LARGEST_NORM,
        schedule=optim.Plateau(0.1, 0, threshold=1e-6, min_factor=1e-6 / RATE),
    )  # fmt: skip


def train(
    model: nn.Module, splits: dict[str, Any], published: dict[str, Any], options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Return AUC and logloss of valid after each epoch; the model ends as at the best of them."""
    epochs: list[tuple[float, float]] = []

    def tell(line: dict[str, Any]) -> None:
        if "valid_auc" not in line:
            return
        epochs.append((line["valid_auc"], line["valid_logloss"]))
        trace, at = published["valid"], len(epochs)
        theirs = "{:.6f} / {:.6f}".format(*trace[at - 1]) if at <= len(trace) else "ended"
        ours = "{:.6f} / {:.6f}".format(*epochs[-1])
        print(f"epoch {at}: valid {ours}, published {theirs}", file=sys.stderr, flush=True)

    rows, valid = (Arrays(None, *splits[split]) for split in ("train", "valid"))
    rows = Shuffled(rows, len(splits["train"][1]), options.seed)
    with tempfile.TemporaryDirectory() as folder:
        cupyrec.fit(
            model, rows, valid,
            optimizer=optimizer_of(model, options.model, published["l2"]),
            epochs=options.epochs, batch_size=BATCH, patience=published["patience"],
            min_delta=1e-6, run=RunFolder(folder), callbacks=[tell],
        )  # fmt: skip
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the CSV files")
    parser.add_argument("--model", choices=MODELS, default="deepfm")
    parser.add_argument("--epochs", type=int, default=100, help="at most so many")
    parser.add_argument("--seed", type=int, default=2021)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or sim")
    options = parser.parse_args()
    which, splits = read(options.data)
    published = PUBLISHED[which]["models"][options.model]
    model = build(which, options.model, options.seed).to(options.device)
    insert(model, splits["train"][0])
    rows = len(model.embedding.group.store)
    count = parameters(model, rows + len(PUBLISHED[which]["fields"]))
    sizes = ", ".join(f"{split} {len(labels)}" for split, (_, labels) in splits.items())
    print(f"{which}: {sizes} rows; {options.model}: {count} parameters", file=sys.stderr)
    epochs = train(model, splits, published, options)
    test = inference.evaluate(model, Arrays(None, *splits["test"]))
    checks = {"parameters": count == published["parameters"]}
    for epoch, (ours, theirs, near) in enumerate(
        zip(epochs, published["valid"], published["near"], strict=False), 1
    ):
        checks[f"epoch_{epoch}"] = abs(ours[0] - theirs[0]) <= near
    if len(epochs) < options.epochs or options.epochs >= len(published["valid"]):
        checks["test"] = test["auc"] >= published["least"]
    for name, passed in checks.items():
        print(f"{name}: {'as it should be' if passed else 'OFF'}", file=sys.stderr)
    result = {
        "set": which, "model": options.model, "seed": options.seed, "device": options.device,
        "parameters": count, "published_parameters": published["parameters"],
        "epochs": len(epochs), "valid": epochs,
        "test_auc": test["auc"], "test_logloss": test["logloss"],
        "published_test_auc": published["test"][0], "least_test_auc": published["least"],
        "checks": checks, "passed": all(checks.values()),
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
