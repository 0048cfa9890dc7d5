"""Optimizers, rounding and what tables tell, by the command ``cupyrec train``."""

import json

import pytest
import trial

from cupyrec import checkpoint


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


OPTIMIZERS = ["sgd", "rowwise_adagrad", "adamw", "catch_up_adam", "ftrl"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(name, logs, tmp_path):
    more = ["--optimizer", name, "--set", "optimizer.weight_decay=0.01"]
    more += ["--set", "optimizer.momentum=0.5"] if name == "sgd" else []
    more += ["--set", "model.embedding_dtype=bfloat16"] if name == "adamw" else []
    assert trial.train(logs, tmp_path / "whole", *more, "--epochs", 2) == 0
    assert trial.train(logs, tmp_path / "parts", *more, "--epochs", 1) == 0
    again = [*logs, "--resume", tmp_path / "parts", "--epochs", 2]
    assert trial.command("train", *again) == 0
    whole, parts = (trial.files(tmp_path / run / "last") for run in ("whole", "parts"))
    del whole["manifest.json"], parts["manifest.json"]
    assert whole == parts


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule=cosine", "decay_steps=20", "warmup_steps=3"],
        ["schedule=step", "decay_steps=5", "decay_factor=0.5"],
        ["schedule=plateau", "decay_factor=0.5"],
    ],
)
def test_schedules(settings, logs, tmp_path):
    more = [word for setting in settings for word in ("--set", f"optimizer.{setting}")]
    more += ["--set", "training.eval_every=3"]
    assert trial.train(logs, tmp_path / "whole", *more, "--epochs", 2) == 0
    assert trial.train(logs, tmp_path / "parts", *more, "--epochs", 1) == 0
    assert trial.command("train", *logs, "--resume", tmp_path / "parts", "--epochs", 2) == 0
    whole, parts = (checkpoint.read_manifest(tmp_path / run / "last") for run in ("whole", "parts"))
    assert whole["files"] == parts["files"]
    assert whole["optimizer"] == parts["optimizer"]
    rates = [line["lr"] for line in trial.steps(tmp_path / "whole") if "lr" in line]
    assert len(set(rates)) > 1 or "plateau" in settings[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["name=adamw"], "weight_decay must be positive for adamw, got 0."),
        (["name=adam", "momentum=0.5"], "momentum must be 0 but for sgd, got 0.5."),
        (["schedule=plateau", "warmup_steps=3"], "warmup_steps must be 0 for plateau, got 3."),
    ],
)
def test_settings_that_would_do_nothing_are_refused(options, text, logs, tmp_path, capsys):
    more = [word for option in options for word in ("--set", f"optimizer.{option}")]
    assert trial.train(logs, tmp_path / "run", *more) == 2
    assert f"config: {text}" in capsys.readouterr().err


def test_metrics_tell_of_tables(logs, tmp_path):
    assert trial.train(logs, tmp_path / "run") == 0
    (line,) = [line for line in trial.steps(tmp_path / "run") if "tables" in line]
    (told,) = line["tables"].values()
    assert told.keys() == {"ids", "bytes", "load", "unique_ratio", "inserted"}
    assert {len(values) for values in told.values()} == {3}
    assert sum(told["ids"]) == checkpoint.verify(tmp_path / "run" / "last")["groups"][0]["rows"]


def test_gradients_may_be_rounded_at_random(logs, tmp_path, capsys):
    told = []
    for rounding in ("nearest", "stochastic"):
        setting = "--set", f"exchange.rounding={rounding}"
        assert trial.train(logs, tmp_path / rounding, "--codec", "bf16", *setting) == 0
        told.append(json.loads(capsys.readouterr().out)["test_logloss"])
    assert told[0] != told[1] == pytest.approx(told[0], rel=1e-2)
    assert trial.train(logs, tmp_path / "up", "--set", "exchange.rounding=up") == 2
    assert "'rounding' must be one of nearest, stochastic, got 'up'" in capsys.readouterr().err


def test_what_fuxictr_trains_by(logs, tmp_path):
    """L2 of all rows, a norm that includes it, normalized batches, a plateau."""
    words = ["model.dense_updates=true", "model.batch_norm=true", "optimizer.embedding_l2=0.01"]
    words += ["optimizer.clip_norm=10", "optimizer.schedule=plateau", "training.min_delta=1e-6"]
    words += ["optimizer.decay_threshold=1e-6", "optimizer.decay_min=1e-3", "training.patience=9"]
    more = ["--model", "deepfm", "--optimizer", "adam", "--lr", "0.01"]
    more += [word for setting in words for word in ("--set", setting)]

    def train(run, *last):
        arguments = [*logs, "--out", tmp_path / run, *more, "--set", "model.deep=[8]", *last]
        return trial.command("train", *arguments)

    assert train("whole", "--epochs", 2) == train("parts", "--epochs", 1) == 0
    assert trial.command("train", *logs, "--resume", tmp_path / "parts", "--epochs", 2) == 0
    assert train("without", "--epochs", 2, "--set", "optimizer.embedding_l2=0") == 0
    whole, parts, without = (
        trial.files(tmp_path / run / "last") for run in ("whole", "parts", "without")
    )
    for files in (whole, parts, without):
        del files["manifest.json"]
    assert whole == parts != without
