"""AUC of every model on real click logs, by presets that were tuned on valid alone.

A part of accuracy_table.py. Each run is ``cupyrec train --config scripts/configs/SET/MODEL.toml
--seed N``; the epoch that is best on valid is what is measured, on valid or on test.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accuracy_sets import criteo, movielens_1m

__all__ = ["compare_criteo", "compare_movielens_1m"]

BASELINES = {"fm", "lr"}
#: What DeepCTR-Torch reaches on the same rows, by model.
DEEPCTR = {
    "criteo": {"deepfm": 0.7542, "dcn": 0.7530, "pnn": 0.7530},
    "movielens_1m": {"deepfm": 0.7949, "dcn": 0.7940, "pnn": 0.7976},
}
EACH, BEST = {"criteo": 0.755, "movielens_1m": 0.802}, {"criteo": 0.758, "movielens_1m": 0.807}


def compare_criteo(folder: Path, preset: Path, measure: str, seeds: list[int]) -> dict[str, Any]:
    """Mean AUC on the sample of the Criteo Kaggle log, of a preset or of each in a folder."""
    return _compare(criteo, folder, preset, measure, seeds)


def compare_movielens_1m(
    folder: Path, preset: Path, measure: str, seeds: list[int]
) -> dict[str, Any]:
    """The same on MovieLens-1M, with features of users and movies."""
    return _compare(movielens_1m, folder, preset, measure, seeds)


def _compare(
    logs: Callable[[Path, Path], dict[str, Path]],
    folder: Path,
    preset: Path,
    measure: str,
    seeds: list[int],
) -> dict[str, Any]:
    name = logs.__name__
    presets = [preset] if preset.is_file() else sorted(preset.glob("*.toml"))
    if not presets:
        raise SystemExit(f"accuracy_table: '{preset}' must be a preset or a folder of some.")
    print(f"set          model      mean {measure} AUC of seeds {seeds}", file=sys.stderr)
    aucs = {}
    with tempfile.TemporaryDirectory() as out:
        files = logs(folder, Path(out))
        if measure == "valid":
            del files["--test"]
        given = [word for pair in files.items() for word in pair]
        for path in presets:
            runs = [
                ["--config", path, "--seed", seed, "--out", Path(out, f"{path.stem}-{seed}")]
                for seed in seeds
            ]
            aucs[path.stem] = [_train(*given, *run)[f"{measure}_auc"] for run in runs]
            _tell(name, path.stem, aucs[path.stem])
    means = {model: statistics.mean(each) for model, each in aucs.items()}
    return {"auc": means, "each": aucs, "passed": _passed(name, means)}


def _passed(name: str, means: dict[str, float]) -> bool:
    """Whether all bars are reached by the models that there are."""
    deep = {model: auc for model, auc in means.items() if model not in BASELINES}
    baselines = [auc for model, auc in means.items() if model in BASELINES]
    if name == "criteo":  # where a logistic regression on hashed ids is hard to beat
        baselines = []
    lowest = {model: max(EACH[name], DEEPCTR[name].get(model, 0), *baselines) for model in deep}
    reached = all(auc >= lowest[model] for model, auc in deep.items())
    return reached and max(deep.values(), default=1) >= BEST[name]


def _train(*arguments: object) -> dict[str, float]:
    """Result of a training."""
    command = [sys.executable, "-m", "cupyrec", "train", "--device", "cpu", *arguments]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"accuracy_table: {ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def _tell(name: str, model: str, aucs: list[float]) -> None:
    each = " ".join(f"{auc:.4f}" for auc in aucs)
    row = f"{name:12} {model:10} {statistics.mean(aucs):.5f}  {each}"
    print(row, file=sys.stderr, flush=True)
