import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trial
from oracle import sentence

from cupyrec import checkpoint, checkpoint_files, nn, optim, training
from cupyrec.checkpoint_deltas import links
from cupyrec.embedding import Life
from cupyrec.models import DLRM
from cupyrec.run_folder import RunFolder, json_line


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


def small():
    model = DLRM(1, 2, embedding_dim=2, bottom=[2], top=[2])
    return model, optim.Adagrad(model.parameters(), 0.1)


def test_a_line_of_json_holds_no_nan():
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "e": None, "f": "x", "g": 3}
    known = values | {"a": None, "b": None, "c": None}
    assert json.loads(json_line(values), parse_constant=pytest.fail) == known


def test_metrics_survive_a_line_cut_short(tmp_path):
    run = RunFolder(tmp_path / "a" / "b")
    assert run.metrics() == []
    run.log(step=1, loss=0.5)
    run.log(step=2, loss=math.nan)
    with open(run.path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3, "lo')
    assert run.metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_a_full_disk_is_told_by_the_file(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'metrics.jsonl'}'"):
        run.log(step=1)


def test_forget_after_drops_later_steps_results_and_broken_lines(tmp_path):
    run = RunFolder(tmp_path)
    for line in ({"step": 3}, {"step": 4, "loss": 1.0}, {"step": 5}, {"steps": 4, "seconds": 2.0}):
        run.log(**line)
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3')
    run.forget_after(4)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3}\n{"step": 4, "loss": 1.0}\n'
    run.forget_after(2)
    assert run.metrics() == []
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "metrics.jsonl"}


def test_links_point_to_the_last_and_the_best(tmp_path):
    model, optimizer = small()
    run = RunFolder(tmp_path)
    names = []
    for step, best in [(1, False), (2, True), (3, False), (4, False), (5, True), (5, False)]:
        run.save(model, optimizer, {"step": step}, best=best)
        kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
        names.append((run.last.resolve().name, run.best.resolve().name, kept))
    assert names == [
        ("step-1", "best", ["step-1"]),
        ("step-2", "step-2", ["step-2"]),
        ("step-3", "step-2", ["step-2", "step-3"]),
        ("step-4", "step-2", ["step-2", "step-4"]),
        ("step-5", "step-5", ["step-5"]),
        ("step-5+", "step-5", ["step-5", "step-5+"]),  # what is there is never written over
    ]
    assert checkpoint.verify(run.last)["progress"] == {"step": 5}
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    assert checkpoint.verify(tmp_path.with_name("moved") / "last")["progress"] == {"step": 5}


def test_while_a_base_is_gone_nothing_is_removed(tmp_path, caplog):
    layer = nn.MultiTableEmbedding(1, 2, life=Life())
    optimizer = optim.SGD(layer.parameters(), 0.1)
    checkpoint.save(tmp_path / "other", layer, optimizer)
    run = RunFolder(tmp_path / "run")
    run.deltas, run.base = 5, tmp_path / "other"
    run.save(layer, optimizer, {"step": 1})
    run.save(layer, optimizer, {"step": 2}, best=True)
    (tmp_path / "other").rename(tmp_path / "away")
    run.save(layer, optimizer, {"step": 3})
    run.save(layer, optimizer, {"step": 4})
    assert [link.folder.name for link in links(run.last)] == ["step-3", "step-4"]
    assert "no checkpoint is removed: checkpoint: " in caplog.text
    (tmp_path / "away").rename(tmp_path / "other")
    names = [link.folder.name for link in links(run.best)]
    assert names == ["other", "step-1", "step-2"]
    run.save(layer, optimizer, {"step": 5}, best=True)
    kept = {path.name for path in (run.path / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-4", "step-5"}


def test_config_goes_into_checkpoints(tmp_path):
    model, optimizer = small()
    run = RunFolder(tmp_path)
    run.config = {"settings": {"a": 1}}
    run.save(model, optimizer, {"step": 1})
    assert checkpoint.read_manifest(run.last)["config"] == run.config


def test_a_full_folder_is_refused_overwritten_or_resumed(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.save(*small(), {"step": 1}, best=True)
    run.log(step=1)
    for name in ("config.toml", "report.html", "notes.txt"):
        (run.path / name).touch()
    rule = "must be empty unless a run is resumed or overwritten"
    text = sentence(f"RunFolder: '{run.path}' {rule}, got 7 entries.")
    with pytest.raises(FileExistsError, match=text):
        RunFolder(run.path)
    assert len(RunFolder(run.path, resume=True).metrics()) == 1
    assert len(list(run.path.iterdir())) == 8  # with .lock
    RunFolder(run.path, overwrite=True)
    assert sorted(p.name for p in run.path.rglob("*")) == [
        ".lock", "checkpoints", "notes.txt",
    ]  # fmt: skip
    with pytest.raises(NotADirectoryError, match=r"notes.txt' must be a folder, got a file\.$"):
        RunFolder(run.path / "notes.txt", overwrite=True)


def test_a_folder_of_a_run_that_failed_at_once_counts_as_empty(tmp_path):
    for name in ("config.toml", "data.json"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).log(step=1)
    with pytest.raises(FileExistsError, match=r"got 3 entries\.$"):
        RunFolder(tmp_path)
    (tmp_path / "data.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(FileExistsError, match=r"got 1 entries\.$"):
        RunFolder(tmp_path)  # of which this may be somebody's own


def test_a_save_that_fails_leaves_the_links_and_no_rubbish(tmp_path, monkeypatch):
    model, optimizer = small()
    run = RunFolder(tmp_path)
    run.save(model, optimizer, {"step": 1}, best=True)
    before = sorted(tmp_path.rglob("*"))

    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        run.save(model, optimizer, {"step": 2}, best=True)
    assert sorted(tmp_path.rglob("*")) == before
    model.top.biases[0].data[0] = np.inf
    monkeypatch.undo()
    with pytest.raises(
        FloatingPointError, match="parameter/top.biases.0 must be finite, got 1 of 2"
    ):
        run.save(model, optimizer, {"step": 2}, best=True)
    assert sorted(tmp_path.rglob("*")) == before


KILLED_AT_EVERY_TURN = """
import os, shutil, signal, sys
sys.path[:0] = sys.argv[2:]
from test_run_folder import RunFolder, small

folder = sys.argv[1]
model, optimizer = small()
run = RunFolder(folder + "/0")
run.save(model, optimizer, {"step": 1}, best=True)
run.save(model, optimizer, {"step": 2})
model.top.biases[0].data[0] = 3
TURNS = "open os.mkdir os.rename os.remove os.rmdir os.symlink".split()
turn = status = 1
while status:
    shutil.copytree(folder + "/0", f"{folder}/{turn}", symlinks=True)
    child = os.fork()
    if not child:
        left = turn
        def hook(event, arguments):
            global left
            if event in TURNS:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        RunFolder(f"{folder}/{turn}", resume=True).save(model, optimizer, {"step": 3}, best=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    turn += 1
"""


def test_killed_at_every_turn_of_a_save(tmp_path):
    arguments = [tmp_path, *(p for p in sys.path if p)]
    script = [sys.executable, "-c", KILLED_AT_EVERY_TURN, *map(str, arguments)]
    assert subprocess.run(script, check=True, capture_output=True).stderr == b""
    seen = set()
    model, optimizer = small()
    turns = sorted(map(int, (p.name for p in tmp_path.iterdir())))
    for turn in turns[1:]:
        run = RunFolder(tmp_path / str(turn), resume=True)
        for folder in (run.path / "checkpoints").glob("step-*"):
            checkpoint.verify(folder)  # none is half written or half removed
        for link in (run.last, run.best):
            manifest = checkpoint.load(link, model, optimizer)
            assert (manifest["progress"]["step"] == 3) == (model.top.biases[0].data[0] == 3)
        last, best = (int(link.resolve().name[-1]) for link in (run.last, run.best))
        seen.add((last, best))
        run.save(model, optimizer, {"step": 4})  # as a resumed run will; it removes what was left
        kept = {run.last.resolve().name, run.best.resolve().name}
        assert {p.name for p in (run.path / "checkpoints").iterdir()} == kept
        assert {p.name for p in run.path.iterdir()} == {".lock", "checkpoints", "last", "best"}
    assert len(turns) > 20
    assert seen == {(2, 1), (2, 3), (3, 3)}


# Resuming

CASES = {
    "adagrad": ["--optimizer", "adagrad", "--set", "model.dropout=0.3"],
    "adam": ["--optimizer", "adam", "--set", "model.dropout=0.3", "--set", "optimizer.clip_norm=1"],
    "sgd": [
        "--optimizer", "sgd", "--set", "optimizer.warmup_steps=7",
        "--set", "optimizer.decay_start=9", "--set", "optimizer.decay_steps=12",
    ],
}  # fmt: skip
EVERY = "--epochs 2 --set training.eval_every=6 --set training.save_every=4".split()


@pytest.fixture(scope="module")
def uninterrupted(logs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    for name, case in CASES.items():
        assert trial.train(logs, folder / name, *EVERY, *case) == 0
    return folder


def check_same_run(got, expected):
    for name in ("last", "best"):
        assert trial.files(got / name) == trial.files(expected / name)
    assert trial.steps(got) == trial.steps(expected)


@pytest.mark.parametrize("optimizer", CASES)
@pytest.mark.parametrize(
    ("act", "step"),
    [
        (trial.kill, 5),  # after a checkpoint
        (trial.kill, 9),  # some steps after
        (trial.kill, 11),  # an epoch is over
        (trial.interrupt, 1),
        (trial.interrupt, 6),  # is evaluated
        (trial.interrupt, 10),  # the last of an epoch
        (trial.interrupt, 15),
        (trial.interrupt, 20),  # the last of all
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    act, step, optimizer, logs, tmp_path, uninterrupted, capsys
):
    run = tmp_path / "run"
    with trial.at_step(step, act):
        if act is trial.kill:
            with pytest.raises(trial.Killed):
                trial.train(logs, run, *EVERY, *CASES[optimizer])
        else:
            assert trial.train(logs, run, *EVERY, *CASES[optimizer]) == 130
            message = f"cupyrec: SIGINT: stopped after step {step}, saved in {run}\n"
            assert message in capsys.readouterr().err
            assert (run / "last").resolve().name == f"step-{step}"
    assert trial.command("train", *logs, "--resume", run) == 0
    check_same_run(run, uninterrupted / optimizer)


def test_resumed_again_and_again(logs, tmp_path, uninterrupted):
    run = tmp_path / "run"
    with trial.at_step(1, trial.interrupt):
        assert trial.train(logs, run, *EVERY, *CASES["adam"]) == 130
    for step in range(2, 20):
        with trial.at_step(step, trial.interrupt):
            assert trial.command("train", *logs, "--resume", run) == 130
    assert trial.command("train", *logs, "--resume", run) == 0
    check_same_run(run, uninterrupted / "adam")
    assert trial.command("train", *logs, "--resume", run) == 0  # a finished run
    check_same_run(run, uninterrupted / "adam")


def test_interrupted_in_an_evaluation(logs, tmp_path, uninterrupted, monkeypatch):
    real, run = training.evaluate, tmp_path / "run"

    def evaluate(*arguments, **options):
        trial.interrupt()
        return real(*arguments, **options)

    monkeypatch.setattr(training, "evaluate", evaluate)
    assert trial.train(logs, run, *EVERY, *CASES["sgd"]) == 130
    assert (run / "best").resolve().name == "step-6"
    monkeypatch.undo()
    assert trial.command("train", *logs, "--resume", run) == 0
    check_same_run(run, uninterrupted / "sgd")


def test_a_second_interrupt_stops_at_once(logs, tmp_path, uninterrupted, capsys):
    def twice():
        trial.interrupt()
        trial.interrupt()

    run = tmp_path / "run"
    with trial.at_step(7, twice):
        assert trial.train(logs, run, *EVERY, *CASES["sgd"]) == 130
    assert capsys.readouterr().err.endswith("cupyrec: interrupted\n")
    assert (run / "last").resolve().name == "step-6"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trial.command("train", *logs, "--resume", run) == 0
    check_same_run(run, uninterrupted / "sgd")


def test_epochs_are_raised_by_resuming(logs, tmp_path, uninterrupted):
    run = tmp_path / "run"
    assert trial.train(logs, run, *EVERY, *CASES["adam"], "--epochs", 1) == 0
    assert trial.command("train", *logs, "--resume", run, "--epochs", 2) == 0
    assert trial.files(run / "last") == trial.files(uninterrupted / "adam" / "last")
    assert trial.steps(run) == trial.steps(uninterrupted / "adam")
    results = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if "seconds" in line
    ]
    assert len(results) == 1  # not the one of the first epoch too


def test_a_checkpoint_that_was_never_linked_is_not_taken_for_a_new_one(logs, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(trial.Killed):
        patch.setattr(Path, "symlink_to", lambda *_: trial.kill())
        trial.train(logs, run, *EVERY, *CASES["sgd"])
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-4"]
    assert not (run / "last").exists()
    assert trial.train(logs, run, *EVERY, *CASES["sgd"], "--lr", 0.5, "--overwrite") == 0
    assert trial.train(logs, tmp_path / "other", *EVERY, *CASES["sgd"], "--lr", 0.5) == 0
    check_same_run(run, tmp_path / "other")
    # The same in a run that is resumed with another learning rate.
    with trial.at_step(6, trial.interrupt):
        assert trial.train(logs, run, *EVERY, *CASES["sgd"], "--overwrite") == 130
    shutil.copytree(run, tmp_path / "twin", symlinks=True)
    stale = run / "checkpoints" / "step-8"
    stale.mkdir()
    (stale / "manifest.json").write_text("of another time")
    for name in ("run", "twin"):
        more = "--resume", tmp_path / name, "--lr", 0.5
        assert trial.command("train", *logs, *more) == 0
    check_same_run(run, tmp_path / "twin")


def test_what_cannot_be_resumed_is_left_as_it_was(logs, tmp_path, capsys):
    run = tmp_path / "run"
    with trial.at_step(5, trial.interrupt):
        assert trial.train(logs, run) == 130
    other = tmp_path / "other.toml"
    trial.SCHEMA.save(other)
    other.write_text(other.read_text().replace('"user"', '"visitor"'))
    before = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    for more, code, message in [
        (["--batch-size", 16], 2, "train: --batch-size must stay 32 within an epoch, got 16."),
        (["--embedding-dim", 8], 2, "train: [model] must stay {'name': 'dlrm', "),
        (["--set", "model.top=[9]"], 2, "train: [model] must stay {'name': 'dlrm', "),
        (["--seed", 9], 2, "train: --seed must stay 0, got 9."),
        (["--schema", other], 2, f"train: --schema must stay that of '{run}', got another."),
        (["--optimizer", "sgd"], 1, "must have the state of SGD, got Adagrad."),
        (["--overwrite"], 2, "train: --resume must come without --out and --overwrite, got both."),
        (["--train", run / "none.tsv"], 1, "none.tsv: must be a file, found nothing there."),
    ]:
        capsys.readouterr()
        assert trial.command("train", *logs, "--resume", run, *more) == code
        assert message in capsys.readouterr().err
        assert {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()} == before


def test_one_process_writes_at_a_time(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(BlockingIOError, match=r"must have one writer, got another process"):
            RunFolder(tmp_path, resume=True)
        other.kill()
        other.wait()
    RunFolder(tmp_path, resume=True).log(step=1)


WRITER = """
import sys, time
from cupyrec import RunFolder
run = RunFolder(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""


def test_a_copy_without_links_is_refused_at_once(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.save(*small(), {"step": 1})
    shutil.copytree(run.path, tmp_path / "copy")  # follows links
    with pytest.raises(ValueError, match=r"copy/last' must be a link, got a file or folder.$"):
        RunFolder(tmp_path / "copy", resume=True)
