"""Every model by the command ``cupyrec train``."""

import json

import pytest
import trial

from cupyrec.from_settings import MODELS


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"), rows=2000)


def settings(name):
    words = ["--model", name, "--lr", "0.05", "--batch-size", "32"]
    words += ["--embedding-dim", "4"] if name != "lr" else []
    own = {
        "xdeepfm": ["maps=[4]", "deep=[8]"],
        "dlrm": ["bottom=[8]", "top=[8]"],
        "mmoe": ["experts=2", "expert=[8, 8]", "tower=[]"],
        "shared_bottom": ["bottom=[8, 8]", "tower=[]"],
        "fm": [],
        "lr": [],
    }.get(name, ["deep=[8, 8]"])
    own += ["batch_norm=true"] if name in ("deepfm", "dlrm") else []
    return [*words, *(word for value in own for word in ("--set", f"model.{value}"))]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_and_resumes_to_the_same_bits(name, logs, tmp_path, capsys):
    def train(out, *more):
        return trial.command("train", *logs, "--out", tmp_path / out, *settings(name), *more)

    assert train("whole", "--epochs", 2) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid_auc"] > 0.8  # best: about .87
    assert train("parts", "--epochs", 1) == 0
    assert trial.command("train", *logs, "--resume", tmp_path / "parts", "--epochs", 2) == 0
    whole, parts = (trial.files(tmp_path / run / "last") for run in ("whole", "parts"))
    del whole["manifest.json"], parts["manifest.json"]
    assert whole == parts
    capsys.readouterr()
    valid = logs[logs.index("--valid") + 1]
    assert trial.command("evaluate", tmp_path / "whole", "--data", valid) == 0
    assert json.loads(capsys.readouterr().out)["test_auc"] == result["valid_auc"]
