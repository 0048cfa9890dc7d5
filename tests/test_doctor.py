"""Machines on which something is missing or broken: what hangs, what ends its process."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trial
from job import launch

from cupyrec import doctor
from cupyrec.doctor_checks import Finding

ROOT = Path(__file__).parents[1]
ENOUGH = 120.0  # seconds, on a machine that does much else
NAMES = [name for group in doctor.GROUPS.values() for name in group]


def run(*arguments, **environment):
    program = (
        "import sys\n"
        "from cupyrec import cli, doctor\n"
        f"doctor.examine.__defaults__ = tuple(doctor.GROUPS), {ENOUGH}\n"
        "code = cli.main(sys.argv[1:])\n"
        "assert not {'numpy', 'numba', 'cupy', 'mpi4py'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    path = os.pathsep.join([environment.pop("first", ""), str(ROOT)]).strip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Put a module of this name and source before all others."""

    def put(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        if str(tmp_path) not in sys.path:
            monkeypatch.syspath_prepend(tmp_path)

    return put


def test_a_machine_on_which_training_works():
    done = run()
    told = json.loads(done.stdout)
    assert (done.returncode, told["wrong"]) == (0, []), done
    assert list(told["findings"]) == NAMES
    for name, finding in told["findings"].items():
        assert f"{finding['state']:7} {name:17} {finding['found']}\n" in done.stderr
        assert (finding["remedy"] == "") == (finding["state"] == "ok")
        assert finding["remedy"] in done.stderr
    assert "\033" not in done.stderr


def test_broken_numpy(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('libopenblas.so.0: no such file')")
    done = run("--quiet", first=str(tmp_path))
    told = json.loads(done.stdout)
    assert done.returncode == 1, done
    assert {"NumPy", "CPU loops", "cores", "commands"} <= set(told["wrong"])
    assert told["findings"]["cupyrec"]["state"] == "ok"
    finding = told["findings"]["NumPy"]
    assert finding["found"] == "ImportError: libopenblas.so.0: no such file"
    assert finding["remedy"].endswith("pip install --force-reinstall numpy threadpoolctl")
    assert len(done.stderr.splitlines()) == 2 * len(told["wrong"])  # quiet: the rest is left out
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["mpi4py", "cupy"])
def test_what_hangs_ends_with_its_own_processes(name, broken, tmp_path):
    broken(
        name,
        "import subprocess, time\n"
        f"sleeper = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(sleeper.pid))\n"
        "time.sleep(600)",
    )
    group = "mpi" if name == "mpi4py" else "cuda"
    start = time.monotonic()
    name, *_ = doctor.GROUPS[group]
    first, *others = doctor.examine([group], patience=8.0).values()
    assert time.monotonic() - start < ENOUGH
    assert first[:2] == ("wrong", "no answer")
    assert {*others} == {("wrong", f"not looked at: {name} came before", f"see {name}")}
    check_ends((tmp_path / "pid").read_text())


def check_ends(process):
    stat = Path("/proc", process, "stat")
    deadline = time.monotonic() + ENOUGH
    while stat.exists() and stat.read_text().split()[2] != "Z":  # of an init that reaps nobody
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_hangs_too(number, tmp_path):
    pid = tmp_path / "pid"
    source = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "cupy.py").write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyrec", "doctor"], text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + ENOUGH
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=ENOUGH)
    assert (process.returncode, out, err) == (128 + number, "", "cupyrec: interrupted\n")
    check_ends(pid.read_text())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import os, sys; print('no btl', file=sys.stderr, flush=True); os._exit(7)",
         "ended with code 7: no btl"),
        ("raise SystemExit('half installed')", "ended with code 1: half installed"),
        ("raise ImportError('libcudart\\nwhere?')", "ImportError: libcudart"),
        ("raise KeyError", "KeyError"),
    ],
)  # fmt: skip
def test_what_ends_its_process(source, found, broken):
    broken("cupy", source)
    findings = doctor.examine(["cuda"], patience=ENOUGH)
    assert findings["CuPy"][:2] == ("wrong", found)
    assert "cupyrec[cuda12]" in findings["CuPy"].remedy
    assert findings["NVRTC"].state == findings["simulator"].state == "wrong"


def test_what_a_library_prints_is_no_finding(broken):
    broken("mpi4py", "print('cupyrec doctor'); print('hello', end=''); __version__ = '9'")
    assert doctor.examine(["mpi"], patience=ENOUGH)["mpi4py"] == Finding("ok", "9")


@pytest.mark.parametrize("group", ["machine", "cpu"])
def test_a_home_that_is_none(group, monkeypatch):
    for name in ("HOME", "NUMBA_CACHE_DIR", "CUPYREC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/none")
    findings = doctor.examine([group], patience=ENOUGH)
    assert list(findings) == list(doctor.GROUPS[group])
    assert not [name for name, finding in findings.items() if finding.state == "wrong"]


def test_no_process_can_be_started(monkeypatch, capsys, caplog):
    def fail(*arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with caplog.at_level(logging.INFO, "cupyrec"):
        assert trial.command("doctor") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["wrong"] == NAMES
    assert "Resource temporarily unavailable" in told["findings"]["cupyrec"]["found"]


def test_of_several_ranks_one_tells(tmp_path):
    program = (
        "from cupyrec import cli, doctor\n"
        "doctor.GROUPS = {name: doctor.GROUPS[name] for name in ['mpi']}\n"
        f"doctor.examine.__defaults__ = ['mpi'], {ENOUGH}\n"
        "cli.main(['doctor'])"
    )
    ended = launch(tmp_path, program, 2)
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["wrong"]) == (0, [])
    assert ended.stderr.count("mpi4py") >= 1
    assert told["findings"]["MPI"]["state"] == "ok"


@pytest.mark.parametrize(
    ("terminal", "environment", "painted"),
    [
        (True, {"TERM": "xterm"}, "\033[31mwrong  \033[0m"),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, "\033[31mwrong  \033[0m"),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "wrong  "),
        (True, {"TERM": "dumb"}, "wrong  "),
        (True, {}, "wrong  "),
        (False, {"TERM": "xterm"}, "wrong  "),
    ],
)
def test_colours(terminal, environment, painted, monkeypatch):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert doctor._painted("wrong") == painted
