"""Runs that go on from another's checkpoint, and checkpoints that are based on others."""

import json
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
        (["--model", "fm"], "config: a key of [model] must be known"),
        (["--optimizer", "sgd"], "must have the state of SGD, got Adagrad"),
        (["--set", "model.bottom=[9]"], "must have"),
    ],
)
def test_what_is_refused(more, text, logs, today, tmp_path, capsys):
    assert trial.train(logs, tmp_path / "first") == 0
    words = ["--train", today, "--from", tmp_path / "first"]
    assert trial.command("train", *words, "--out", tmp_path / "second", *more) == 2
    assert text in capsys.readouterr().err
