"""``cupyrec train`` on every tier: the same result, resumed and evaluated too."""

import json
import signal
import tempfile

import numpy as np
import pytest
import trial
from safetensors import numpy as safetensors

from cupyrec import checkpoint
from cupyrec.checkpoint_diff import diff
from cupyrec.embedding import CachedSSD

MANY = ["--set", "training.save_every=4"]
TIERS = {
    "memory": [],
    "cached_host": ["embedding.tier=cached_host", "embedding.cache_mb=0.001"],
    "cached_ssd": ["embedding.tier=cached_ssd", "embedding.cache_mb=0.001"],
    "both": [
        "embedding.tier=cached_ssd", "embedding.cache_mb=0.001",
        "embedding.host_cache_mb=0.002", "embedding.direct=true",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def truth(logs, tmp_path_factory):
    out = tmp_path_factory.mktemp("truth") / "run"
    assert trial.train(logs, out, *MANY, "--epochs", 2) == 0
    return out


def settings(tier):
    return [word for setting in TIERS[tier] for word in ("--set", setting)]


def same(run, truth):
    ours, theirs = (safetensors.load_file(f / "last" / "dense.safetensors") for f in (run, truth))
    assert {k: v.tobytes() for k, v in ours.items()} == {k: v.tobytes() for k, v in theirs.items()}
    return diff(run / "last", truth / "last")


@pytest.mark.parametrize("tier", list(TIERS)[1:])
def test_a_run_and_its_resumption_and_evaluation(tier, logs, truth, tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.raises(trial.Killed), trial.at_step(7, trial.kill):
        trial.train(logs, out, *MANY, *settings(tier), "--epochs", 2)
    capsys.readouterr()
    assert trial.command("train", *logs, "--resume", out) == 0
    result = json.loads(capsys.readouterr().out)
    told = same(out, truth)
    assert told == same(truth, truth)
    lines = [line for line in trial.steps(out) if "cache" in line]
    assert lines
    assert all(0 <= line["cache"]["hit_rate"] <= 1 for line in lines)
    assert sum(line["cache"]["evictions"] for line in lines) > 0
    assert trial.command("evaluate", out / "last", "--data", logs[5]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["test_auc"] == result["test_auc"]
    probabilities = []
    for run in (out, truth):
        output = tmp_path / "probabilities.npy"
        told = ["--data", logs[5], "--output", output, "--overwrite"]
        assert trial.command("predict", run / "last", *told) == 0
        probabilities.append(np.load(output).tobytes())
    assert probabilities[0] == probabilities[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_signal_leaves_no_rows_behind(name, number, logs, truth, tmp_path, monkeypatch):
    def load(path, model):
        assert list(tmp_path.glob("cupyrec-tables-*"))
        signal.raise_signal(number)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint, "load", load)
    output = ["--output", tmp_path / "probabilities.npy"] if name == "predict" else []
    assert trial.command(name, truth / "last", "--data", logs[5], *output) == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == signal.SIG_DFL


def test_rows_of_others_are_not_overwritten_unasked(logs, tmp_path, capsys):
    path = tmp_path / "rows"
    tier = [*settings("cached_ssd"), "--set", f"embedding.path={path}"]
    store = CachedSSD(path=path, cache_rows=32).store(
        "embedding.groups.4/00000-of-00001", 4
    )  # as the model's table is called
    store.find_or_insert(
        np.zeros(3, np.uint32), np.arange(3), lambda *keys: np.zeros((3, 4), np.float32)
    )
    store.save()
    store.close()
    assert trial.train(logs, tmp_path / "run", *tier) == 2
    told = f"embedding.path '{path}' must hold no rows without --overwrite, got 3."
    assert told in capsys.readouterr().err
    assert trial.train(logs, tmp_path / "run", *tier, "--overwrite") == 0


def test_a_file_at_the_place_of_tables_overwrites_nothing(logs, tmp_path, capsys):
    path, run = tmp_path / "file", tmp_path / "run"
    path.touch()
    tier = [*settings("cached_ssd"), "--set", f"embedding.path={path}"]
    assert trial.train(logs, run, *tier) == 1
    told = f"cupyrec: CachedSSD: '{path}' must be a folder, got a file.\n"
    assert capsys.readouterr().err == told
    assert not run.exists()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("embedding.tier=gpu",
         "config: [embedding] tier must be memory, cached_host or cached_ssd, got 'gpu'."),
        ("embedding.cache_mb=0", "CachedHost: 'cache_mb' must be above 0, got 0.0."),
        ("model.dense_updates=true",
         "config: model.dense_updates must be false unless embedding.tier is memory, "
         "got tier cached_host."),
    ],
)  # fmt: skip
def test_what_is_refused(setting, text, logs, tmp_path, capsys):
    told = [*settings("cached_host"), "--set", setting]
    assert trial.train(logs, tmp_path / "run", *told) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
