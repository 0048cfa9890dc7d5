import csv
import json
import os
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import trial
from pyarrow import parquet

import cupyrec
from cupyrec import checkpoint, cpu, training
from cupyrec.data import TSV
from cupyrec.from_settings import MODELS
from cupyrec.parallel import Communicator

KNOWN = sorted(MODELS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


# What a run leaves


def test_a_run_and_its_result(logs, tmp_path, capsys):
    out = tmp_path / "new" / "run"
    assert trial.train(logs, out, "--epochs", 2) == 0
    stdout = capsys.readouterr().out
    result = json.loads(stdout)  # one line, nothing else
    assert result.keys() == {
        "steps", "samples", "samples_per_second", "seconds",
        "valid_auc", "best_step", "test_auc", "test_logloss", "test_calibration",
        "test_normalized_entropy",
    }  # fmt: skip
    assert (result["steps"], result["samples"]) == (20, 600)  # the batch of 12 rows too
    assert {p.name for p in out.iterdir()} == {
        ".lock", "config.toml", "data.json", "metrics.jsonl", "checkpoints", "last", "best",
    }  # fmt: skip
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == result
    assert [line["step"] for line in trial.steps(out) if "valid_auc" in line] == [10, 20]
    losses = [line for line in trial.steps(out) if "loss" in line]
    assert [(line["step"], line["epoch"]) for line in losses] == [(10, 0), (20, 1)]
    settings = tomllib.loads((out / "config.toml").read_text())
    assert settings["model"]["embedding_dim"] == 4
    assert settings["training"] == cupyrec.config.DEFAULTS["training"] | {
        "batch_size": 32, "epochs": 2,
    }  # fmt: skip
    manifest = checkpoint.verify(out / "last")
    assert manifest["config"] == {"settings": settings, "schema": trial.SCHEMA.to_dict()}
    assert manifest["groups"][0]["rows"] == count_ids(logs)


def count_ids(logs):
    keys = set()
    for batch in TSV(logs[1], trial.SCHEMA).batches(1000):
        keys |= {(table, int(i)) for row in batch.ids for table, i in enumerate(row)}
    return len(keys)


def test_defaults_train_without_config_valid_test_or_out(logs, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert trial.command("train", "--train", logs[1], *logs[6:]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"steps", "samples", "samples_per_second", "seconds"}
    assert result["samples_per_second"] is None  # of one step, which compiles
    assert list(tmp_path.iterdir()) == []


def test_same_seed_same_bits_whatever_the_threads(logs, tmp_path):
    more = "--set", "model.dropout=0.2", "--batch-size", 256, "--epochs", 3
    before = cpu.num_threads()
    try:
        for name, threads, seed in [("a", 1, 5), ("b", 2, 5), ("c", 3, 5), ("d", 2, 6)]:
            cpu.set_num_threads(threads)
            assert trial.train(logs, tmp_path / name, *more, "--seed", seed) == 0
    finally:
        cpu.set_num_threads(before)
    a, b, c, d = (trial.files(tmp_path / name / "last") for name in "abcd")
    assert len(a) == 6
    assert a == b == c
    assert trial.steps(tmp_path / "a") == trial.steps(tmp_path / "b")
    same = {name for name in a if a[name] == d[name]}
    # Other weights, the same rows in the same order.
    assert same == {name for name in a if name.endswith(("ids.npy", "tables.npy"))}


def test_several_files_are_one_log(logs, tmp_path):
    text = Path(logs[1]).read_text().splitlines(keepends=True)
    parts = [tmp_path / f"part{i}.tsv" for i in range(3)]
    for part, cut in zip(parts, ([0, 1], [1, 77], [77, 300]), strict=True):
        part.write_text("".join(text[slice(*cut)]))
    rest = logs[2:]
    assert trial.train(logs, tmp_path / "whole", "--epochs", 2) == 0
    assert trial.train(["--train", *parts, *rest], tmp_path / "parts", "--epochs", 2) == 0
    assert trial.files(tmp_path / "whole" / "last") == trial.files(tmp_path / "parts" / "last")


def test_the_best_is_kept_and_measured(logs, tmp_path, capsys, monkeypatch):
    aucs = iter([0.5, 0.7, 0.6, 0.7, 0.65])
    real = training.evaluate

    def evaluate(model, data, **options):
        measured = real(model, data, **options)
        return measured | {"auc": next(aucs, measured["auc"])}

    monkeypatch.setattr(training, "evaluate", evaluate)
    more = "--epochs", 9, "--set", "training.eval_every=5", "--set", "training.patience=3"
    assert trial.train(logs, tmp_path / "run", *more) == 0
    result = json.loads(capsys.readouterr().out)
    # Evaluations at steps 5, 10, …; equal is not better; stopped after the third without a better.
    assert (result["steps"], result["best_step"], result["valid_auc"]) == (25, 10, 0.7)
    assert (tmp_path / "run" / "best").resolve().name == "step-10"
    assert (tmp_path / "run" / "last").resolve().name == "step-25"
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    monkeypatch.undo()
    assert trial.command("evaluate", tmp_path / "run", "--data", logs[5]) == 0
    assert json.loads(capsys.readouterr().out)["test_auc"] == pytest.approx(result["test_auc"])
    # A run that stopped early and is resumed stops at once.
    assert trial.command("train", *logs, "--resume", tmp_path / "run") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["steps"], again["samples"]) == (25, 0)
    assert again["test_auc"] == result["test_auc"]


def test_an_evaluation_that_falls_on_an_epochs_end_is_done_once(logs, tmp_path):
    more = "--epochs", 2, "--set", "training.eval_every=5", "--set", "training.save_every=2"
    assert trial.train(logs, tmp_path / "run", *more) == 0
    evaluated = [line["step"] for line in trial.steps(tmp_path / "run") if "valid_auc" in line]
    assert evaluated == [5, 10, 15, 20]


# What is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "dln"], f"train: --model must be one of {KNOWN}, got 'dln'."),
        (["--set", "model.name=5"], f"train: --model must be one of {KNOWN}, got '5'."),
        (["--optimizer", "adm"], "train: --optimizer must be one of"),
        (["--amp", "half"], "--amp must be one of ['float32', 'float16', 'bfloat16'], got 'half'."),
        (["--set", "training.epoch=2"], "must be known (did you mean 'epochs'?), got 'epoch'."),
        (["--set", "model.tops=[2]"], "must be known (did you mean 'top'?), got 'tops'."),
        (["--set", "modl.top=[2]"], "must be known (did you mean 'model'?), got 'modl'."),
        (["--set", "lr=2"], "config: a setting must be SECTION.KEY=VALUE, got 'lr=2'."),
        (["--set", "training.seed=1.5"], "[training] seed must be an integer such as 0, got 1.5."),
        (["--set", "training.batch_size=0"], "'batch_size' must be at least 1, got 0."),
        (["--set", "training.patience=-1"], "patience must be finite and not negative, got -1."),
        (["--lr", "nan"], "[optimizer] lr must be finite and not negative, got nan."),
        (["--seed", "-1"], "[training] seed must be finite and not negative, got -1."),
        (["--set", "model.top=[0]"], "FusedMLP: 'hidden_features' must be at least 1, got 0."),
        (["--set", 'model.top=["x"]'], "FusedMLP: 'hidden_features' must be an integer, got 'x'."),
        (["--set", "model.dropout=1.0"], "must lie in [0, 1), got 1.0."),
        (["--set", "optimizer.warmup_steps=9", "--set", "optimizer.decay_steps=2"], "warm-up"),
        (["--set", "optimizer.schedule=linear"], "schedule must be polynomial, cosine, step or"),
        (["--set", "optimizer.momentum=0.9"], "momentum must be 0 but for sgd, got 0.9."),
        (["--set", "model.embedding_dtype=int4"], "Group: 'dtype' must be one of"),
        (["--set", "model.embedding_dtype=int8"], "float16 or bfloat16 to learn, got int8."),
        (["--set", "data.buckets=true"], "data.buckets must be left to the columns of --schema"),
        (["--config", "plain.toml"], "be left to the columns of --schema, got False."),
        (["--config", "model.toml"], "config: 'model' must be a section [model], got 'dlrm'."),
        (["--config", "broken.toml"], "config: 'broken.toml' must be TOML, got "),
    ],
)
def test_wrong_usage(more, message, logs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.toml").write_text('model = "dlrm"\n')
    Path("broken.toml").write_text("[model\n")
    Path("plain.toml").write_text("[data]\nbuckets = false\n")
    Path("run").mkdir()
    Path("run", "metrics.jsonl").write_text("precious\n")
    assert trial.train(logs, "run", "--overwrite", *more) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cupyrec: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert Path("run", "metrics.jsonl").read_text() == "precious\n"


def test_a_saved_config_trains_again(logs, tmp_path):
    assert trial.train(logs, tmp_path / "a", "--seed", 3) == 0
    config = tmp_path / "a" / "config.toml"
    assert trial.command("train", *logs, "--config", config, "--out", tmp_path / "b") == 0
    assert trial.files(tmp_path / "a" / "last") == trial.files(tmp_path / "b" / "last")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": must be a file, found nothing there."),
        ("", ": must have at least one row, got an empty file."),
        ("1\t0.5\n", ", line 1, column 'user': a line must have 4 columns, got 2."),
        (
            "1\t0.5\t7\tff\nyes\t0.5\t7\tff\n",
            ", line 2, column 'click': the label must be 0 or 1, got 'yes'.",
        ),
        ("1\tnan\t7\tff\n", ", line 1, column 'price': must be a finite number, got 'nan'."),
    ],
)
def test_bad_data(content, message, logs, tmp_path, capsys):
    bad = tmp_path / "bad.tsv"
    if content is not None:
        bad.write_text(content)
    good, output = tmp_path / "good", tmp_path / "p.npy"
    assert trial.train(logs, good) == 0
    capsys.readouterr()
    for words in (
        ["train", "--train", bad, *logs[2:]],
        ["train", *logs, "--valid", bad],
        ["evaluate", good, "--data", bad],
        ["predict", good, "--data", bad, "--output", output],
    ):
        code = trial.command(*words)
        captured = capsys.readouterr()
        if words[0] == "predict" and "'click'" in message:
            assert code == 0  # it looks at no label
            assert len(np.load(output)) == 2
            continue
        assert code == 1
        assert captured.out == ""
        assert captured.err.splitlines()[-1] == f"cupyrec: {bad}{message}"
        assert "Traceback" not in captured.err
        assert not output.exists()


def test_malformed_lines_are_skipped_as_in_training_but_never_by_predict(
    logs, tmp_path, capsys, caplog
):
    bad, output = tmp_path / "bad.tsv", tmp_path / "p.npy"
    bad.write_text("1\t0.5\t7\tff\n1\tnan\t7\tff\n0\t0.5\t8\tff\n")
    run = tmp_path / "run"
    assert trial.train(logs, run, "--set", "data.on_error=skip") == 0
    caplog.clear()
    assert trial.command("evaluate", run, "--data", bad) == 0
    assert f"skipped 1 malformed lines, the first: {bad}, line 2, column 'price'" in caplog.text
    capsys.readouterr()
    assert trial.command("predict", run, "--data", bad, "--output", output) == 1
    message = f"cupyrec: {bad}, line 2, column 'price': must be a finite number, got 'nan'.\n"
    assert capsys.readouterr().err == message
    assert not output.exists()


def test_out_is_not_overwritten_unasked(logs, tmp_path, capsys):
    out = tmp_path / "run"
    assert trial.train(logs, out, "--epochs", 2) == 0
    (out / "notes.txt").write_text("mine")
    (out / "checkpoints" / "mine").mkdir()
    before = trial.files(out / "last")
    assert trial.train(logs, out) == 2
    assert "Give --resume or --overwrite.\n" in capsys.readouterr().err
    assert trial.files(out / "last") == before
    assert trial.train(logs, out, "--overwrite") == 0
    assert trial.train(logs, tmp_path / "fresh") == 0
    assert trial.files(out / "last") == trial.files(tmp_path / "fresh" / "last")
    assert trial.steps(out) == trial.steps(tmp_path / "fresh")
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["mine", "step-10"]
    (tmp_path / "empty").mkdir()
    assert trial.train(logs, tmp_path / "empty") == 0
    assert trial.train(logs, out / "notes.txt") == 1
    assert (
        f"RunFolder: '{out / 'notes.txt'}' must be a folder, got a file.\n"
        in capsys.readouterr().err
    )


def test_a_loss_that_is_not_finite_stops_and_overwrites_nothing(logs, tmp_path, capsys):
    run = tmp_path / "run"
    assert trial.train(logs, run) == 0
    best, last = (trial.files(run / name) for name in ("best", "last"))
    capsys.readouterr()
    spoil = "--lr", "1e30", "--epochs", 2
    for more in ([], ["--set", "training.save_every=1"], ["--set", "optimizer.clip_norm=1e9"]):
        assert trial.command("train", *logs, "--resume", run, *spoil, *more) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "step 1" in captured.err
        assert "finite" in captured.err
        assert "Try a smaller learning rate" in captured.err or "gradient norm" in captured.err
        assert "Traceback" not in captured.err
        assert (trial.files(run / "best"), trial.files(run / "last")) == (best, last)
    assert trial.command("evaluate", run, "--data", logs[5]) == 0
    assert trial.command("train", *logs, "--resume", run, "--lr", 0.05, "--set",
                        "training.save_every=0", "--set", "optimizer.clip_norm=0") == 0  # fmt: skip


# Evaluating and predicting


def test_predictions_in_three_formats(logs, tmp_path, capsys, monkeypatch):
    run, doing, busy = tmp_path / "run", [], Communicator.busy
    # By which other ranks know that this one gets on.
    monkeypatch.setattr(Communicator, "busy", lambda r, what: doing.append(what) or busy(r, what))
    assert trial.train(logs, run, "--epochs", 2) == 0
    best = trial.files(run / "best")
    capsys.readouterr()
    for suffix in ("npy", "parquet", "csv"):
        output = tmp_path / "new" / f"p.{suffix}"
        arguments = ["predict", run, "--data", logs[5], logs[3], "--output", output]
        assert trial.command(*arguments) == 0
        assert json.loads(capsys.readouterr().out) == {"rows": 400, "output": str(output)}
        assert trial.command(*arguments) == 2  # it exists
        assert trial.command(*arguments, "--overwrite", "--batch-size", 7) == 0
        capsys.readouterr()
    assert sorted(p.name for p in output.parent.iterdir()) == ["p.csv", "p.npy", "p.parquet"]
    assert doing.count("writing") == 6
    got = np.load(output.with_suffix(".npy"))
    assert (got.shape, got.dtype) == ((400,), np.float32)
    table = parquet.read_table(output.with_suffix(".parquet"))
    np.testing.assert_array_equal(table["probability"].to_numpy(), got)
    with open(output) as stream:
        rows = [np.float32(row["probability"]) for row in csv.DictReader(stream)]
    np.testing.assert_array_equal(rows, got)

    model = cupyrec.models.DLRM(1, 3, embedding_dim=4, bottom=[8], top=[8])
    checkpoint.load(run / "best", model)
    data = TSV([logs[5], logs[3]], trial.SCHEMA)
    np.testing.assert_allclose(got, cupyrec.predict(model, data), rtol=1e-6)
    assert trial.files(run / "best") == best
    assert trial.command("predict", run, "--data", logs[5], "--output", "p.txt") == 2
    assert "predict: --output must end in .npy, .parquet or .csv" in capsys.readouterr().err


def test_predictions_need_no_label_column(logs, tmp_path):
    run, bare = tmp_path / "run", tmp_path / "bare.tsv"
    assert trial.train(logs, run) == 0
    lines = Path(logs[5]).read_text().splitlines(keepends=True)
    bare.write_text("".join(line.partition("\t")[2] for line in lines))
    got = []
    for path in (logs[5], bare):
        output = tmp_path / f"{len(got)}.npy"
        assert trial.command("predict", run, "--data", path, "--output", output) == 0
        got.append(np.load(output))
    assert len(got[0]) == 200
    np.testing.assert_array_equal(got[1], got[0])


def test_the_device_and_its_threads_are_logged(logs, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(cpu, "_threads", cpu.num_threads())  # put back at the end
    run = tmp_path / "run"
    for threads, words in enumerate([
        ["train", *logs, *trial.SMALL, "--out", run],
        ["evaluate", run, "--data", logs[5]],
        ["predict", run, "--data", logs[5], "--output", tmp_path / "p.npy"],
    ], 1):  # fmt: skip
        caplog.clear()
        assert trial.command(*words, "--threads", threads) == 0
        told = [r.getMessage() for r in caplog.records if "device" in r.getMessage()]
        assert told == [f"device cpu, {threads} thread{'' if threads == 1 else 's'}"]
        assert cpu.num_threads() == threads


def test_the_speed_of_an_evaluation_is_that_of_its_rows_alone(logs, tmp_path, capsys, monkeypatch):
    assert trial.train(logs, tmp_path / "run") == 0
    load = checkpoint.load

    def slow_load(*arguments):
        time.sleep(0.5)
        return load(*arguments)

    monkeypatch.setattr(checkpoint, "load", slow_load)
    capsys.readouterr()
    assert trial.command("evaluate", tmp_path / "run", "--data", logs[5]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < 200 / result["samples_per_second"] <= result["seconds"] - 0.5


def test_evaluation_of_a_run_or_of_one_checkpoint(logs, tmp_path, capsys):
    run = tmp_path / "run"
    assert trial.train(logs, run, "--epochs", 2) == 0
    result = json.loads(capsys.readouterr().out)
    one_class = tmp_path / "one.tsv"
    one_class.write_text("1\t0.5\t1\tff\n" * 3)
    measured = []
    for path in (run, run / "best", run / "best" / ".." / (run / "best").resolve().name):
        assert trial.command("evaluate", path, "--data", logs[5]) == 0
        measured.append(json.loads(capsys.readouterr().out))
        assert measured[-1].keys() == {
            "test_auc", "test_logloss", "test_calibration", "test_normalized_entropy",
            "samples_per_second", "seconds",
        }  # fmt: skip
        assert measured[-1]["test_auc"] == result["test_auc"]
        assert measured[-1]["test_logloss"] == pytest.approx(result["test_logloss"])
    assert trial.command("evaluate", run, "--data", one_class) == 0
    assert json.loads(capsys.readouterr().out)["test_auc"] is None
    for wrong in (tmp_path, tmp_path / "none", logs[1]):
        assert trial.command("evaluate", wrong, "--data", logs[5]) == 1
        assert f"checkpoint: '{wrong}' must be a checkpoint folder" in capsys.readouterr().err
    checkpoint.save(tmp_path / "bare", cupyrec.models.DLRM(1, 3))
    assert trial.command("evaluate", tmp_path / "bare", "--data", logs[5]) == 1
    assert "must be written by `cupyrec train`, got no config." in capsys.readouterr().err


def test_a_failing_write_of_predictions_leaves_nothing(logs, tmp_path, capsys, monkeypatch):
    run, output = tmp_path / "run", tmp_path / "p" / "p.npy"
    assert trial.train(logs, run) == 0

    def full(path, array):
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert trial.command("predict", run, "--data", logs[5], "--output", output) == 1
    assert f"No space left on device: '{output}'" in capsys.readouterr().err
    assert list(output.parent.iterdir()) == []


def test_real_clicks(tmp_path, capsys):
    if "CUPYREC_DATA" not in os.environ:
        pytest.skip("CUPYREC_DATA names no folder of real data")
    folder = Path(os.environ["CUPYREC_DATA"], "criteo")
    # The smaller part, which is later, foretells the larger one; the part for tests stays unread.
    train, valid = folder / "valid.tsv.gz", folder / "train.tsv.gz"
    assert trial.command("train", "--train", train, "--valid", valid, "--epochs", 2) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["samples"]) == (20, 2 * 9795)
    assert result["valid_auc"] > 0.69


def test_training_without_out_says_that_nothing_is_kept(logs, capsys, caplog):
    assert trial.command("train", *logs, "--out", "") == 2
    assert "train: --out must name a folder, got ''.\n" in capsys.readouterr().err
    assert trial.command("train", *logs) == 0
    assert "without --out neither model nor metrics are kept" in caplog.messages


def test_a_run_that_failed_at_its_first_line_may_be_tried_again(logs, tmp_path, capsys):
    wrong, out = tmp_path / "wrong.tsv", tmp_path / "run"
    wrong.write_text("1\n")
    assert trial.train(logs, out, "--train", wrong) == 1
    assert "line 1" in capsys.readouterr().err
    assert (out / "config.toml").exists()
    assert trial.train(logs, out) == 0
