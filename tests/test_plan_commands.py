"""The command that plans: its table, its JSON line, its refusals."""

import json
import re
from pathlib import Path

import pytest

from cupyrec import cli
from cupyrec.data import criteo_schema
from cupyrec.hardware import Hardware
from cupyrec.plan_commands import amount

HOST = Path(__file__).parents[1] / "scripts" / "configs" / "hardware" / "h200_host.toml"


@pytest.fixture
def run(tmp_path, capsys, caplog):
    """Plan by the command; return exit code, stdout, and what it told."""
    schema = tmp_path / "schema.toml"
    schema.write_text(criteo_schema(buckets=False).to_toml())

    def call(*words, hardware=HOST):
        source = ["--hardware", hardware] if hardware else []
        words = ["plan", "--schema", schema, *source, *words]
        caplog.clear()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit:  # argparse's
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, caplog.text + said.err

    return call


def test_a_plan(run, tmp_path):
    (tmp_path / "run.toml").write_text("[model]\nname = 'dcn'\nembedding_dim = 32\n")
    code, out, told = run(
        "--config", tmp_path / "run.toml", "--set", "model.deep=[64]", "--ids", "2.5e9",
        "--ids-per-table", "C3=1e9", "C1=10", "--ranks", "8", "--batch-size", "65536",
    )  # fmt: skip
    assert code == 0
    line = json.loads(out)
    assert line["tables"]["C3"] == pytest.approx(1e8 * line["tables"]["C1"])
    assert line["tables"]["C2"] == pytest.approx(line["tables"]["C3"] * 2.5 / 24)
    assert line["device"] == "cuda"
    assert line["hardware"] == json.loads(json.dumps(line["hardware"]))
    assert line["bottleneck"] in line["seconds"]
    assert sum(line["bytes"]["device"].values()) < 141e9
    for word in ("a GPU's memory", "rows", "C3", "18 others", "<- bottleneck", "samples/s"):
        assert word in told


def test_what_does_not_fit_is_exit_code_2(run):
    code, out, told = run("--ids", "4e10", "--ranks", "8")
    assert (code, out) == (2, "")
    assert "plan: a GPU's memory must have 754 GB, got 141 GB. What would fit: " in told
    assert "embedding.tier=cached_ssd; 48 ranks" in told
    code, _, told = run("--ids", "1e18", "--ranks", "8")
    assert code == 2
    assert "No other tier, more ranks or rows of fewer bytes would make it fit." in told
    small = HOST.with_name("small_cpu_host.toml")
    code, _, told = run("--ids", "1e12", hardware=small)
    assert code == 2
    assert "fit; more ranks are planned only for hardware with [link]." in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--ids must tell of 26 tables, got none"),
        (["--ids", "many"], "must be a number of at least 0, got 'many'"),
        (["--ids", "1e6", "--ids-per-table", "C27=5"], "TABLE=N of C1, .*, got 'C27=5'"),
        (["--ids", "1e6", "--ids-per-table", "C1=x"], "TABLE=N, got 'C1=x'"),
        (["--ids", "1e6", "--set", "model.name=gpt"], "model.name must be one of"),
        (["--ids", "1e6", "--set", "optimizer.name=lion"], "optimizer.name must be one of"),
        (["--ids", "1e6", "--set", "model.top=[0]"], "must be at least 1, got 0"),
        (["--ids", "1e6", "--set", "model.tops=[1]"], "did you mean 'top'"),
        (["--ids", "1e6", "--measure"], "not allowed with argument"),
    ],
)
def test_wrong_usage_is_exit_code_2(run, words, message):
    code, out, told = run(*words)
    assert (code, out) == (2, "")
    assert re.search(message, told)


def test_measured_hardware_is_of_this_cpu(run, monkeypatch, tmp_path):
    asked = []
    host = dict(memory=64e9, memory_bandwidth=1e10, random_lines=1e7, cores=2, float32=1e11)

    def measured(folder):
        asked.append(folder)
        return Hardware.from_dict({"host": host})

    monkeypatch.setattr("cupyrec.plan_commands.measure_hardware", measured)
    code, out, _ = run("--ids", "1e6", "--measure", hardware=None)
    assert code == 0
    assert json.loads(out)["device"] == "cpu"
    code, _, told = run("--ids", "1e6", "--measure", tmp_path, "--ranks", "2", hardware=None)
    assert code == 2
    assert "must have [link]" in told
    assert asked == [None, str(tmp_path)]
    code, _, told = run("--ids", "1e6", "--measure", "--device", "cuda", hardware=None)
    assert code == 2
    assert "--measure must come with --device cpu" in told


def test_amounts():
    assert [amount(x) for x in (0.0, 999.0, 1e3, 2.5e6, 1.234e15)] == [
        "0 B", "999 B", "1 kB", "2.5 MB", "1.23 PB",
    ]  # fmt: skip
