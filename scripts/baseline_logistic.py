"""One-hot logistic regression on the quickstart's rows, its L2 penalty tuned on valid.

``baseline_logistic.py DIR`` reads train.tsv, valid.tsv, test.tsv and schema.toml from DIR, and ends
stdout with {"test_auc": ..., "valid_auc": ..., "C": ...}. Each value of a numeric feature is a
category of its own; with ``--standardise`` it is one column of mean 0 and variance 1 instead. It
needs the `bench` extra.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

try:
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import OneHotEncoder, StandardScaler
except ModuleNotFoundError as error:
    sys.exit(
        f"baseline_logistic.py: {error.name} must be installed; the extra has it: "
        "python -m pip install --editable '.[bench]'"
    )

from cupyrec.data import TSV, Schema

STRENGTHS = 10.0 ** np.arange(-3, 1.1, 0.25)  # scikit-learn's C, the inverse of the penalty


def read(path: Path, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all values, ids and labels of a file."""
    batches = list(TSV(path, schema).batches(4096))
    columns = [[b.dense for b in batches], [b.ids for b in batches], [b.labels for b in batches]]
    dense, ids, labels = (np.concatenate(column) for column in columns)
    return dense, ids, labels[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds train, valid, test and the schema")
    parser.add_argument("--standardise", action="store_true", help="numeric features as values")
    options = parser.parse_args()
    folder = options.folder

    schema = Schema.load(folder / "schema.toml")
    splits = {name: read(folder / f"{name}.tsv", schema) for name in ("train", "valid", "test")}
    dense, ids, labels = splits["train"]
    numeric = StandardScaler() if options.standardise else OneHotEncoder(handle_unknown="ignore")
    encoders = [OneHotEncoder(handle_unknown="ignore").fit(ids)]
    encoders += [numeric.fit(dense)] if schema.num_dense else []

    def features(dense: np.ndarray, ids: np.ndarray) -> sparse.csr_matrix:
        parts = zip(encoders, (ids, dense), strict=False)
        return sparse.hstack([encoder.transform(values) for encoder, values in parts], "csr")

    def auc(model: LogisticRegression, name: str) -> float:
        dense, ids, labels = splits[name]
        return roc_auc_score(labels, model.decision_function(features(dense, ids)))

    x = features(dense, ids)
    best, best_auc = None, -1.0
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=1000).fit(x, labels)
        valid_auc = auc(model, "valid")
        print(f"C {strength:.4g}: valid AUC {valid_auc:.4f}", file=sys.stderr)
        if valid_auc > best_auc:
            best, best_auc = model, valid_auc
    print(json.dumps({"test_auc": auc(best, "test"), "valid_auc": best_auc, "C": best.C}))


if __name__ == "__main__":
    main()
