"""The bench of plans, each case tiny."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from cupyrec import cpu

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def threads():
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.mark.parametrize("case", ["embedding", "ssd"])
def test_a_case(case, monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    words = ["bench_plan.py", "--case", case, "--tiny", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPTS / "bench_plan.py"), run_name="__main__")
    said = capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    figures = json.loads(said.out)
    names = {"bytes_ratio", "seconds_ratio", "bottleneck"} | (
        {"hit_rate"} if case == "ssd" else set()
    )
    assert {name.split(f"_{case}")[0] for name in figures} == names
    known = {"flops", "memory", "ssd_reads", "ssd_writes"}
    assert {figures[f"bottleneck_{case}_{by}"] for by in ("planned", "measured")} <= known
    assert figures[f"bytes_ratio_{case}"] > 0
    for word in ("host, MB", "checkpoint, MB", "step, ms"):
        assert word in said.err
