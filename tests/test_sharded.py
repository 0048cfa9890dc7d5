"""`cupyrec serve` under mpirun: one front, and each rank with its part of the rows."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import saved
import trial

from cupyrec.embedding import CachedSSD
from cupyrec.parallel import Communicator
from cupyrec.serving import Predictor
from cupyrec.serving.sharded import Front

RANKS = 4


class Served:
    """A job that serves the last checkpoint of a folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("mpirun"), "-n", str(RANKS), "--oversubscribe",
             sys.executable, "-m", "cupyrec", "serve", folder, "--port", "0", *flags],
            env=os.environ
            | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            | {"PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.DEVNULL, stderr=self.log.open("wb"),
        )  # fmt: skip
        self.port = int(self.waited_for(r"^serving dlrm .*:(\d+)$"))

    def waited_for(self, pattern: str) -> str:
        for _ in range(1200):
            if found := re.search(pattern, self.log.read_text(), re.MULTILINE):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def ask(self, path: str, said: dict | None = None) -> tuple[int, dict]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, 60)) as one:
            one.request("GET" if said is None else "POST", path, said and json.dumps(said))
            answer = one.getresponse()
            return answer.status, json.loads(answer.read())

    def predicted(self, columns: dict) -> tuple[str, np.ndarray]:
        inputs = [
            {"name": name, "shape": [len(values)], "datatype": kind, "data": values}
            for name, (kind, values) in columns.items()
        ]
        status, told = self.ask("/v2/models/dlrm/infer", {"inputs": inputs})
        assert status == 200, told
        return told["model_version"], np.array(told["outputs"][0]["data"], np.float32)

    def reload(self) -> tuple[int, dict]:
        return self.ask("/v2/repository/models/dlrm/load", {})

    def ranks(self) -> list[Path]:
        """/proc of each rank."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                command = (path / "cmdline").read_bytes()
                mine = f"{self.log.parent}".encode() in command and b"mpirun" not in command
                if mine and any(word.startswith(b"OMPI_COMM_WORLD_RANK=") for word in words):
                    found.append(path)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


def point(folder: Path, checkpoint: Path) -> None:
    (folder / "next").symlink_to(checkpoint)
    (folder / "next").rename(folder / "last")


def columns_of(log: Path) -> dict:
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    _, prices, users, items = zip(*rows, strict=True)
    return {
        "price": ("FP64", [float(price) if price else None for price in prices]),
        "user": ("INT64", [*map(int, users)]),
        "item": ("BYTES", [*items]),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """A full one, two deltas on it, and one of another run, which has a codec; beside logs."""
    folder = tmp_path_factory.mktemp("trained")
    logs = trial.write_logs(folder)
    deltas = ["--set", "training.deltas=5", "--set", "training.save_every=3"]
    assert trial.train(logs, folder / "run", *deltas) == 0
    assert trial.train(logs, folder / "other", "--seed", "5", "--codec", "int8") == 0
    steps = sorted((folder / "run" / "checkpoints").iterdir())
    assert len(steps) >= 3
    return [*steps[:3], (folder / "other" / "last").resolve()]


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[str, np.ndarray]:
    """What `cupyrec predict` says, by version."""
    folder, found = checkpoints[0].parents[2], {}
    for number, checkpoint in enumerate(checkpoints):
        output = folder / f"{number}.npy"
        assert trial.command("predict", checkpoint, "--data", folder / "test.tsv",
                             "--output", output) == 0  # fmt: skip
        with Predictor(checkpoint) as predictor:
            found[predictor.version] = np.load(output)
    return found


@pytest.fixture
def served(checkpoints, tmp_path):
    point(tmp_path, checkpoints[0])
    served = Served(tmp_path, "--watch", "0")
    yield served
    served.end()


def test_ranks_answer_as_predict_does_and_change_together(served, checkpoints, expected):
    folder, columns = served.log.parent, columns_of(checkpoints[0].parents[2] / "test.tsv")
    versions = [*expected]
    assert served.predicted(columns)[0] == versions[0]
    for number in (0, 1, 2, 3, 0):
        point(folder, checkpoints[number])
        assert served.reload() == (200, {})
        version, got = served.predicted(columns)
        assert version == versions[number]
        assert (got == expected[version]).all()
        one = {name: (kind, values[7:8]) for name, (kind, values) in columns.items()}
        assert served.predicted(one)[1] == expected[version][7]

    parts, name = folder / "parts", f"{RANKS - 1:05}-of-{RANKS:05}"
    assert trial.command("checkpoint", "reshard", checkpoints[3], parts, "--shards", RANKS) == 0
    saved.spoil(parts, f"embedding.groups.4.{name}.vectors")
    point(folder, parts)
    status, told = served.reload()  # the front's own shard is good
    assert status == 500
    assert f"rank {RANKS - 1} must get on" in told["error"]
    assert f"{name}.vectors.npy' must have crc32" in told["error"]
    assert (served.predicted(columns)[1] == expected[versions[0]]).all()

    ranks = served.ranks()
    assert len(ranks) == RANKS
    for _ in range(30):  # the front's workers spin a moment
        before = [ticks(rank) for rank in ranks]
        time.sleep(1)
        used = [after - b for after, b in zip(map(ticks, ranks), before, strict=True)]
        if max(used) < 0.2 * os.sysconf("SC_CLK_TCK"):
            break
    else:
        raise AssertionError(used)
    assert served.predicted(columns)[0] == versions[0]  # who sleep still wake up

    served.process.send_signal(signal.SIGUSR1)  # which mpirun passes on
    assert served.process.wait(60) == 0


def ticks(process: Path) -> int:
    """Processor time of a process."""
    words = (process / "stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_a_rank_that_dies_ends_all(served):
    (last,) = [p for p in served.ranks() if b"RANK=3" in (p / "environ").read_bytes()]
    os.kill(int(last.name), signal.SIGKILL)
    assert served.process.wait(60) != 0
    with pytest.raises(OSError):
        served.ask("/v2/health/live")


def test_the_front_says_that_it_is_there_until_the_end(checkpoints, monkeypatch):
    said, silence = [], [time.monotonic()]

    def note(_, what, value):
        said.append(value["do"])
        silence.append(time.monotonic())

    monkeypatch.setattr(Communicator, "broadcast_json", note)
    front = Front(Predictor(checkpoints[0]), Communicator())
    for _ in range(600):
        if len(said) >= 3:
            break
        time.sleep(0.1)
    assert set(said) == {"rest"}
    assert max(np.diff(silence)) < Communicator.stall_timeout / 4
    rows = np.zeros((1, front.num_dense), "f"), np.zeros((1, front.num_tables), np.int64)
    front.close()
    with pytest.raises(RuntimeError, match="must be open"):
        front.probabilities(*rows)
    time.sleep(2)
    assert said[-1] == "stop"
    assert said.count("stop") == 1


def test_the_end_waits_for_no_checkpoint_that_is_read(checkpoints, tmp_path, monkeypatch):
    predictor = Predictor(checkpoints[0], tier=CachedSSD(path=tmp_path / "rows", cache_mb=1))
    read, reads, may, raised = predictor.read, threading.Event(), threading.Event(), []

    def slowly(path):
        staged = read(path)
        reads.set()
        assert may.wait(60)
        return staged

    def update():
        with pytest.raises(InterruptedError, match="is about to end"):
            front.update(checkpoints[3])
        raised.append(True)

    monkeypatch.setattr(predictor, "read", slowly)
    front = Front(predictor, Communicator())
    updating = threading.Thread(target=update)
    updating.start()
    assert reads.wait(60)
    front.close()
    updating.join(60)
    assert raised
    with pytest.raises(InterruptedError, match="is about to end"):
        front.update(checkpoints[3])
    may.set()
    for _ in range(600):
        if not [*(tmp_path / "rows").iterdir()]:
            return
        time.sleep(0.1)
    raise AssertionError("what was read must be dropped")
