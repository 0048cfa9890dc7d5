"""The commands and the Python of README.md work, in the order of the page, on shorter logs."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from pyarrow import parquet

from cupyrec import checkpoint, cli
from cupyrec.data.movielens import _SCHEMA

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (shell,) = (block for block in blocks("sh") if "cupyrec data" in block)
    shell = shell.replace("\\\n", " ").replace("200000", "3000").replace("20000", "700")
    lines = shell.splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line[:8] == "cupyrec "]
    assert [command[0] for command in commands] == [
        *["data"] * 3, "train", "evaluate", "predict", "report"
    ]  # fmt: skip
    for command in commands:
        assert cli.main(command) == 0, command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]  # Git ignores them
    clicks = parquet.read_table("data/clicks.parquet")["probability"].to_numpy()
    assert clicks.shape == (700,)
    assert Path("runs/mine/report.html").is_file()

    names: dict = {}
    for block in blocks("python"):
        if "sim" not in block:
            exec(compile(block, "README.md", "exec"), names)  # ours, not the user's
    assert names["clicks"].shape == (700,)
    assert "'auc': 0." in capsys.readouterr().out
    again = names["DLRM"]()
    checkpoint.load("runs/by-hand", again)
    batch = names["batch"]
    assert np.array_equal(
        names["model"].eval()(batch.dense, batch.ids).numpy(),
        again.eval()(batch.dense, batch.ids).numpy(),
    )


def test_what_readme_shows_of_the_devices(sim, capsys):
    (line,) = (line for line in PAGE.splitlines() if "--device cuda" in line)
    options = cli._parser().parse_args(shlex.split(line, comments=True)[1:])
    assert (options.command, options.device) == ("train", "cuda")
    (own,) = (block for block in blocks("python") if "sim" in block)
    exec(compile(own, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert re.search(r"# (out of bounds at .*)$", own, re.MULTILINE)[1] in told


def test_the_server_of_readme_answers_and_goes(tmp_path, monkeypatch, capsys):
    """Its block of shell as it stands, but for a port that is free and what pip would install."""
    monkeypatch.chdir(tmp_path)
    _SCHEMA.save("schema.toml")
    rows = [f"{i % 2}\t{i % 9}\t{i}\t3\tM\twriter\t55105\t1997\tComedy\n" for i in range(100)]
    Path("train.tsv").write_text("".join(rows))
    words = "--train train.tsv --valid train.tsv --schema schema.toml --out runs/quickstart"
    assert cli.main(["train", *words.split()]) == 0
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    (block,) = (block for block in blocks("sh") if "cupyrec serve" in block)
    block = re.sub("^pip .*$", "", block, flags=re.MULTILINE).replace("8000", str(port))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-e", "-c", block]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (output,) = told["outputs"]
    assert (told["model_name"], output["name"], output["shape"]) == ("dlrm", "probability", [2])
    assert 0 < min(output["data"]) < max(output["data"]) < 1
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0  # nobody listens any more
