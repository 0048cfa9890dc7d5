"""Several labels, bags, weights and groups, by the command."""

import csv
import json
import math

import numpy as np
import pytest
import trial
from pyarrow import parquet

from cupyrec import config
from cupyrec.data import Column, Schema
from cupyrec.from_settings import build_model, default_settings

SCHEMA = Schema(
    [
        Column("click", "label"),
        Column("sale", "label"),
        Column("user", "categorical", "integer"),
        Column("items", "categorical", "integer", bag=True),
    ]
)
SMALL = ["--model", "mmoe", "--embedding-dim", 4, "--batch-size", 32, "--lr", 0.05]
SMALL += ["--set", "model.experts=2", "--set", "model.expert=[8]", "--set", "model.tower=[]"]
MEASURES = "auc", "logloss", "normalized_entropy", "calibration", "gauc"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A sale is what no click is; the other item of a bag tells nothing."""
    folder = tmp_path_factory.mktemp("logs")
    SCHEMA.save(folder / "schema.toml")
    words = ["--schema", folder / "schema.toml"]
    for seed, name in enumerate(("train", "valid", "test")):
        _, ids, labels = trial.planted(1500 if name == "train" else 300, seed)
        lines = [f"{y:.0f}\t{1 - y:.0f}\t{user}\t{item}|7\n"
                 for y, (user, item) in zip(labels, ids, strict=True)]  # fmt: skip
        (folder / name).write_text("".join(lines))
        words += [f"--{name}", folder / name]
    return words


def test_tasks_bags_and_groups(logs, tmp_path, capsys):
    run = tmp_path / "run"
    more = ["--epochs", 3, "--set", "training.task_weights=[1, 0.5]"]
    more += ["--set", "training.positive_weight=2", "--set", "evaluation.group=user"]
    assert trial.command("train", *logs, "--out", run, *SMALL, *more) == 0
    result = json.loads(capsys.readouterr().out)
    names = {m + task for m in MEASURES for task in ("", "_click", "_sale")}
    assert {f"test_{name}" for name in names} == {key for key in result if key.startswith("test_")}
    for name in MEASURES:
        mean = (result[f"test_{name}_click"] + result[f"test_{name}_sale"]) / 2
        assert result[f"test_{name}"] == pytest.approx(mean)
    assert result["valid_auc"] > 0.7
    assert result["test_calibration"] > 1.1  # positive samples count twice
    lines = [line for line in trial.steps(run) if "valid_auc" in line]
    told = names | {"reliability_click", "reliability_sale"}
    assert {f"valid_{name}" for name in told} == lines[0].keys() - {"step"}
    best = max(lines, key=lambda line: line["valid_auc"])
    assert (best["valid_auc"], best["step"]) == (result["valid_auc"], result["best_step"])
    test = logs[logs.index("--test") + 1]
    assert trial.command("evaluate", run, "--data", test) == 0
    measured = json.loads(capsys.readouterr().out)
    for name in names:
        assert measured[f"test_{name}"] == pytest.approx(result[f"test_{name}"])
    for end in (".npy", ".parquet", ".csv"):
        output = tmp_path / f"clicks{end}"
        assert trial.command("predict", run, "--data", test, "--output", output) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 300
    found = np.load(tmp_path / "clicks.npy")
    assert found.shape == (300, 2)
    table = parquet.read_table(tmp_path / "clicks.parquet")
    assert table.column_names == ["probability_click", "probability_sale"]
    np.testing.assert_array_equal(np.stack([c.to_numpy() for c in table], axis=1), found)
    with open(tmp_path / "clicks.csv", newline="") as stream:
        assert next(csv.reader(stream)) == table.column_names


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_bags_are_pooled_as_the_settings_say(pooling):
    change = config.parse_setting(f"model.pooling={pooling}")
    for name in ("mmoe", "shared_bottom"):
        settings = config.override(default_settings(name), [change])
        model = build_model(settings, SCHEMA, "cpu")
        assert (model.embedding.pooling, model.num_tasks) == (pooling, 2)
        plain = Schema([column for column in SCHEMA.columns if not column.bag])
        assert build_model(settings, plain, "cpu").embedding.pooling is None


@pytest.mark.parametrize("name", ["dlrm", "wide_deep"])
def test_models_of_one_task_take_bags_and_refuse_two_labels(name, logs, tmp_path, capsys):
    schema = Schema([SCHEMA.columns[0], Column("sale", "ignore"), *SCHEMA.columns[2:]])
    schema.save(tmp_path / "one.toml")
    words = [*logs, "--model", name, "--embedding-dim", 4, "--batch-size", 64]
    assert trial.command("train", *words, "--schema", tmp_path / "one.toml") == 0
    assert json.loads(capsys.readouterr().out)["test_auc"] > 0.55
    assert trial.command("train", *words, "--out", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()
    text = (
        f"config: the schema must have one label for model '{name}', got click, sale. "
        "Models for several: mmoe, shared_bottom."
    )
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("training.task_weights=[1]",
         "[training] task_weights must be a weight for each of click, sale, got [1]."),
        ("training.task_weights=[1, -1]",
         "[training]: 'task_weights' must be finite and at least 0, got -1."),
        ("training.task_weights=[1, nan]",
         "[training]: 'task_weights' must be finite and at least 0, got nan."),
        ('training.task_weights=[1, "a"]',
         "[training]: 'task_weights' must be a number, got 'a'."),
        ("training.positive_weight=-1",
         "[training] positive_weight must be finite and not negative, got -1.0."),
        ("evaluation.group=click",
         "[evaluation] group must be one of user, items, got 'click'."),
        ("model.pooling=max", "[model] pooling must be mean or sum, got 'max'."),
    ],
)  # fmt: skip
def test_refuses(setting, text, logs, tmp_path, capsys):
    words = [*logs, *SMALL, "--out", tmp_path / "run", "--set", setting]
    assert trial.command("train", *words) == 2
    assert f"config: {text}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_task_of_one_class_is_null_and_the_mean_is_of_the_other(logs, tmp_path, capsys):
    log = tmp_path / "valid"
    rows = (line.split("\t") for line in logs[logs.index("--valid") + 1].read_text().splitlines())
    log.write_text("".join("\t".join([row[0], "0", *row[2:]]) + "\n" for row in rows))
    assert trial.command("train", *logs, *SMALL, "--test", log) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["test_auc_sale"] is None
    assert result["test_auc"] == result["test_auc_click"] and math.isfinite(result["test_auc"])
