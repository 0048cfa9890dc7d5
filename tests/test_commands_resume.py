"""``cupyrec train --resume`` says what it finds: no checkpoint, nothing to do, other data."""

import signal
from pathlib import Path

import pytest
import trial

from cupyrec import checkpoint_files


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


def test_no_run_to_resume(logs, tmp_path, capsys):
    assert trial.command("train", *logs, "--resume", tmp_path / "none") == 2
    path = tmp_path / "none" / "config.toml"
    message = f"cupyrec: train: --resume must name a run's folder, got '{path.parent}'.\n"
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir()
    with pytest.raises(trial.Killed), trial.at_step(2, trial.kill):
        trial.train(logs, path.parent)
    capsys.readouterr()
    assert trial.command("train", *logs, "--resume", path.parent) == 2
    told = capsys.readouterr().err
    assert "--resume must name a run that has saved a checkpoint, got '" in told
    assert f"Start it anew with --out '{path.parent}' --overwrite; --set training.save" in told
    assert trial.train(logs, path.parent, "--overwrite") == 0


def test_a_resumed_run_says_what_it_finds_changed(logs, tmp_path, caplog):
    run = tmp_path / "run"
    assert trial.train(logs, run) == 0
    before = trial.files(run / "last")
    caplog.clear()
    assert trial.command("train", *logs, "--resume", run) == 0
    assert f"'{run}' is finished already, at step 10: nothing to train" in caplog.text
    assert "other data" not in caplog.text
    assert trial.files(run / "last") == before
    caplog.clear()
    other = ["--train", logs[3], *logs[2:]]
    assert trial.command("train", *other, "--resume", run, "--epochs", 2) == 0
    sizes = [Path(logs[i]).stat().st_size for i in (3, 1)]
    text = (
        "other data to train on than it had: valid.tsv of {} bytes; before, train.tsv of {} bytes"
    )
    assert text.format(*sizes) in caplog.text
    assert "nothing to train" not in caplog.text


def test_a_run_of_before_a_setting_of_the_model_goes_on_without_it(logs, tmp_path):
    run = tmp_path / "run"
    assert trial.train(logs, run) == 0
    told = checkpoint_files.read_manifest(run / "last")
    for key in ("batch_norm", "dense_updates"):
        del told["config"]["settings"]["model"][key]
    checkpoint_files.write_manifest(run / "last", told)
    lines = (run / "config.toml").read_text("utf-8").splitlines(keepends=True)
    kept = (line for line in lines if not line.startswith(("batch_norm", "dense_updates")))
    (run / "config.toml").write_text("".join(kept), "utf-8")
    assert trial.command("train", *logs, "--resume", run, "--epochs", 2) == 0
    assert trial.command("evaluate", run, "--data", logs[1]) == 0


def test_a_resumed_run_goes_on_in_its_shuffled_order(logs, tmp_path, capsys):
    def train(out, *more):
        return trial.train(logs, tmp_path / out, "--set", "data.shuffle=100", *more)

    assert train("whole", "--epochs", 2) == 0
    with trial.at_step(14, lambda: trial.interrupt(signal.SIGTERM)):  # in the second epoch
        assert train("parts", "--epochs", 2) != 0
    resume = *logs, "--resume", tmp_path / "parts"
    capsys.readouterr()
    assert trial.command("train", *resume, "--set", "data.shuffle=0") == 2
    told = "cupyrec: train: data.shuffle must stay 100 within an epoch, got 0.\n"
    assert capsys.readouterr().err.endswith(told)
    told = checkpoint_files.read_manifest(tmp_path / "parts" / "last")
    assert told["progress"]["ranks"] == 1
    told["progress"]["ranks"] = 3
    checkpoint_files.write_manifest(tmp_path / "parts" / "last", told)
    assert trial.command("train", *resume) == 2
    rule = "cupyrec: train: ranks must stay 3 within an epoch of these data, got 1.\n"
    assert capsys.readouterr().err.endswith(rule)
    told["progress"]["ranks"] = 0
    checkpoint_files.write_manifest(tmp_path / "parts" / "last", told)
    assert trial.command("train", *resume) == 0
    whole, parts = (trial.files(tmp_path / run / "last") for run in ("whole", "parts"))
    assert trial.train(logs, tmp_path / "in order", "--epochs", 2) == 0
    other = trial.files(tmp_path / "in order" / "last")
    for told in (whole, parts, other):
        del told["manifest.json"]
    assert whole == parts != other
