"""Runs that go on from another's checkpoint, and checkpoints that are based on others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import trial

from cupyrec.checkpoint_deltas import links
from cupyrec.checkpoint_diff import diff
from cupyrec.checkpoint_files import read_manifest

DELTAS = ["--set", "training.save_every=4", "--set", "training.deltas=2"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """The next day's log: some users are new."""
    return trial.write_log(
        tmp_path_factory.mktemp("today") / "train.tsv", 300, seed=5, first_user=20
    )


def manifest(run):
    return read_manifest(Path(run) / "last", delta=True)


def test_a_run_begins_with_what_another_has_learnt(logs, today, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert trial.train(logs, first, "--set", "optimizer.warmup_steps=15") == 0
    before = trial.files(first / "last")
    capsys.readouterr()
    words = ["--train", today, "--valid", logs[3], "--from", first, "--out", second]
    assert trial.command("train", *words) == 0
    result = json.loads(capsys.readouterr().out)
    told, was = manifest(second), manifest(first)
    assert told["optimizer"]["t"] == 20 == 2 * was["optimizer"]["t"]
    assert told["progress"]["step"] == 20
    assert (result["steps"], result["best_step"]) == (20, 20)
    lines = trial.steps(second)
    assert [line["step"] for line in lines if "lr" in line] == [20]
    assert [line["lr"] for line in lines if "lr" in line][-1] == pytest.approx(
        0.05
    )  # the schedule went on: 15 steps of warm-up
    assert told["config"]["settings"]["optimizer"]["warmup_steps"] == 15
    assert told["groups"][0]["rows"] > was["groups"][0]["rows"]
    assert trial.files(first / "last") == before


def test_that_equals_one_run_over_both_days(logs, today, tmp_path):
    even = [*logs[6:], *trial.SMALL, "--set", "training.batch_size=50"]  # no batch of both days
    one, two, both = (tmp_path / name for name in ("one", "two", "both"))
    assert trial.command("train", "--train", logs[1], *even, "--out", one) == 0
    assert trial.command("train", "--train", today, "--from", one, "--out", two) == 0
    assert trial.command("train", "--train", logs[1], today, *even, "--out", both) == 0
    told = diff(both / "last", two / "last")
    assert not any(t["only_a"] or t["only_b"] or t["differ"] for t in told["tables"].values())
    assert set(told["dense"].values()) <= {0.0}


def test_checkpoints_are_based_on_those_before(logs, tmp_path):
    full, run = tmp_path / "full", tmp_path / "run"
    assert trial.train(logs, full, *DELTAS[:2], "--set", "embedding.expire_after=1000") == 0
    assert trial.train(logs, run, *DELTAS, "--set", "embedding.expire_after=1000") == 0
    chain = links(run / "last")
    assert [link.manifest["progress"]["step"] for link in chain] == [4, 8, 10]
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    needed = {link.folder.resolve().name for link in chain}
    needed |= {link.folder.resolve().name for link in links(run / "best")}
    assert kept == needed
    out = tmp_path / "compact"
    assert trial.command("checkpoint", "compact", run / "last", out) == 0
    told = diff(out, full / "last")
    assert not any(t["only_a"] or t["only_b"] or t["differ"] for t in told["tables"].values())
    assert trial.command("checkpoint", "verify", run / "last") == 0
    assert trial.command("checkpoint", "inspect", run / "last") == 0


def test_a_resumed_run_goes_on_with_its_chain(logs, tmp_path):
    full, run = tmp_path / "full", tmp_path / "run"
    assert trial.train(logs, full, *DELTAS) == 0
    with pytest.raises(trial.Killed), trial.at_step(10, trial.kill):
        trial.train(logs, run, *DELTAS)
    assert len(links(run / "last")) == 2
    assert trial.command("train", *logs, "--resume", run) == 0
    told = [manifest(path) for path in (run, full)]
    assert told[0]["progress"] == told[1]["progress"]
    probabilities = []
    for path in (run, full):
        output = tmp_path / "probabilities.npy"
        words = ["--data", logs[5], "--output", output, "--overwrite"]
        assert trial.command("predict", path / "last", *words) == 0
        probabilities.append(np.load(output).tobytes())
    assert probabilities[0] == probabilities[1]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--resume", "."], "train: --from must come without --resume, got both."),
        (["--model", "fm"], "train: --model must be that of --from, 'dlrm', got 'fm'."),
        (["--optimizer", "sgd"], "must have the state of SGD, got Adagrad"),
        (["--set", "model.bottom=[9]"], "must have"),
    ],
)
def test_what_is_refused(more, text, logs, today, tmp_path, capsys):
    assert trial.train(logs, tmp_path / "first") == 0
    words = ["--train", today, "--from", tmp_path / "first"]
    assert trial.command("train", *words, "--out", tmp_path / "second", *more) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "more", "text"),
    [
        ("first", [], "train: --out must be another run's than --from, got"),
        ("second", ["--optimizer", "sgd"], "must have the state of SGD, got Adagrad"),
        ("second", ["--set", "model.name=fm"], "train: --model must be that of --from, 'dlrm'"),
    ],
)
def test_a_refused_start_overwrites_nothing(out, more, text, logs, today, tmp_path, capsys):
    for name in ("first", "second"):
        assert trial.train(logs, tmp_path / name) == 0
    before = [trial.files(tmp_path / name / "last") for name in ("first", "second")]
    words = ["--train", today, "--from", tmp_path / "first", "--out", tmp_path / out, "--overwrite"]
    assert trial.command("train", *words, *more) == 2
    assert text in capsys.readouterr().err
    assert [trial.files(tmp_path / name / "last") for name in ("first", "second")] == before


def test_a_base_that_goes_meanwhile_is_done_without(logs, today, tmp_path, caplog):
    first, second = tmp_path / "first", tmp_path / "second"
    assert trial.train(logs, first, *DELTAS) == 0
    words = ["--train", today, "--valid", logs[3], "--from", first / "last", "--out", second]
    words += ["--set", "training.deltas=9", "--set", "training.eval_every=2"]
    with trial.at_step(12, lambda: shutil.rmtree(first)):  # before a save
        assert trial.command("train", *words) == 0
    assert [link.manifest["progress"]["step"] for link in links(second / "last")] == [
        12,
        14,
        16,
        18,
        20,
    ]
    assert "the next checkpoint holds all rows: checkpoint: " in caplog.text
    assert trial.command("train", "--train", today, "--resume", second) == 0


def test_a_start_without_a_folder_is_never_finished(logs, today, tmp_path, capsys):
    assert trial.train(logs, tmp_path / "first") == 0
    words = ["--train", today, "--from", tmp_path / "first", "--set", "training.epochs=0"]
    assert trial.command("train", *words) == 1
    assert "cupyrec: fit: 'epochs' must be at least 1, got 0." in capsys.readouterr().err


def test_the_place_of_tables_stays_a_runs_own(logs, today, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    own = ["embedding.tier='cached_ssd'", f"embedding.path='{tmp_path / 'tables'}'"]
    sets = [word for setting in (*own, "embedding.cache_mb=1") for word in ("--set", setting)]
    assert trial.train(logs, first, *sets) == 0
    assert trial.command("train", "--train", today, "--from", first, "--out", second) == 0
    settings = manifest(second)["config"]["settings"]["embedding"]
    assert (settings["tier"], settings["path"]) == ("cached_ssd", "")
    assert (second / "tables").is_dir()
    capsys.readouterr()
    assert trial.command("train", "--train", today, "--from", second) == 2
    text = "train: embedding.path must name a folder without --out, got ''."
    assert text in capsys.readouterr().err


def test_a_resumed_run_keeps_account_of_ids(logs, tmp_path):
    rules = ["admit_after=2", "admit_probability=0.7", "expire_after=6", "check_every=4"]
    sets = [word for rule in rules for word in ("--set", f"embedding.{rule}")]
    sets += ["--epochs", "2", "--optimizer", "catch_up_adam", "--set", "training.save_every=4"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert trial.train(logs, one, *sets) == 0
    with pytest.raises(trial.Killed), trial.at_step(11, trial.kill):
        trial.train(logs, two, *sets)
    assert trial.command("train", *logs, "--resume", two) == 0
    assert trial.files(one / "last") == trial.files(two / "last")
    assert trial.steps(one) == trial.steps(two)
    names = [group["name"] for group in manifest(one)["groups"] if group["rows"]]
    assert any(name.endswith(".candidates") for name in names)
