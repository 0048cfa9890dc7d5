import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import trial
from job import launch

import cupyrec
from cupyrec import checkpoint, cli, data_commands
from cupyrec.interruption import Interrupted

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"), rows=3000)


def python(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def test_help_and_version_load_neither_numpy_nor_numba():
    script = (
        "import sys\n"
        "from cupyrec import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    started = [python("-c", script, *words) for words in (["--help"], ["--version"])]
    (text, loaded), (version, _) = (process.communicate() for process in started)
    for word in ("train", "evaluate", "predict", "data"):
        assert f"    {word} " in text
    assert version == f"{cupyrec.__version__}\n"
    assert "cupyrec" in loaded
    assert not {"numpy", "numba", "pyarrow", "safetensors", "tqdm"} & set(loaded.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["train"], "the following arguments are required: --train"),
        (
            ["train", "--train", "x", "--epoch", "two"],
            "must be an integer of at least 1, got 'two'",
        ),
        (
            ["train", "--train", "x", "--batch-size", "0"],
            "must be an integer of at least 1, got '0'",
        ),
        (["evaluate", "x", "--data", "y", "--threads", "0"], "argument --threads: must be an"),
        (["train", "--train", "x", "--lr", "much"], "argument --lr: invalid float value: 'much'"),
        (["train", "--train", "x", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (
            ["train", "--train", "x", "--out", "a", "--resume", "b"],
            "train: --resume must come without",
        ),
        (["train", "--train", "x", "--stall-timeout", "0"], "must be a number of seconds above 0"),
        (["evaluate", "x"], "the following arguments are required: --data"),
        (["predict", "x", "--data", "y"], "the following arguments are required: --output"),
        (["data"], "the following arguments are required: KIND"),
        (["data", "synthetic", "--out", "x"], "the following arguments are required: --rows"),
    ],
)
def test_wrong_usage_exits_2(arguments, message, capsys):
    assert trial.command(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("checkpoint verify nothing", "checkpoint: must run as one process, got 3 ranks."),
        ("data synthetic --rows 5 --out x.tsv", "data: must run as one process, got 3 ranks."),
        ("evaluate x", "the following arguments are required: --data"),
        ("serve x --cache-mb 3", "--cache-mb must come with a --tier that has a cache"),
    ],
)
def test_wrong_usage_of_several_ranks_is_told_once(arguments, told, tmp_path):
    run = f"import os, sys; os.chdir({str(tmp_path)!r})\nfrom cupyrec.cli import main\n"
    ended = launch(tmp_path, f"{run}sys.exit(main({arguments.split()}))", 3)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count(told) == 1
    assert not (tmp_path / "x.tsv").exists()


def test_help_of_several_ranks_is_told_once(tmp_path):
    ended = launch(tmp_path, "from cupyrec.cli import main; main(['--help'])", 3)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("usage: cupyrec") == 1


def test_main_is_the_command():
    process = python("-m", "cupyrec", "train", "--train", "no.tsv")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == "cupyrec: no.tsv: must be a file, found nothing there.\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [("data inspect {}", 0), ("data inspect {}.none", 1), ("data inspect", 2), ("", 2)],
)
def test_processes_end_with_their_code(words, code, logs):
    process = python("-m", "cupyrec", *words.format(logs[1]).split())
    out, err = process.communicate()
    assert process.returncode == code
    assert bool(out) == (code == 0)
    assert code == 0 or "cupyrec" in err


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ImportError('libarrow.so.1: no such file')", "libarrow.so.1: no such file"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_a_broken_package_is_a_sentence(source, told, tmp_path):
    (tmp_path / "pyarrow.py").write_text(source)
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    command = "from cupyrec import cli; sys.exit(cli.main(['data', 'inspect', 'x']))"
    process = python("-c", f"{first}; {command}")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == f"cupyrec: {told}. `cupyrec doctor` tells what is missing or broken.\n"


#: At the first use of loops that have changed.
COMPILING = "compiling CPU loops new to this installation: up to a minute\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_whatever_is_done(number, tmp_path):
    arguments = "data", "synthetic", "--rows", 10**9, "--out", tmp_path / "log.tsv"
    process = python(
        "-m", "cupyrec", *arguments,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not list(tmp_path.iterdir()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert err.removeprefix(COMPILING) == "cupyrec: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_help_tells_all_exit_codes(capsys):
    assert trial.command("--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    for text in ("0 done", "1 failed", "2 wrong usage", "130 interrupted", "143 ended by SIGTERM"):
        assert text in told


@pytest.mark.parametrize("words", [["--quiet"], []])
def test_quiet_leaves_the_result_alone(words, logs, tmp_path):
    """On a terminal too, where there is a progress bar else."""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 100))
    arguments = "train", *logs, *trial.SMALL, "--out", tmp_path / "run", *words
    program = [sys.executable, "-m", "cupyrec", *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=end, cwd=ROOT, text=True)
    os.close(end)
    told = b""
    with contextlib.suppress(OSError):  # how a terminal that nobody writes to any more ends
        while part := os.read(terminal, 1 << 16):
            told += part
    os.close(terminal)
    assert (done.returncode, json.loads(done.stdout)["steps"]) == (0, 94)
    if words:
        assert told == b""
    else:
        assert b"device cpu" in told
        assert b"step/s" in told


def test_quiet_keeps_warnings_and_errors(logs, capsys, caplog):
    assert trial.command("train", *logs, *trial.SMALL, "--quiet") == 0
    told = [record.message for record in caplog.records]
    assert told == ["without --out neither model nor metrics are kept"]
    assert trial.command("checkpoint", "inspect", "nowhere", "--quiet") == 1
    assert capsys.readouterr().err.startswith("cupyrec: ")


@pytest.mark.parametrize("words", ["--quiet checkpoint inspect x", "checkpoint inspect x --quiet"])
def test_quiet_stands_anywhere(words, logs, tmp_path, capsys):
    run = tmp_path / "run"
    assert trial.train(logs, run) == 0
    capsys.readouterr()
    assert trial.command(*words.replace("x", str(run)).split()) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert json.loads(told.out)["model"] == "DLRM"


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_ended_by_a_signal_goes_on_to_the_same_bits(number, logs, tmp_path):
    more = "--set", "training.save_every=50", "--set", "model.dropout=0.1"
    arguments = "train", *logs, *trial.SMALL, *more
    run = tmp_path / "run"
    process = python(
        "-m", "cupyrec", *arguments, "--out", run, "--epochs", 400,
        # A shell that runs tests in the background may have made SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for(run / "last", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == ""
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number
        assert f"cupyrec: {number.name}: stopped after step " in err
        assert "Traceback" not in err
    epochs = checkpoint.verify(run / "last")["progress"]["epoch"] + 1
    assert epochs < 400
    assert trial.command("train", *logs, "--resume", run, "--epochs", epochs) == 0
    assert trial.command(*arguments, "--epochs", epochs, "--out", tmp_path / "whole") == 0
    assert trial.files(run / "last") == trial.files(tmp_path / "whole" / "last")
    assert trial.steps(run) == trial.steps(tmp_path / "whole")


def test_a_signal_to_one_rank_ends_all_with_one_code(logs, tmp_path):
    arguments = ["train", *logs, *trial.SMALL, "--out", str(tmp_path / "run")]
    program = (
        f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import trial\n"
        "from cupyrec.parallel import world\n"
        "with trial.at_step(5, lambda: world().rank and trial.interrupt(signal.SIGTERM)):\n"
        f"    sys.exit(trial.command(*{arguments}))\n"
    )
    ended = launch(tmp_path, program, 2)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.count("cupyrec: a signal to another rank: stopped after step ") == 1
    assert checkpoint.verify(tmp_path / "run" / "last")["progress"]["step"] >= 5


def test_a_reader_that_goes_away_is_no_traceback(logs, tmp_path):
    process = python("-m", "cupyrec", "train", *logs, *trial.SMALL, "--out", tmp_path / "run")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert checkpoint.verify(tmp_path / "run" / "last")["progress"]["epoch"] == 1
    process.stderr.close()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("f: must be 1, got 2."), 1, "cupyrec: f: must be 1, got 2.\n"),
        (OSError(28, "No space left on device", "x"), 1, "No space left on device: 'x'\n"),
        (MemoryError("Unable to allocate 1 PiB"), 1, "cupyrec: Unable to allocate 1 PiB\n"),
        (FloatingPointError("nan"), 1, "cupyrec: nan\n"),
        (ModuleNotFoundError("report: needs x."), 1, "cupyrec: report: needs x.\n"),
        (cli.UsageError("no"), 2, "cupyrec: no\n"),
        (KeyboardInterrupt(), 130, "cupyrec: interrupted\n"),
        (Interrupted("SIGTERM"), 143, "cupyrec: interrupted\n"),
        (Interrupted("SIGUSR1", "stopped after step 3"), 130, "cupyrec: stopped after step 3\n"),
    ],
)
def test_exit_codes(error, code, message, capsys, monkeypatch):
    def fail(options):
        raise error

    monkeypatch.setattr("cupyrec.commands.train", fail)
    assert trial.command("train", "--train", "x") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(message)


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("cupyrec.commands.train", lambda options: {}["no such key"])
    with pytest.raises(KeyError, match="no such key"):
        trial.command("train", "--train", "x")


@pytest.mark.parametrize("depth", [1, 3])
def test_ctrl_c_in_a_compiled_loop(depth, monkeypatch, capsys):
    def loop(options):
        error = KeyboardInterrupt()
        for _ in range(depth):
            error, cause = SystemError("returned a result with an exception set"), error
            error.__cause__ = cause
        raise error

    monkeypatch.setattr(data_commands, "data_synthetic", loop)
    assert trial.command("data", "synthetic", "--rows", 1, "--out", "none") == 130
    assert capsys.readouterr().err == "cupyrec: interrupted\n"


def test_a_synthetic_log_is_not_overwritten_unasked(tmp_path, capsys):
    arguments = "data", "synthetic", "--rows", 10, "--out", tmp_path / "log.tsv"
    assert trial.command(*arguments) == 0
    before = (tmp_path / "log.tsv").read_bytes()
    assert trial.command(*arguments, "--seed", 1) == 2
    assert "log.tsv' must not exist without --overwrite.\n" in capsys.readouterr().err
    assert (tmp_path / "log.tsv").read_bytes() == before
    assert trial.command(*arguments, "--seed", 1, "--overwrite") == 0
    assert (tmp_path / "log.tsv").read_bytes() != before
    assert trial.command(*arguments, "--overwrite", "--zipf", "nan") == 2
