"""Blocks of shell that start ranks or servers, as they stand on README's and docs' pages.

Alone what pip would install is left out, and a port that is free takes the place of theirs.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trial
from pyarrow import parquet

from cupyrec import cli

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def shell(block: str, folder: Path) -> list[dict]:
    """The lines of JSON that a block prints, which must succeed."""
    block = re.sub("^pip .*$", "", block, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_train_evaluate_predict_and_go_on(tmp_path):
    for file, seed in (("train", 1), ("valid", 2), ("test", 3)):
        for end in (".tsv", ".tsv.gz"):
            made = ["--rows", "700", "--seed", str(seed), "--out", f"{tmp_path}/data/{file}{end}"]
            assert cli.main(["data", "synthetic", *made]) == 0
    (block,) = (block for block in blocks("README.md", "sh") if "mpirun" in block)
    trained, evaluated, predicted = shell(block, tmp_path)
    assert evaluated["test_auc"] > 0.5
    assert predicted["rows"] == 700

    (block,) = blocks("docs/exchange.md", "sh")
    *_, resumed = shell(block, tmp_path / "data")
    assert resumed["steps"] == 2 * trained["steps"]
    assert parquet.read_table(tmp_path / "data/clicks.parquet").num_rows == 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, of which the last checkpoint counts, as nothing validates it, and the
    files that docs/serving.md speaks of."""
    folder = tmp_path_factory.mktemp("served")
    train, schema = trial.write_logs(folder)[:2], ["--schema", folder / "schema.toml"]
    assert trial.train(train + schema, folder / "runs" / "mine") == 0
    trial.write_log(folder / "day_2.tsv", 300, seed=3)
    (request,) = blocks("docs/serving.md", "json")
    (folder / "request.json").write_text(request)
    return folder


@pytest.fixture
def serving(folder):
    """A function that starts a command that serves; it returns the port, and what ends it."""
    started = []

    def start(command: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = str(listening.getsockname()[1])
        command = command.replace("8000", port)
        if "mpirun" in command:
            command = command.replace("mpirun", "mpirun --oversubscribe")  # here are few cores
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=ENVIRONMENT,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        said = ""
        while f" at http://127.0.0.1:{port}" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        return port

    yield start
    for process in started:
        process.send_signal(signal.SIGUSR1)  # which mpirun passes on
        assert process.communicate(timeout=120) and process.returncode == 0


def test_a_server_is_asked_and_takes_a_newer_checkpoint(folder, serving):
    start, ask, renew, ranks = blocks("docs/serving.md", "sh")
    port = serving(start.splitlines()[-1])
    (before,) = shell(ask.replace("8000", port), folder)
    assert before["outputs"][0]["shape"] == [2]

    (client,) = (text for text in blocks("docs/serving.md", "python") if "tritonclient" in text)
    names: dict = {}
    exec(client.replace("8000", port), names)  # ours, not a stranger's
    assert names["client"].infer("dlrm", names["inputs"]).as_numpy("probability").shape == (2,)

    trained, loaded = shell(renew.replace("8000", port), folder)
    assert (trained["samples"], loaded) == (300, {})
    (after,) = shell(ask.replace("8000", port), folder)
    assert after["model_version"] != before["model_version"]

    (same,) = shell(ask.replace("8000", serving(ranks)), folder)
    assert same == after
